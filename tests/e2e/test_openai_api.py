"""The OpenAI API of `headrace up`, over real processes: the official client, curl's view, and a fuzzer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from support.otlp_receiver import Receiver
from support.running_up import StartUp, Up, running_up

from shared.telemetry.traces import covered_us

MODEL = "smollm2-135m-instruct"
ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is NATS?"}],
    "max_tokens": 16,
    "seed": 5,
    "n": 2,
}
STREAMED: Any = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HERE = Path(__file__).parent
# Most fields of a completion are those of a chat, and a message is counted as it is asked for.
ALIKE = """
[[operations]]
include-path-regex = "^/v1/(completions|messages/count_tokens)$"
phases.coverage.enabled = false
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(
        tmp_path_factory.mktemp("api"), "--durable", HEADRACE_HTTP="127.0.0.1:0", HEADRACE_SIM="step=500"
    ) as running:
        yield running


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.http_url, api_key="any", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
async def later(up: Up) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=up.http_url, api_key="any", max_retries=0, timeout=120) as client:
        yield client


def texts_of(chunks: list[Any]) -> list[str]:
    return [
        "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == i)
        for i in (0, 1)
    ]


def test_official_client_gets_its_answers(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED)
    texts = [choice.message.content for choice in whole.choices]
    chunks = list(client.chat.completions.create(**STREAMED))
    assert texts_of(chunks) == texts
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 32
    done = client.completions.create(model=MODEL, prompt="The sea", max_tokens=4)
    assert done.choices[0].finish_reason == "length"
    assert [m.id for m in client.models.list()] == [MODEL]


async def test_the_official_client_async_many_at_once(later: AsyncOpenAI) -> None:
    whole = await later.chat.completions.create(**ASKED)
    texts = [choice.message.content for choice in whole.choices]

    async def streamed() -> list[str]:
        return texts_of([chunk async for chunk in await later.chat.completions.create(**STREAMED)])

    assert await asyncio.gather(*(streamed() for _ in range(50))) == [texts] * 50


def test_the_helpers_of_the_official_client(client: OpenAI) -> None:
    asked = {**ASKED, "n": 1, "max_tokens": 200, "stop": ["e"]}
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert kinds >= {"chunk", "content.delta", "content.done"}
    assert final.choices[0].finish_reason == "stop"  # of any other the helper makes an exception
    raw = client.chat.completions.with_raw_response.create(**asked)
    assert raw.headers["x-request-id"] == raw.parse().id


def test_errors_reach_the_official_client(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**{**ASKED, "temperature": 5})
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="not supported yet"):
        client.completions.create(model=MODEL, prompt="x", suffix="y")
    with pytest.raises(openai.BadRequestError, match="no executor of this model can follow a grammar"):
        client.chat.completions.create(**ASKED, response_format={"type": "json_object"})
    tool: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    assert client.chat.completions.create(**ASKED, tools=[tool]).choices[0].finish_reason
    with pytest.raises(openai.BadRequestError, match="for the parameters of 'clock'"):
        client.chat.completions.create(**ASKED, tools=[tool], tool_choice="required")


