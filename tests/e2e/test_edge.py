"""`headrace up --leaf`: an edge uses the models of its centre, and works without it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.running_up import BY_DEFAULT_DURABLE, StartUp, Up, end, starter

from services.launcher import credentials
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan
from shared.client.client import Client, NoAnswer
from shared.errors import HeadraceError, Unavailable
from shared.nats import subjects
from shared.nats.bus import NatsBus

MODEL, OWN, BOTH = "smollm2-135m-instruct", "of-the-edge", "chat"
LONG = {"prompt": "Hello", "max_tokens": 8_000, "ignore_eos": True, "seed": 1}
SHORT = {"prompt": "Hello", "max_tokens": 8, "seed": 1}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def start_durable(tmp_path: Path) -> Iterator[StartUp]:
    running: list[Up] = []
    yield starter(tmp_path, running, BY_DEFAULT_DURABLE)
    end(running)


@asynccontextmanager
async def client_of(url: str, tenant: str = subjects.DEFAULT_TENANT) -> AsyncIterator[Client]:
    bus = await NatsBus.connect(url, timeout_s=30)
    try:
        yield await Client.open(bus, tenant)
    finally:
        await bus.drain()


async def answered(client: Client, model: str, **more: Any) -> dict[str, Any]:
    """The answer to a request, once services answer: a server and its link need a moment."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.complete({**SHORT, "model": model, **more})
            except Unavailable:
                await asyncio.sleep(0.05)


async def recorded(client: Client, request_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (state := await client.state(request_id))["status"] in ("queued", "running"):
            await asyncio.sleep(0.05)
    return state


async def submitted(client: Client, request_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:  # the keeper is the last service that `up` starts
            try:
                body = {**SHORT, "request_id": request_id}
                return await client.request(subjects.submit(client.tenant, MODEL), body)
            except Unavailable:
                await asyncio.sleep(0.05)


async def test_an_edge_without_a_model_is_a_client_of_its_centre(
    start_durable: StartUp, tmp_path: Path
) -> None:
    """With credentials on both sides: what no user may do would be refused."""
    there, here, port = tmp_path / "there", tmp_path / "here", free_port()
    auth.generate(there, Plan("nats://nats:4222", "default", ("acme",), leaves=True), print)
    auth.generate(here, Plan("nats://nats:4222", "default", ("acme",)), print)
    address = f"127.0.0.1:{port}"
    centre = start_durable("--auth", str(there), "--leaves", address)
    url = credentials.url_of(there, "leaf", f"nats-leaf://{address}")
    edge = start_durable("--auth", str(here), "--leaf", url, "--model", "none", HEADRACE_HTTP="127.0.0.1:0")
    async with client_of(credentials.url_of(here, "acme", edge.nats_url), "acme") as client:
        assert (await answered(client, MODEL))["choices"][0]["text"]
        assert (await submitted(client, "kept"))["id"] == "kept"
        frames = [frame async for frame in client.stream({**SHORT, "model": MODEL})]
        assert (frames[0]["type"], frames[-1]["type"]) == ("accepted", "done")
        with pytest.raises(HeadraceError, match="cancelled"):
            async for frame in client.stream({**LONG, "model": MODEL, "request_id": "ended"}):
                if frame["type"] == "delta":
                    client.cancel("ended")
        async with client_of(credentials.url_of(here, "acme", edge.nats_url), "acme") as gone:
            left = gone.stream({**LONG, "model": MODEL, "request_id": "gone", "finish_detached": False})
            while (await anext(left))["type"] != "delta":
                pass
        record = await recorded(client, "kept")
        assert record["status"] == "completed"
        key = (here / "tenants" / "acme" / "api_key").read_text().strip()
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60) as web:
            ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
            answer = await web.post(f"{edge.http_url}/chat/completions", json=ask)
            assert answer.json()["choices"][0]["message"]["content"], answer.text
            listed = (await web.get(f"{edge.http_url}/models")).json()
            assert [each["id"] for each in listed["data"]] == [MODEL]
    operator = credentials.url_of(there, "operator", centre.nats_url)
    async with client_of(operator) as looks:
        assert (await end_of(looks, "gone")) == ("error", "the client has gone")
        assert (await end_of(looks, "ended"))[0] == "error"
    for up in (centre, edge):
        assert "ermissions" not in up.log.read_text()


async def end_of(client: Client, request_id: str) -> tuple[str, str]:
    """(reason, error) of a request at the centre, once it has ended before its last token."""
    async with asyncio.timeout(60):
        while True:
            asked = await client.bus.request(subjects.trace(request_id), b"", timeout_us=10_000_000)
            stats = json.loads(asked.data)
            if stats["state"] == "ended":
                choice = stats["choices"][0]
                assert choice["tokens"] < LONG["max_tokens"]
                return choice["reason"], choice["error"]


async def test_an_edge_with_a_model_works_without_its_centre(start_durable: StartUp) -> None:
    port = free_port()
    arguments = ("--leaves", f"127.0.0.1:{port}")
    centre = start_durable(*arguments, HEADRACE_MODEL_NAME=f"{MODEL},{BOTH}")
    names = f"{OWN},{BOTH}"  # a name of another model on one server would be refused
    edge = start_durable("--leaf", f"nats-leaf://127.0.0.1:{port}", HEADRACE_MODEL_NAME=names)
    async with client_of(edge.nats_url) as client:
        for name, model in ((MODEL, MODEL), (OWN, OWN), (BOTH, OWN)):
            assert (await answered(client, name))["model"] == model
        await submitted(client, "first")
        assert (await recorded(client, "first"))["status"] == "completed"
        processes = edge.children()
        centre.process.send_signal(signal.SIGKILL)
        centre.process.wait(30)
        for name in (OWN, BOTH):
            assert (await answered(client, name))["model"] == OWN
        with pytest.raises(Unavailable):
            while True:  # the edge's server notices the end of the other one
                with contextlib.suppress(NoAnswer):
                    await client.complete({**SHORT, "model": MODEL}, timeout_s=5)
        assert (await submitted(client, "second"))["status"] == "queued"
        start_durable(*arguments, HEADRACE_MODEL_NAME=MODEL, XDG_STATE_HOME=centre.env["XDG_STATE_HOME"])
        assert (await answered(client, MODEL))["model"] == MODEL
        assert (await recorded(client, "second"))["status"] == "completed"
        assert edge.children() == processes, "nothing was started again"
