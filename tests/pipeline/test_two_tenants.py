"""Two tenants and one id: whatever reads or ends a request by its id does so for the tenant that owns it.

The HTTP paths are those of the application and the verbs those of the permissions: a new one is tried, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

from services.gateway.app import build_app
from services.keeper.actor import KeeperActor
from services.launcher import nats_server as servers
from services.launcher.nats_server import ServerLimits
from shared.actor.runtime import Actor
from shared.client import gather
from shared.nats import access, subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery

SECRET = "Ahab"
KEYS = {"acme": "one", "bob": "two", "headrace-operator": "three"}
LATER = {"Prefer": "respond-async"}
ID = "one-id"


class Kept(Pipeline):
    """All services and a keeper."""

    def build(self, kind: str) -> Actor:
        return KeeperActor() if kind == "keeper" else super().build(kind)

    async def begin(self) -> None:
        await super().begin()
        await self.add("keeper", "keeper-1")

    async def stop(self) -> None:
        await self.runtimes.pop("keeper-1").finish(5)
        await super().stop()


@dataclass
class World:
    pipeline: Pipeline
    http: httpx.AsyncClient
    routes: list[Route]

    async def call(self, tenant: str, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEYS[tenant]}", **more.pop("headers", {})}
        return await self.http.request(method, path, headers=headers, **more)

    async def ended(self, tenant: str, path: str) -> httpx.Response:
        """The answer at `path`, once there is one."""
        async with asyncio.timeout(60):
            while (answer := await self.call(tenant, "GET", path)).status_code != 200:
                await asyncio.sleep(0.02)
        return answer

    async def trace(self, tenant: str, query: str = "") -> dict[str, Any]:
        return dict((await self.ended(tenant, f"/requests/{ID}{query}")).json())


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    server = servers.start(limits=ServerLimits(jetstream_memory="16MB", jetstream_file="16GB"))
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()))
    async with AsyncExitStack() as stack:

        async def connect() -> NatsBus:
            bus = await NatsBus.connect(server.url, timeout_s=30)
            stack.push_async_callback(bus.drain)
            return bus

        pipeline = await Kept.start(connect, "tenants")
        url = await add_gateway(pipeline, keys=keys)
        await healthy(pipeline)
        app: Any = build_app(pipeline.runtimes["gateway-1"].actor._endpoints)  # type: ignore[attr-defined]  # white box
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        yield World(pipeline, http, app._app.routes)
        await remove_gateway(pipeline)
        await pipeline.stop()
    server.stop()


async def everything_of(world: World, tenant: str) -> dict[str, str]:
    """What a tenant has under ids: the ids, by the path where its owner reads them."""
    said = [{"role": "user", "content": SECRET}]
    short = {"model": MODEL, "max_tokens": 3}
    asked = {**short, "messages": said, "request_id": ID}
    assert (await world.call(tenant, "POST", "/v1/chat/completions", json=asked)).status_code == 200
    later = {**asked, "request_id": "later-id"}
    await world.call(tenant, "POST", "/v1/chat/completions", json=later, headers=LATER)
    text = {**short, "prompt": SECRET, "request_id": "text-id"}
    await world.call(tenant, "POST", "/v1/completions", json=text, headers=LATER)
    made = {"model": MODEL, "input": SECRET, "max_output_tokens": 3}
    response = (await world.call(tenant, "POST", "/v1/responses", json=made)).json()["id"]
    line = {
        "custom_id": SECRET,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {**short, "messages": said},
    }
    form: Any = {"files": {"file": (f"{SECRET}.jsonl", json.dumps(line))}, "data": {"purpose": "batch"}}
    file = (await world.call(tenant, "POST", "/v1/files", **form)).json()["id"]
    fields = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await world.call(tenant, "POST", "/v1/batches", json=fields)).json()["id"]
    paths = {
        f"/requests/{ID}": ID,
        "/v1/chat/completions/later-id": "later-id",
        "/v1/completions/text-id": "text-id",
        f"/v1/responses/{response}": response,
        f"/v1/files/{file}": file,
        f"/v1/batches/{batch}": batch,
    }
    for path in paths:
        await world.ended(tenant, path)
    return paths


async def heard(world: World, verb: str, name: str, body: Any) -> list[bytes]:
    """What the services answer bob."""
    answers: list[bytes] = []

    def note(delivery: Delivery) -> bool:
        answers.append(delivery.data)
        return True

    subject = f"{subjects.PUBLIC}.{verb}.bob.{subjects.token(name)}"
    await gather(world.pipeline.client.bus, subject, 0.2, note, body=json.dumps(body).encode())
    return answers


async def test_no_path_and_no_verb_reads_or_ends_what_another_tenant_has(world: World) -> None:
    paths = await everything_of(world, "acme")
    running = {
        "model": MODEL,
        "prompt": SECRET,
        "request_id": "running",
        "max_tokens": 3_000,
        "ignore_eos": True,
    }
    stream = world.pipeline.client.as_tenant("acme").stream(running)
    assert (await anext(stream))["type"] == "accepted"
    ids = [*paths.values(), "running"]
    for path in ("/requests", "/v1/files", "/v1/batches"):
        listed = (await world.call("bob", "GET", path)).text
        assert not any(name in listed for name in ids)
    by_id = [route for route in world.routes if "{id}" in route.path]
    assert len(by_id) > 8
    for route in by_id:
        for method in route.methods or ():
            for name in (*ids, "no-such-id"):
                answer = await world.call("bob", method, route.path.replace("{id}", name), json={})
                assert answer.status_code == 404, (method, route.path, name, answer.text)
                assert SECRET not in answer.text.replace(name, "")
    previous = {"model": MODEL, "input": "Hello", "previous_response_id": ids[3]}
    assert (await world.call("bob", "POST", "/v1/responses", json=previous)).status_code == 404
    fields = {"input_file_id": ids[4], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert (await world.call("bob", "POST", "/v1/batches", json=fields)).status_code in (400, 404)
    verbs = {*access._VERBS, "keep"} - {"generate", "submit", "tokenize", "detokenize"}  # these name a model
    for verb in sorted(verbs):
        names = {"files": ("show", "list", "read", "delete"), "batches": ("show", "list", "cancel")}.get(
            verb, ids
        )
        for name in names:
            for each in ids if verb in ("files", "batches") else ids[:1]:
                for data in await heard(world, verb, name, {"id": each, "part": 0, "inbox": "x"}):
                    assert SECRET.encode() not in data, (verb, name, data)
    frames = [frame async for frame in stream]
    assert frames[-1]["usage"]["completion_tokens"] == 3_000, "no verb of bob has ended it"
    for path in paths:
        assert (await world.call("acme", "GET", path)).status_code == 200, "nothing is deleted"


async def test_two_tenants_with_one_id_read_each_its_own_trace(world: World) -> None:
    for tenant, count in (("acme", 3), ("bob", 5)):
        asked = {
            "model": MODEL,
            "prompt": "The sea",
            "max_tokens": count,
            "request_id": ID,
            "ignore_eos": True,
        }
        answer = await world.call(tenant, "POST", "/v1/completions", json=asked)
        assert answer.json()["usage"]["completion_tokens"] == count
    found = {tenant: await world.trace(tenant) for tenant in ("acme", "bob")}
    assert {name: (each["tenant"], each["choices"][0]["tokens"]) for name, each in found.items()} == {
        "acme": ("acme", 3),
        "bob": ("bob", 5),
    }
    operator = [
        await world.trace("headrace-operator", query) for query in ("", "?tenant=acme", "?tenant=bob")
    ]
    assert [each["choices"][0]["tokens"] for each in operator] == [5, 3, 5]
    assert (await world.call("acme", "GET", f"/requests/{ID}?tenant=bob")).status_code == 404
