"""The official client and plain HTTP against a gateway in front of the five actors."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, gateway_status, healthy, remove_gateway

from shared.client import client as client_module
from shared.nats import subjects

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FOREVER = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")
each_test = pytest_asyncio.fixture(loop_scope="module")


@whole_file
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    running = await Pipeline.start(connect, "gateway")
    yield running
    await running.stop()


@whole_file
async def url(pipeline: Pipeline) -> AsyncIterator[str]:
    url = await add_gateway(pipeline)
    await healthy(pipeline)
    yield url
    await remove_gateway(pipeline)


@each_test
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


@each_test
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        yield client


async def test_a_chat_streamed_and_not(client: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 7}
    whole = await client.chat.completions.create(**asked)
    assert whole.object == "chat.completion"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (37, 12)
    (choice,) = whole.choices
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")

    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (49, 32)


async def test_each_chunk_has_the_usage_so_far(client: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": ["The sea", [504, 7, 9]], "n": 2, "max_tokens": 5}
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(**asked, stream=True, stream_options=options)
    *chunks, last = [c async for c in stream]
    for index, prompt in enumerate((2, 2, 3, 3)):
        own = [c.usage for c in chunks if c.choices[0].index == index]
        assert {u.prompt_tokens for u in own if u} == {prompt}
        counts = [u.completion_tokens for u in own if u]
        assert counts == sorted(counts)
        assert (counts[-1], len(counts)) == (5, len(own))
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 20)


async def test_a_stream_without_usage_has_none(client: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 3}
    chunks = [c async for c in await client.chat.completions.create(**asked, stream=True)]
    assert [c.usage for c in chunks] == [None] * len(chunks)
    assert all(c.choices for c in chunks)


async def test_choices_and_prompts_of_a_completion(client: AsyncOpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "prompt": ["The sea", [504, 7]],
        "n": 2,
        "seed": 3,
        "max_tokens": 5,
        "echo": True,
    }
    whole = await client.completions.create(**asked)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    assert [c.text[:7] for c in whole.choices[:2]] == ["The sea"] * 2
    assert len({c.text for c in whole.choices}) == 4
    chunks = [c async for c in await client.completions.create(**asked, stream=True)]
    texts = ["".join(c.text for k in chunks for c in k.choices if c.index == i) for i in range(4)]
    assert texts == [c.text for c in whole.choices]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20


async def test_a_completion_of_no_tokens_is_its_prompt(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    asked: Any = {"model": MODEL, "prompt": ["The sea", [504, 7]], "n": 2, "max_tokens": 0}
    whole = await client.completions.create(**asked, echo=True)
    assert [c.text for c in whole.choices[:2]] == ["The sea"] * 2
    assert {c.finish_reason for c in whole.choices} == {"length"}
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 0)
    for more, param in (
        ({}, "max_tokens"),
        ({"echo": True, "stream": True}, "max_tokens"),
        ({"echo": True, "temperature": 3}, "temperature"),
        ({"echo": True, "n": "2"}, "n"),
        ({"echo": True, "prompt": "x", "model": "none"}, "model"),
    ):
        answer = await http.post("/v1/completions", json={**asked, **more})
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] == param


async def test_sampling_fields_arrive(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """Each shows its effect on the engine that draws from the seed, or is refused by its name."""
    whole = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=40,
        seed=1,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": 1},
        stop=["e"],
        user="me",
        metadata={"a": "b"},
        extra_body={"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
    )
    assert whole.choices[0].finish_reason == "stop"
    assert "e" not in (whole.choices[0].message.content or "")
    for name, value in (
        ("temperature", 3),
        ("top_p", 0),
        ("logit_bias", {"5": 101}),
        ("n", 65),
        ("min_p", 2),
    ):
        body = {"model": MODEL, "prompt": "p", name: value}
        answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    assert [m.id async for m in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "headrace"
    with pytest.raises(openai.NotFoundError, match="no service serves model 'other'"):
        await client.models.retrieve("other")


async def test_errors_are_the_clients_own(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt=[1] * 9000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.InternalServerError) as late:  # by the request's own limit
        await client.completions.create(
            model=MODEL, prompt="p", max_tokens=4000, extra_body={"timeout_s": 1e-9}
        )
    assert (late.value.status_code, late.value.code) == (504, "timeout")


async def test_malformed_bodies_are_refused(http: httpx.AsyncClient) -> None:
    head = {"content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert (await http.post(path, content=b"{", headers=head)).status_code == 400
        assert (await http.post(path, content=b"[]", headers=head)).status_code == 422
        assert (
            await http.post(path, content=b"a=b", headers={"content-type": "text/plain"})
        ).status_code == 415
        packed = await http.post(
            path, content=gzip.compress(b"{}"), headers={**head, "content-encoding": "gzip"}
        )
        assert (packed.status_code, packed.json()["error"]["message"]) == (
            415,
            "the body's content encoding is gzip: send it without one",
        )
        plain = {**head, "content-encoding": "identity"}
        assert (await http.post(path, content=b"[]", headers=plain)).status_code == 422
        assert (await http.post(path, content=b'{"model":"\\ud800"}', headers=head)).status_code == 400
        assert (await http.post(path, content=b'{"x":"\xed\xa0\x80"}', headers=head)).status_code == 400
        assert (await http.get(path)).status_code == 405
    form = {"content": b"--x--", "headers": {"content-type": "multipart/form-data; boundary=x"}}
    form["headers"]["content-encoding"] = "gzip"
    assert (await http.post("/v1/files", **form)).status_code == 415
    for odd in (
        rb'"\ud800"',
        '"€"'.encode(),
        rb'"a\r\nb: c"',
        b'{"a":[]}',
        b"[5]",
        b'"' + b"x" * 9000 + b'"',
    ):
        for path, fields in (
            ("/v1/completions", b'"prompt":"x"'),
            ("/v1/completions", b'"prompt":["x","y"],"stream":true'),
            ("/v1/chat/completions", b'"messages":[{"role":"user","content":"x"}],"stream":true'),
            ("/tokenize", b'"prompt":"x"'),
        ):
            body = b"{" + fields + b',"request_id":' + odd + b"}"
            refused = await http.post(path, content=body, headers=head)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id"), (path, odd)
    huge = await http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 9_000_000})
    assert (huge.status_code, huge.json()["error"]["code"]) == (413, "payload_too_large")
    nowhere = await http.get("/v2")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")


async def test_ids_and_traces_in_and_out(http: httpx.AsyncClient, pipeline: Pipeline) -> None:
    body = {"prompt": "p", "max_tokens": 1}
    given = await http.post(
        "/v1/completions", json=body, headers={"x-request-id": "mine", "traceparent": TRACE}
    )
    assert (given.headers["x-request-id"], given.headers["traceparent"]) == ("mine", TRACE)
    own = given.json()["id"]
    assert own.startswith("mine.")
    recent = await pipeline.client.request(subjects.trace(own))
    assert recent["trace_id"] == TRACE.split("-")[1]
    drawn = await http.post("/v1/completions", json=body)
    assert drawn.json()["id"] == drawn.headers["x-request-id"]
    assert "traceparent" not in drawn.headers


async def test_calls_that_belong_together_may_have_one_id(http: httpx.AsyncClient) -> None:
    """As a mesh propagates it; of prompts in a list each is a request of its own."""
    body = {"prompt": ["p", "q"], "max_tokens": 3}
    head = {"x-request-id": "m" * 127}
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body, headers=head) for _ in range(8)))
    assert [a.status_code for a in answers] == [200] * 8
    assert {a.headers["x-request-id"] for a in answers} == {"m" * 127}
    assert len({a.json()["id"] for a in answers}) == 8


async def test_tokens_survive_detokenize_and_tokenize(http: httpx.AsyncClient) -> None:
    there = (await http.post("/tokenize", json={"model": MODEL, "prompt": "Hello world"})).json()
    assert there["count"] == len(there["tokens"]) == 2
    back = (await http.post("/detokenize", json={"model": MODEL, "tokens": there["tokens"]})).json()
    assert back == {"model": MODEL, "prompt": "Hello world"}
    chat = (await http.post("/tokenize", json={"messages": MESSAGES})).json()
    assert chat["count"] == 37
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        missing = await http.post(path, json={"model": "other", **body})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    wrong = await http.post("/detokenize", json={"tokens": [10**9]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


async def test_a_client_that_leaves_is_cancelled(
    client: AsyncOpenAI, http: httpx.AsyncClient, pipeline: Pipeline
) -> None:
    stream = await client.completions.create(model=MODEL, prompt="p", stream=True, **FOREVER)  # type: ignore[call-overload]  # a table of them
    async with aclosing(stream) as chunks:
        await anext(aiter(chunks))
    await pipeline.assert_idle()
    plain = asyncio.create_task(
        http.post("/v1/completions", json={"prompt": "p", "max_tokens": 4000, "ignore_eos": True})
    )
    await pipeline.until(lambda: pipeline.status("scheduler")["requests"] == 1)
    plain.cancel()
    await asyncio.gather(plain, return_exceptions=True)
    await pipeline.assert_idle()
    await pipeline.until(lambda: gateway_status(pipeline)["active"] == 0)
    assert 'http_response_status_code="499"' in (await http.get("/metrics")).text


async def test_detached_is_not_cancelled(url: str, http: httpx.AsyncClient, pipeline: Pipeline) -> None:
    def generated() -> int:
        return int(pipeline.status("scheduler")["measured"]["tokens"]["generated"])

    before = generated()
    body = {"prompt": "p", "max_tokens": 200, "ignore_eos": True, "stream": True, "finish_detached": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_lines())
    await pipeline.until(lambda: pipeline.status("scheduler")["requests"] == 0)
    assert generated() - before == 200


async def test_slow_reader_is_ended_and_delays_no_other(
    url: str, http: httpx.AsyncClient, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_UNREAD_BYTES", 20_000)
    host, port = url.removeprefix("http://").split(":")
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, (host, int(port)))
    body = {"prompt": "p", "n": 8, "max_tokens": 6000, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
    await loop.sock_sendall(slow, f"{head}\r\n".encode() + data)
    await pipeline.until(lambda: pipeline.status("scheduler")["requests"] == 1)
    quick = await http.post("/v1/completions", json={"prompt": "q", "max_tokens": 50, "ignore_eos": True})
    assert quick.json()["usage"]["completion_tokens"] == 50
    await pipeline.until(
        lambda: pipeline.status("scheduler")["requests"] == 0
    )  # ended, though no client has read it
    got = b""
    while part := await loop.sock_recv(slow, 65536):
        got += part
    slow.close()
    assert b'"code":"slow_reader"' in got
    assert b"[DONE]" not in got
    await pipeline.until(lambda: gateway_status(pipeline)["slow_readers"] == 1)
    assert gateway_status(pipeline)["lines"] == 0  # one tenant, and the main connection


async def test_health_shows_whether_a_request_would_be_answered(pipeline: Pipeline) -> None:
    executor = pipeline.runtimes.pop("executor-1")
    await executor.finish(5)
    url = await add_gateway(pipeline, "gateway-2")
    async with httpx.AsyncClient(base_url=url) as http:
        first = await http.get("/health")
        assert (first.status_code, first.json()) == (
            503,
            {"status": "unavailable", "reason": "waiting for: executor"},
        )
        assert (await http.get("/ready")).status_code == 200
        await pipeline.add("executor", "executor-1")
        await healthy(pipeline, "gateway-2")
        assert (await http.get("/health")).json() == {"status": "ok"}
        await pipeline.runtimes.pop("executor-1").finish(5)
        await pipeline.until(lambda: "executor" in gateway_status(pipeline, "gateway-2")["health"])
        await pipeline.add("executor", "executor-1")
    await remove_gateway(pipeline, "gateway-2")


async def test_keys_are_tenants(pipeline: Pipeline, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme one\nother two\nheadrace-operator three\n")
    url = await add_gateway(pipeline, "gateway-2", keys)
    await healthy(pipeline, "gateway-2")
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        body = {
            "prompt": "the same words for both of the two tenants, longer than a block of the cache",
            "max_tokens": 1,
        }

        async def cached(key: str) -> int:
            answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert gateway_status(pipeline, "gateway-2")["lines"] == 0
        assert [await cached(key) for key in ("one", "one", "two")] == [0, 16, 0]
        assert gateway_status(pipeline, "gateway-2")["lines"] == 2
        for path in ("/v1/models", "/v1/models/x"):
            refused = await http.get(path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/v1/chat/completions", "/tokenize", "/detokenize"):
            refused = await http.post(path, json=body, headers={"authorization": "Bearer four"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        for path in ("/health", "/ready", "/version", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
        headers = [{}, *({"authorization": f"Bearer {key}"} for key in ("four", "one", "three"))]
        pages = [await http.get("/metrics", headers=each) for each in headers]
        assert [page.status_code for page in pages] == [401, 401, 403, 200]
        assert ["http_server_request_duration" in page.text for page in pages] == [False, False, False, True]
        codes = [page.json()["error"]["code"] for page in pages[:3]]
        assert codes == ["invalid_api_key", "invalid_api_key", "permission_denied"]
    await remove_gateway(pipeline, "gateway-2")


async def test_page_of_another_site_neither_reads_nor_sends_requests(http: httpx.AsyncClient) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    json_type, own = {"content-type": "application/json"}, str(http.base_url).rstrip("/")
    for path in ("/", "/requests", "/fleet", "/v1/models", "/metrics"):
        refused = await http.get(path, headers={"host": "evil.example"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    for headers, status in (
        ({}, 200),  # a program without a content type
        (json_type, 200),
        ({"origin": own, **json_type}, 200),
        ({"origin": own}, 415),
        ({"sec-fetch-site": "same-origin"}, 415),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "https://evil.example", **json_type}, 403),
        ({"origin": "null", **json_type}, 403),
    ):
        assert (await http.post("/v1/completions", content=body, headers=headers)).status_code == status, (
            headers
        )