def test_leaving_a_stream_frees_everything(client: OpenAI, up: Up) -> None:
    endless: Any = {**STREAMED, "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(**endless)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    stream.close()
    services = {"running": 1}
    while services["running"]:
        answered = json.loads(up.run("status", "--json").stdout)["services"]
        services = next(s for s in answered if s["kind"] == "scheduler")
    gateway = next(s for s in answered if s["kind"] == "gateway")
    assert (gateway["url"] + "/v1", gateway["health"]) == (up.http_url, "ok")


def test_a_port_that_is_taken(start_up: StartUp) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start_up(wait=False, HEADRACE_HTTP=f"127.0.0.1:{port}")
        assert up.process.wait(30) == 1
    output = up.log.read_text()
    assert f"the gateway cannot listen on 127.0.0.1:{port} (Address already in use)" in output
    assert "set `http` to another host:port, or to off" in output


def health(http: httpx.Client, status: int) -> dict[str, str]:
    """The body of `/health` once it has this status."""
    while (state := http.get("/health")).status_code != status:
        pass
    return dict(state.json())


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


def test_keys_health_drain_and_trace(receiver: Receiver, start_up: StartUp, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme secret\n")
    up = start_up(
        HEADRACE_HTTP="127.0.0.1:0",
        HEADRACE_HTTP_KEYS=str(keys),
        HEADRACE_SIM="step=5000",
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
    )
    with httpx.Client(base_url=up.http_url.removesuffix("/v1"), timeout=120) as http:
        assert http.get("/v1/models").status_code == 401
        assert health(http, 200) == {"status": "ok"}
        os.kill(up.child("executor"), signal.SIGSTOP)
        assert health(http, 503)["reason"] == "waiting for: executor"
        os.kill(up.child("executor"), signal.SIGCONT)
        assert health(http, 200) == {"status": "ok"}
    with OpenAI(base_url=up.http_url, api_key="secret", max_retries=0) as client:
        asked: Any = {**STREAMED, "max_tokens": 200, "n": 1}
        asked["extra_body"] = {"ignore_eos": True, "request_id": "traced"}
        headers = {"traceparent": TRACE}
        chunks = iter(client.chat.completions.create(**asked, extra_headers=headers))
        next(chunks)
        stopping = threading.Thread(target=up.stop, args=(signal.SIGTERM,))
        stopping.start()
        rest = list(chunks)  # a drain lets it end
        stopping.join()
    assert rest[-1].usage.completion_tokens == 200
    assert up.process.returncode == 0
    native = receiver.wait_for(["traced"], 120)["traced"]
    (edge,) = (s for s in receiver.spans if s.name == "POST /v1/chat/completions")
    assert (edge.trace_id, edge.parent_id) == (native.trace_id, TRACE.split("-")[2])
    assert native.parent_id == edge.span_id
    assert edge.attributes["tenant"] == native.attributes["tenant"] == "acme"
    parts = [s for s in receiver.spans if s.parent_id in (edge.span_id, native.span_id) and s != native]
    covered = covered_us((s.start_ns, s.end_ns) for s in parts)
    assert covered >= 0.95 * (edge.end_ns - edge.start_ns)


def test_the_document_is_the_truth(up: Up, tmp_path: Path) -> None:
    """No 5xx, no answer that the document does not declare, and nothing refused that the schema allows but
    for a reason in schemathesis_hooks.py. `scripts/soak http` runs it for 10 minutes, with all paths."""
    base = up.http_url.removesuffix("/v1")
    config = (HERE / "schemathesis.toml").read_text()
    # The 3,400 cases of flaws in ollama's two requests take a minute, longer than those of all other paths.
    length = ["--exclude-path-regex", "^/api/(chat|generate)$"]
    if "API_FUZZ_S" in os.environ:
        length = ["--max-time", os.environ["API_FUZZ_S"]]
    else:
        config += ALIKE
    (tmp_path / "schemathesis.toml").write_text(config)
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "st"), "--config-file", "schemathesis.toml",
            "run", f"{base}/openapi.json", "--seed", "1", "-n", "3", "--phases", "coverage,fuzzing",
            "--exclude-checks", "positive_data_acceptance", "--no-shrink", "--continue-on-failure", *length,
        ],
        env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE)},
        cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if kept := os.environ.get("API_FUZZ_OUT"):
        Path(kept).write_text(done.stdout.replace(base, "http://gateway").replace(f"{HERE.parents[1]}/", ""))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert ("43 passed" if "API_FUZZ_S" in os.environ else "41 passed") in done.stdout


def test_a_stream_goes_on_when_services_die(client: OpenAI, up: Up) -> None:
    """The text is that of an undisturbed run: what comes again when the stream starts over is left out."""
    asked: Any = {"model": MODEL, "prompt": "x", "seed": 4, "max_tokens": 600, "stream": True}

    def text(victims: dict[int, int]) -> str:
        pieces = []
        chunks = client.completions.create(**asked, extra_body={"ignore_eos": True})
        for number, chunk in enumerate(chunks):
            pieces.append(chunk.choices[0].text)
            if number in victims:
                os.kill(victims[number], signal.SIGKILL)
        return "".join(pieces)

    undisturbed = text({})
    (server,) = (pid for pid in up.children() if "nats-server" in Path(f"/proc/{pid}/cmdline").read_text())
    assert text({50: up.child("detokenizer")}) == undisturbed
    assert text({50: server}) == undisturbed
