"""What an operator of a gateway sets: HTTPS, and a line in a log for each request."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway
from support.self_signed import self_signed

from services.gateway.actor import build, read_certificate
from services.gateway.exchange import AccessLog, Exchange, access_line
from shared.config import Settings, load
from shared.errors import SetupError

SECRET = "What is the capital of France?"
MESSAGES: Any = [{"role": "user", "content": SECRET}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    running = await Pipeline.start(connect, "operators")
    yield running
    await running.stop()


def certificate(folder: Path) -> tuple[str, str]:
    self_signed(folder / "cert.pem", folder / "key.pem")
    return str(folder / "cert.pem"), str(folder / "key.pem")


async def test_https_with_a_certificate_that_is_replaced(pipeline: Pipeline, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    tls = read_certificate(cert, key)
    url = await add_gateway(pipeline, "secure", tls=tls)
    assert url.startswith("https://127.0.0.1:")
    await healthy(pipeline, "secure")
    try:
        first = ssl.create_default_context(cafile=cert)
        async with (
            httpx.AsyncClient(verify=first) as http,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="any", http_client=http, max_retries=0) as client,
        ):
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=9, stream=True
            )
            assert len([chunk async for chunk in stream]) > 3
            assert (await http.get(f"{url}/none")).status_code == 404
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await asyncio.to_thread(httpx.get, f"{url}/ready")
        certificate(tmp_path)
        tls.refresh()
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await asyncio.to_thread(httpx.get, f"{url}/ready", verify=first)
        second = ssl.create_default_context(cafile=cert)
        assert (await asyncio.to_thread(httpx.get, f"{url}/ready", verify=second)).status_code == 200
    finally:
        await remove_gateway(pipeline, "secure")


async def test_a_refused_head_is_answered_over_https_too(pipeline: Pipeline, tmp_path: Path) -> None:
    """TLS has no half-closed connection: the answer comes before the end."""
    cert, key = certificate(tmp_path)
    url = httpx.URL(await add_gateway(pipeline, "secure", tls=read_certificate(cert, key)))
    try:
        context = ssl.create_default_context(cafile=cert)
        reader, writer = await asyncio.open_connection(url.host, url.port, ssl=context)
        writer.write(b"no HTTP at all\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 400 Bad Request")
        writer.close()
    finally:
        await remove_gateway(pipeline, "secure")


@pytest.mark.parametrize("damage", [lambda path: path.write_text("no certificate"), os.unlink])
async def test_a_certificate_that_cannot_be_used_stops_the_start(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    cert, key = certificate(tmp_path)
    damage(tmp_path / "cert.pem")
    with pytest.raises(SetupError, match="http_tls_cert"):
        build(Settings(http_tls_cert=cert, http_tls_key=key))
    with pytest.raises(SetupError, match="http_tls_cert and http_tls_key belong together"):
        load(None, {"http_tls_cert": cert})


async def test_a_line_for_each_request_without_its_prompt(pipeline: Pipeline, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme one\n")
    path = tmp_path / "access.log"
    url = await add_gateway(pipeline, "logged", keys, access_log=AccessLog(str(path)))
    await healthy(pipeline, "logged")
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0)
    try:
        asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5}
        await client.chat.completions.create(**asked, extra_headers={"x-request-id": "r-1"})
        async for _ in await client.chat.completions.create(**asked, stream=True):
            pass
        await pipeline.until(lambda: len(path.read_text().splitlines()) == 2)  # after the last byte
        path.rename(tmp_path / "rotated")
        async with httpx.AsyncClient(base_url=url) as http:
            await http.post("/v1/completions", json={"prompt": SECRET}, headers={"user-agent": "b"})
            await http.get("/nothing/at/all?key=secret")
    finally:
        await client.close()
        await remove_gateway(pipeline, "logged")
    whole, streamed = map(json.loads, (tmp_path / "rotated").read_text().splitlines())
    refused, nothing = map(json.loads, path.read_text().splitlines())
    assert SECRET not in (tmp_path / "rotated").read_text() + path.read_text()
    same = {
        "client": "127.0.0.1", "tenant": "acme", "method": "POST", "path": "/v1/chat/completions",
        "status": 200, "model": MODEL, "prompt_tokens": 37, "completion_tokens": 5,
    }  # fmt: skip
    assert same.items() <= whole.items()
    assert same.items() <= streamed.items()
    assert whole["request_id"].startswith("r-1.")
    assert (whole["stream"], streamed["stream"]) == (False, True)
    assert 0 < streamed["first_chunk_ms"] <= streamed["duration_ms"]
    assert "first_chunk_ms" not in whole
    assert whole["user_agent"].startswith("AsyncOpenAI/Python")
    assert (refused["status"], refused["error"], refused["user_agent"]) == (401, "invalid_api_key", "b")
    assert "tenant" not in refused
    assert (nothing["status"], nothing["path"]) == (404, "other")
    assert "secret" not in path.read_text()


async def test_access_log_has_bodies_only_with_the_setting(pipeline: Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    url = await add_gateway(pipeline, "logged", access_log=AccessLog(str(path), prompts=True))
    await healthy(pipeline, "logged")
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await http.post("/v1/chat/completions", json=asked)
    await remove_gateway(pipeline, "logged")
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert line["body"] == asked


async def test_full_disk_costs_log_lines_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    exchange = Exchange(method="GET", route="/ready", request_id="r")
    access_log = AccessLog("/dev/full")
    with caplog.at_level(logging.INFO, "headrace.gateway"):
        for _ in range(3):
            access_log.write(access_line(exchange))
    assert [record.getMessage() for record in caplog.records] == [
        "access_log: /dev/full cannot be written: [Errno 28] No space left on device"
    ]
    with pytest.raises(SetupError, match="access_log: /none/such cannot be written"):
        AccessLog("/none/such")
