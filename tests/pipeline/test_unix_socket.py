"""The HTTP API on a Unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, gateway_status, healthy, remove_gateway

from services.gateway.actor import GatewayActor, build
from shared.actor.runtime import Runtime
from shared.config import load
from shared.errors import SetupError
from shared.processes import unix_url


@pytest_asyncio.fixture
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    running = await Pipeline.start(connect, "socket")
    yield running
    await running.stop()


async def add_at(pipeline: Pipeline, path: Path, name: str = "gateway-1") -> Runtime:
    actor: GatewayActor = build(load(flags={"http": f"unix:{path}"}).settings)
    bus = await pipeline.connect()
    runtime = Runtime(actor, bus, pipeline.settings.fleet, name, heartbeat_interval_us=50_000)
    await runtime.start()
    pipeline.runtimes[name] = runtime
    return runtime


def http_at(path: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://localhost")


async def test_unix_socket_serves_requests_streams_and_states(pipeline: Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    await add_at(pipeline, path)
    await healthy(pipeline)
    assert gateway_status(pipeline)["url"] == unix_url(str(path))
    async with http_at(path) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert (await http.get("/ready")).status_code == 200
        assert (await http.get("/")).status_code == 200
        client = AsyncOpenAI(base_url="http://localhost/v1", api_key="any", http_client=http, max_retries=0)
        asked: Any = {"model": MODEL, "prompt": "The sea", "max_tokens": 5, "seed": 7}
        whole = await client.completions.create(**asked)
        chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    await remove_gateway(pipeline)
    assert not path.exists()


async def test_one_gateway_for_each_socket(pipeline: Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    first = await add_at(pipeline, path)
    with pytest.raises(SetupError, match="another process listens there"):
        await add_at(pipeline, path, "gateway-2")
    path.unlink()
    failure = await first.failed()  # its supervisor starts another one
    assert isinstance(failure, SetupError)
    assert "was removed or replaced" in failure.message
    del pipeline.runtimes["gateway-1"]
    await add_at(pipeline, path, "gateway-3")
    await first.finish(1)
    assert path.is_socket()  # of the third one
    await remove_gateway(pipeline, "gateway-3")
    assert not path.exists()
