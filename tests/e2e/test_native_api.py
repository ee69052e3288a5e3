"""The native API over real processes, with nats-py alone. A client that knows only the README, and shares no
code with the project, gets its answers. What a clumsy or hostile client sends gets a typed error that names
the field and the mend, and the services live on as if nothing had been."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import nats
import pytest
from nats.aio.client import Client as Nats
from nats.errors import MaxPayloadError
from support.running_up import Up, assert_all_free, assert_idle, statuses

MODEL = "smollm2-135m-instruct"
SUBJECT = f"headrace.v1.generate.public.{MODEL}"
GOOD = {"prompt": "Hello", "max_tokens": 3, "seed": 1}


def j(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


SCRIPT = Path(__file__).with_name("stranger.py")


def stranger(up: Up, *args: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), up.nats_url, *args],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_stranger_chats_streams_and_cancels(up: Up) -> None:
    answer = stranger(up, "chat")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    streamed = stranger(up, "stream")
    assert (streamed["types"][0], streamed["types"][-1]) == ("accepted", "done")
    assert streamed["usage"]["completion_tokens"] == 12
    cancelled = stranger(up, "cancel")
    assert (cancelled["last"], cancelled["code"]) == ("error", 499)
    assert_idle(up)


def test_200_streams_at_once_on_the_simulated_engine(up: Up) -> None:
    assert stranger(up, "many", "200") == {"streams": 200, "tokens": 200 * 24, "texts": 200}
    assert_idle(up)


async def test_an_error_has_the_service_headers(nc: Nats) -> None:
    reply = await nc.request(SUBJECT, b'{"prompt": "x", "max_tokens": -1}', timeout=60)
    assert reply.headers is not None
    assert reply.headers["Nats-Service-Error-Code"] == "400"
    error = json.loads(reply.data)["error"]
    assert (error["code"], error["param"], error["retryable"]) == (400, "max_tokens", False)
    assert reply.headers["Nats-Service-Error"] == error["message"]


# name: body, code, param, a part of the message
BAD: dict[str, tuple[bytes, int, str | None, str]] = {
    "empty": (b"", 400, None, "send for example"),
    "not json": (b'{"prompt": ', 400, None, "send for example"),
    "array": (b'["prompt"]', 400, None, "send for example"),
    "msgpack array": (msgpack.packb([1]), 400, None, "must be a JSON object"),
    "msgpack list key": (b"\x81\x90\x01", 400, None, "send for example"),
    "not utf-8": (b'{"prompt": "\xff\xfe"}', 400, None, "send for example"),
    "lone surrogate": (rb'{"prompt": "\ud800"}', 400, "prompt", "send whole characters"),
    "deep": (b'{"prompt":' * 100_000, 400, None, "send for example"),
    "deep in a message": (
        b'{"messages":[{"role":"user","content":"x","a":' + b"[" * 900 + b"]" * 900 + b"}]}",
        400, "messages", "nested too deeply; send flat",
    ),
    "huge int": (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", 400, None, "send for example"),
    "int of 400 digits": (j(top_k=10**400), 400, "top_k", "less than or equal"),
    "infinite": (b'{"prompt": "x", "temperature": 1e999}', 400, "temperature", "finite number"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', 400, "temperature", "finite number"),
    "negative": (j(temperature=-1), 400, "temperature", "greater than or equal to 0"),
    "boolean": (j(max_tokens=True), 400, "max_tokens", "valid integer"),
    "wrong type": (j(prompt={"a": 1}), 400, "prompt", "one text or one list"),
    "mixed prompt": (j(prompt=[1, "a"]), 400, "prompt", "one text or one list"),
    "unknown field": (j(max_token=5), 400, "max_token", "did you mean `max_tokens`?"),
    "other model": (j(model="gpt"), 400, "model", "send that one, or none"),
    "no prompt": (b'{"max_tokens": 1}', 400, None, "give either `messages` or `prompt`"),
    "empty prompt": (j(prompt=""), 400, "prompt", "the prompt is empty"),
    "empty ids": (j(prompt=[]), 400, "prompt", "the prompt is empty"),
    "ids beyond": (j(prompt=[10**9]), 400, "prompt", "not a token id"),
    "prompt over the context": (j(prompt="a b " * 9_000), 400, "prompt", "shorten the prompt"),
    "digits": (j(prompt="1" * 600_000), 400, "prompt", "shorten the prompt"),
    "7 MB": (j(prompt="a" * 7_000_000), 400, "prompt", "7000000 characters"),
    "two million ids": (j(prompt=[1] * 2_000_000), 400, "prompt", "2000000 tokens"),
    "two million lists": (b'{"prompt":[' + b"[]," * 2_000_000 + b"[]]}", 400, "prompt", "one text or one"),
    "seven million lists": (
        b"\x81\xa6prompt\xdd" + (7_000_000).to_bytes(4, "big") + b"\x90" * 7_000_000,
        400, "prompt", "one text or one",
    ),
    "100,000 messages": (
        json.dumps({"messages": [{"role": "user", "content": "x"}] * 100_000}).encode(),
        400, "messages", "at most 4096",
    ),
    "role": (b'{"messages":[{"role":"a b","content":"x"}]}', 400, "messages", "should be 'system'"),
    "part": (
        b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}', 400, "messages", "only parts",
    ),
    "no tokens": (j(max_tokens=0), 400, "max_tokens", "greater than or equal to 1"),
    "negative tokens": (j(max_tokens=-5), 400, "max_tokens", "greater than or equal to 1"),
    "10,000 stops": (j(stop=[f"s{i}" for i in range(10_000)]), 400, "stop", "at most 16"),
    "empty stop": (j(stop=""), 400, "stop", "at least 1"),
    "long stop": (j(stop="s" * 257), 400, "stop", "at most 256"),
    "biases": (j(logit_bias={str(i): 1 for i in range(2000)}), 400, "logit_bias", "at most 1024"),
    "bias beyond": (j(logit_bias={"99999999": 1}), 400, "logit_bias", "not a token id"),
    "many choices": (j(n=1_000_000), 400, "n", "less than or equal to 64"),
    "seed": (j(seed=2**64), 400, "seed", "18446744073709551616"),
    "no time": (j(timeout_s=0), 400, "timeout_s", "greater than 0"),
    "all the time": (b'{"prompt": "x", "timeout_s": Infinity}', 400, "timeout_s", "finite"),
    "long id": (j(request_id="r" * 10_000), 400, "request_id", "pattern"),
    "wild id": (j(request_id="a.>"), 400, "request_id", "pattern"),
    "stream options": (j(stream=True, stream_options={"x": 1}), 400, "stream_options", "is not a field"),
    "too late": (j(timeout_s=1e-9, max_tokens=8000), 408, None, "time"),
}  # fmt: skip


@pytest.fixture
async def nc(up: Up) -> AsyncIterator[Nats]:
    connection = await nats.connect(up.nats_url)
    yield connection
    await connection.close()


async def assert_well(up: Up, nc: Nats, pids: list[int]) -> None:
    """A good request is answered, nothing is held, no process was replaced."""
    reply = await nc.request(SUBJECT, j(), timeout=60)
    assert json.loads(reply.data)["usage"]["completion_tokens"] == 3
    await assert_all_free(nc)
    assert sorted(up.children()) == pids


async def test_each_bad_request_gets_its_error(up: Up, nc: Nats) -> None:
    pids = sorted(up.children())
    wrong = []
    for name, (body, code, param, text) in BAD.items():
        reply = await nc.request(SUBJECT, body, timeout=60)
        error = json.loads(reply.data).get("error", {"code": 200, "param": None, "message": ""})
        headers = reply.headers or {}
        marks = (headers.get("Nats-Service-Error-Code"), headers.get("Headrace-End"))
        good = (error["code"], error["param"], *marks) == (code, param, str(code), "1")
        if not good or text not in error["message"] or len(error["message"]) > 600:
            wrong.append((name, error))
    assert wrong == []
    await assert_well(up, nc, pids)


async def test_subjects_and_ids_are_checked(up: Up, nc: Nats) -> None:
    pids = sorted(up.children())

    async def error_of(subject: str, body: bytes) -> tuple[int, str | None, str]:
        error = json.loads((await nc.request(subject, body, timeout=60)).data)["error"]
        return error["code"], error["param"], error["message"]

    code, param, text = await error_of("headrace.v1.generate.public.gpt-9", j())
    assert (code, param, text) == (
        404, "model", f"no service serves model 'gpt-9'; ask for one of: {MODEL}",
    )  # fmt: skip
    for tenant, wrong in (("=Z1", "subject"), ("a" * 129, "tenant"), ("=FF", "subject")):
        code, param, _ = await error_of(f"headrace.v1.generate.{tenant}.{MODEL}", j())
        assert (code, param) == (400, wrong)
    inbox = nc.new_inbox()
    first = await nc.subscribe(inbox)
    running = j(request_id="twin", max_tokens=8000, ignore_eos=True, stream=True)
    await nc.publish(SUBJECT, running, reply=inbox)
    assert json.loads((await first.next_msg(60)).data)["type"] == "accepted"
    code, param, text = await error_of(SUBJECT, j(request_id="twin"))
    assert (code, param) == (409, "request_id")
    assert "choose another id" in text
    await nc.publish("headrace.v1.cancel.public.twin", b"")
    assert await last_code(first) == 499
    await assert_well(up, nc, pids)


async def last_code(replies: Any) -> int:
    """The code in the last frame of a stream."""
    while True:
        message = await replies.next_msg(60)
        if message.headers and message.headers.get("Headrace-End"):
            return json.loads(message.data)["error"]["code"]


async def test_message_without_an_answer_does_no_harm(up: Up, nc: Nats) -> None:
    pids, services = sorted(up.children()), await statuses(nc)
    scheduler = f"hr.default.scheduler.{services['scheduler']['id']}.in"
    detokenizer = services["detokenizer"]["id"]
    await nc.publish(SUBJECT, j())  # no reply subject
    for reply in (f"{scheduler}.Tokenized", "a.*", ">", "a..b", "_R.x.1", "$SYS.REQ.SERVER.PING", "i" * 600):
        await nc.publish(SUBJECT, j(), reply=reply)
        for ask in ("status", "models", "trace.x", f"tokenize.public.{MODEL}", "generate.public.none"):
            await nc.publish(f"headrace.v1.{ask}", j(), reply=reply)
    for subject in ("cancel.a.=ZZ", "cancel.a." + "b" * 500, "cancel.=FF.x", "trace.=1", "cancel.a.b.c"):
        await nc.publish(f"headrace.v1.{subject}", b"\xff" * 1000)
    junk = (b"", b"\x00", b"\xff" * 70_000, b"\x91" * 5000, b"{}", b"\x96\x01\xa4Beat\xa1a\x01\x01\xa0")
    for data in junk:
        for subject in (
            f"{scheduler}.Tokenized", "hr.default.beat.executor.x",
            f"_R.{detokenizer}.1", f"_R.{detokenizer}.x", f"_R.{detokenizer}.-1",
        ):  # fmt: skip
            await nc.publish(subject, data)
    headers = {"traceparent": "00-" + "g" * 60, **{f"h{i}": "v" * 100 for i in range(500)}}
    reply = await nc.request(SUBJECT, j(), timeout=60, headers=headers)
    assert "usage" in json.loads(reply.data)
    await assert_well(up, nc, pids)


async def test_small_queries_are_answered_or_refused(up: Up, nc: Nats) -> None:
    pids = sorted(up.children())
    asks = [
        ("tokenize", b"", 400, None),
        ("tokenize", b'{"prompt": 5}', 400, "prompt"),
        ("tokenize", BAD["deep in a message"][0], 400, None),
        ("detokenize", b"", 400, "tokens"),
        ("detokenize", b"[" * 100_000, 400, "tokens"),
        ("detokenize", b'{"tokens": [-1]}', 400, "tokens"),
        ("detokenize", b'{"tokens": [1.5]}', 400, "tokens"),
        ("detokenize", b'{"tokens": [' + b"1," * 1_000_000 + b"1]}", 413, "tokens"),
    ]  # fmt: skip
    for verb, body, code, param in asks:
        reply = await nc.request(f"headrace.v1.{verb}.public.{MODEL}", body, timeout=60)
        error = json.loads(reply.data)["error"]
        assert (error["code"], error["param"]) == (code, param), (verb, body[:40], error)
    unknown = await nc.request("headrace.v1.trace." + "x" * 300, b"\xff", timeout=60)
    assert json.loads(unknown.data)["state"] == "unknown"
    await assert_well(up, nc, pids)


async def test_request_over_the_payload_limit_is_refused(up: Up, nc: Nats) -> None:
    pids = sorted(up.children())
    with pytest.raises(MaxPayloadError):
        await nc.publish(SUBJECT, bytes(nc.max_payload + 1))
    output = await asyncio.to_thread(up.run, "request", "-", stdin=json.dumps({"prompt": "a" * 8_400_000}))
    assert output.returncode == 1
    assert "error (payload too large)" in output.stderr
    assert "send less, or raise max_payload" in output.stderr
    await assert_well(up, nc, pids)


async def test_a_long_prompt_does_not_stop_the_heartbeats(up: Up, nc: Nats) -> None:
    """600 kB of digits take two seconds to tokenize; the beat interval here is 0.2 s, death 0.6 s."""
    (tokenizer,) = [s for s in (await statuses(nc)).values() if s["kind"] == "tokenizer"]
    heartbeats = await nc.subscribe(f"hr.default.beat.tokenizer.{tokenizer['id']}")
    long = asyncio.create_task(nc.request(SUBJECT, j(prompt="1" * 600_000), timeout=60))
    received = 0
    while not long.done():
        await heartbeats.next_msg(60)
        received += 1
        assert "usage" in json.loads((await nc.request(SUBJECT, j(), timeout=60)).data), "short ones go on"
    assert json.loads((await long).data)["error"]["code"] == 400
    assert received >= 2
