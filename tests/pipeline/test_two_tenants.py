"""Two tenants and one id: each command that reads or ends a request by its id does so for the tenant that
owns it.

The HTTP paths are those of the application and the verbs those of the permissions: a new one is tried, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway
from support.pipeline.kept import Kept

from services.gateway.app import build_app
from services.launcher import nats_server as servers
from services.launcher.nats_server import ServerLimits
from shared.client.client import gather
from shared.errors import Cancelled
from shared.nats import access, subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery
from shared.replies import to_json

SECRET = "Ahab"
KEYS = {"acme": "one", "bob": "two", "headrace-operator": "three"}
LATER = {"Prefer": "respond-async"}
ID = "one-id"


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
    messages = [{"role": "user", "content": SECRET}]
    short = {"model": MODEL, "max_tokens": 3}
    asked = {**short, "messages": messages, "request_id": ID}
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
        "body": {**short, "messages": messages},
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


async def responses(world: World, verb: str, name: str, body: Any, tenant: str = "bob") -> list[bytes]:
    """What the services answer a tenant."""
    answers: list[bytes] = []

    def note(delivery: Delivery) -> bool:
        answers.append(delivery.data)
        return True

    subject = f"{subjects.PUBLIC}.{verb}.{tenant}.{subjects.token(name)}"
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
    as_stream = {"params": {"stream": "true"}, "headers": {"Accept": "text/event-stream"}}
    by_id = [route for route in world.routes if "{id}" in route.path]
    assert len(by_id) > 8
    for route in by_id:
        for method in route.methods or ():
            for name in (*ids, "no-such-id"):
                path = route.path.replace("{id}", name)
                for more in ({}, as_stream) if method == "GET" else ({},):
                    answer = await world.call("bob", method, path, json={}, **more)
                    assert answer.status_code == 404, (method, path, answer.text)
                    assert SECRET not in answer.text.replace(name, "")
    previous = {"model": MODEL, "input": "Hello", "previous_response_id": ids[3]}
    assert (await world.call("bob", "POST", "/v1/responses", json=previous)).status_code == 404
    fields = {"input_file_id": ids[4], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert (await world.call("bob", "POST", "/v1/batches", json=fields)).status_code in (400, 404)
    of_models = {"generate", "submit", "tokenize", "detokenize", "models"}
    verbs = access._IN_A_NAME - of_models - {"forward", "done"}  # those two go between keepers
    assert verbs == {
        "attach", "batches", "cancel", "delete", "files", "keep", "result", "session", "sessions",
    }  # fmt: skip
    for verb in sorted(verbs):
        names = {"files": ("show", "list", "read", "delete"), "batches": ("show", "list", "cancel")}.get(
            verb, ids
        )
        for name in names:
            for each in ids if verb in ("files", "batches") else ids[:1]:
                body = {"id": each, "chunk": 0} if verb in ("files", "batches") else {}
                for data in await responses(world, verb, name, body):
                    assert SECRET.encode() not in data, (verb, name, data)
                    assert b'"accepted"' not in data, "nothing of acme is attached to"
    own = world.pipeline.client.as_tenant("acme").stream({**running, "request_id": "own"})
    assert (await anext(own))["type"] == "accepted"
    assert b'"accepted"' in (await responses(world, "attach", "own", {}, "acme"))[0]
    frames = [frame async for frame in stream]
    assert frames[-1]["usage"]["completion_tokens"] == 3_000, "no verb of bob has ended it"
    for path in paths:
        assert (await world.call("acme", "GET", path)).status_code == 200, "nothing is deleted"


async def test_one_id_of_two_tenants_at_the_same_time_is_two_requests(world: World) -> None:
    """Streams, durable requests and files; what one tenant cancels or deletes, the other one keeps."""
    acme, bob = (world.pipeline.client.as_tenant(tenant) for tenant in ("acme", "bob"))
    long = {"model": MODEL, "max_tokens": 400, "ignore_eos": True, "request_id": "both"}
    streams = [each.stream({**long, "prompt": str(each.tenant)}) for each in (acme, bob)]
    for stream in streams:
        assert (await anext(stream))["type"] == "accepted"
    bob.cancel("both")
    with pytest.raises(Cancelled):
        _ = [frame async for frame in streams[1]]
    for each in (acme, bob):
        later = {**long, "request_id": "later", "prompt": each.tenant, "max_tokens": 3}
        assert (await each.request(subjects.submit(each.tenant, MODEL), later))["id"] == "later"
    file = "file-" + "1" * 22
    for each in (acme, bob):
        text = f"{each.tenant}".encode()
        await each.ask(subjects.files(each.tenant, "put"), f"{file} 0\n".encode() + text)
        meta = {"id": file, "filename": "x", "purpose": "batch", "bytes": len(text), "chunks": 1}
        await each.request(subjects.files(each.tenant, "keep"), {**meta, "sha256": sha256(text).hexdigest()})
    for each in (acme, bob):
        async with asyncio.timeout(60):
            while (record := await each.state("later"))["status"] != "completed":
                await asyncio.sleep(0.02)
        assert record["answer"]["usage"]["completion_tokens"] == 3
    await bob.request(subjects.delete("bob", "later"), {})
    await bob.request(subjects.files("bob", "delete"), {"id": file})
    assert (await acme.state("later"))["status"] == "completed"
    assert (
        await acme.ask(subjects.files("acme", "read"), to_json({"id": file, "chunk": 0}))
    ).data == b"=acme"
    frames = [frame async for frame in streams[0]]
    assert frames[-1]["usage"]["completion_tokens"] == 400


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
