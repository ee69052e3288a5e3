"""Files and batches of a keeper on a real nats-server; a tokenizer and a model moved by the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from services.keeper.actor import KeeperActor
from services.keeper.batches.batch_verbs import UPLOAD_S, FileVerbs
from services.launcher import nats_server as servers
from services.launcher.nats_server import NatsServer, ServerLimits
from shared.actor.runtime import Runtime
from shared.aliases import Alias
from shared.client.client import Client
from shared.client.file_client import FileClient, asked
from shared.clock import SystemClock
from shared.errors import BadRequest, HeadraceError, Overloaded, PayloadTooLarge, Unavailable
from shared.nats import object_store, subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery
from shared.nats.jetstream import JetStream
from shared.nats.object_store import CHUNK_BYTES, ObjectStore, UnknownFile, new_id
from shared.replies import error_reply, to_json

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def server() -> Iterator[NatsServer]:
    limits = replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="4GB")
    server = servers.start(limits=limits)
    yield server
    server.stop()


class World:
    """Keepers, a client, and a fleet that answers each request or holds it."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.holds = False
        self.outcomes: list[HeadraceError] = []  # of the next requests
        self.asked: list[Delivery] = []
        self.cancelled: list[str] = []
        self.keepers: list[Runtime] = []

    async def open(self) -> None:
        self.bus = await NatsBus.connect(self.server.url, timeout_s=30)
        self.client = await Client.open(self.bus)
        await self.bus.subscribe("headrace.v1.generate.*.m", self._generate)
        await self.bus.subscribe("headrace.v1.cancel.*.*", lambda d: self.cancelled.append(d.subject))
        models = b'{"data":[{"id":"m"},{"id":"chat","root":"m"}]}'
        await self.bus.subscribe("headrace.v1.models", lambda d: self.bus.publish(d.reply, models))
        await self.bus.flush()

    async def keeper(self) -> Runtime:
        """A keeper that has made the streams."""
        bus = await NatsBus.connect(self.server.url, timeout_s=30)
        keeper = Runtime(KeeperActor(), bus, "f", f"k{len(self.keepers)}")
        await keeper.start()
        self.keepers.append(keeper)
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.files().request("list", {})
                    return keeper
                except Unavailable:
                    await asyncio.sleep(0.01)

    async def close(self) -> None:
        for keeper in self.keepers:
            await keeper.finish(5.0)
        await self.bus.drain()

    def _generate(self, delivery: Delivery) -> None:
        self.asked.append(delivery)
        if self.outcomes:
            self.bus.publish(delivery.reply, error_reply(self.outcomes.pop(0), "", ""))
        elif not self.holds:
            self.answer(delivery)

    def answer(self, delivery: Delivery) -> None:
        text = json.loads(delivery.data)["prompt"]
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        usage["prompt_tokens_details"] = {"cached_tokens": 0}  # type: ignore[assignment]  # of its own kind
        self.bus.publish(delivery.reply, to_json({"created": 1, "choices": [choice], "usage": usage}))

    def files(self, tenant: str = "public") -> FileClient:
        return FileClient(self.client.as_tenant(tenant), SystemClock())

    async def upload(self, content: bytes, tenant: str = "public") -> str:
        async def pieces() -> AsyncIterator[bytes]:
            yield content

        described = {"filename": "in.jsonl", "purpose": "batch"}
        return str((await self.files(tenant).upload(pieces(), lambda: described))["id"])

    async def batch(self, verb: str, tenant: str = "public", **fields: Any) -> dict[str, Any]:
        return await asked(self.client.as_tenant(tenant), subjects.batches(tenant, verb), fields)

    async def begun(self, lines: int, window: str = "24h") -> str:
        content = "".join(
            json.dumps({"custom_id": f"c{i}", "url": "/v1/completions", "body": {"prompt": f"p{i}"}}) + "\n"
            for i in range(lines)
        )
        file = await self.upload(content.encode())
        made = await self.batch(
            "create", input_file_id=file, endpoint="/v1/completions", completion_window=window
        )
        return str(made["id"])

    async def ended(self, batch: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while (found := await self.batch("show", id=batch))["status"] not in ENDED:
                await asyncio.sleep(0.05)
        return found

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.asked) < count:
                await asyncio.sleep(0.01)

    async def lines(self, file: str) -> list[dict[str, Any]]:
        _, chunks = await self.files().read(file)
        content = b"".join([chunk async for chunk in chunks])
        return [json.loads(line) for line in content.splitlines()]


@pytest.fixture
async def world(server: NatsServer) -> AsyncIterator[World]:
    world = World(server)
    await world.open()
    yield world
    await world.close()


async def test_files_and_batches_are_their_tenants_own(world: World) -> None:
    await world.keeper()
    file = await world.upload(b"x" * 2 * CHUNK_BYTES)
    batch = await world.begun(1)
    for verb in ("show", "delete", "read"):
        with pytest.raises(UnknownFile):
            await world.files("acme").request(verb, {"id": file, "chunk": 0})
    with pytest.raises(UnknownFile):
        await world.batch(
            "create", "acme", input_file_id=file, endpoint="/v1/completions", completion_window="1h"
        )
    for verb in ("show", "cancel"):
        with pytest.raises(UnknownFile):
            await world.batch(verb, "acme", id=batch)
    assert (await world.batch("list", "acme"))["data"] == []
    assert (await world.files("acme").request("list", {}))["data"] == []
    assert [each["id"] for each in (await world.batch("list"))["data"]] == [batch]


async def test_lines_for_an_alias_go_to_its_models_and_their_answers_name_the_model(world: World) -> None:
    await world.keeper()
    await world.bus.subscribe("headrace.v1.generate.*.n", world._generate)
    alias = Alias("chat", 1, (("m", 1), ("n", 1)))
    world.bus.publish(subjects.alias("chat"), alias.pack())
    await world.bus.flush()
    lines = [
        {"custom_id": f"c{i}", "url": "/v1/completions", "body": {"prompt": "p", "model": "chat"}}
        for i in range(20)
    ]
    file = await world.upload("".join(json.dumps(line) + "\n" for line in lines).encode())
    made = await world.batch("create", input_file_id=file, endpoint="/v1/completions", completion_window="1h")
    ended = await world.ended(made["id"])
    found = {
        line["custom_id"]: line["response"]["body"]["model"]
        for line in await world.lines(ended["output_file_id"])
    }
    wanted = {f"c{i}": alias.model_for("public", f"{made['id']}.{i + 1}") for i in range(20)}
    assert found == wanted
    assert {*found.values()} == {"m", "n"}


async def test_wrong_requests_are_refused(world: World) -> None:
    await world.keeper()
    file = new_id("file-", 1)
    good = {
        "id": file, "filename": "a", "purpose": "batch", "bytes": 1, "chunks": 1, "sha256": "0" * 64,
    }  # fmt: skip
    for wrong in (
        {"id": "file-1"}, {"filename": ""}, {"purpose": "x"}, {"chunks": 2}, {"bytes": 0, "chunks": 0},
        {"sha256": "?"}, {"expires_s": 1},
    ):  # fmt: skip
        with pytest.raises(BadRequest):
            await world.files().request("keep", {**good, **wrong})
    for wrong in ({"limit": 0}, {"after": "file-x"}, {"order": "up"}):
        with pytest.raises(UnknownFile if "after" in wrong else BadRequest):
            await world.files().request("list", wrong)
    for verb in ("nothing", "put"):
        with pytest.raises(BadRequest):
            await world.files().request(verb, {})
    subject = subjects.files("public", "put")
    for data, code in (
        (f"{file} 1600\nx".encode(), PayloadTooLarge.code),
        (f"{file} 0\n".encode() + b"x" * (CHUNK_BYTES + 1), PayloadTooLarge.code),
        (b"file-x 0\nx", BadRequest.code),
    ):
        answer = await world.bus.request(subject, data, timeout_us=10_000_000)
        assert json.loads(answer.data)["error"]["code"] == code


async def test_a_store_that_is_half_full_takes_no_upload(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.keeper()
    await world.upload(b"x" * 300)
    monkeypatch.setattr(object_store, "UPLOAD_BYTES", 100)
    with pytest.raises(Overloaded, match="delete files") as caught:
        await world.upload(b"x" * 300)
    assert caught.value.retry_after_ms > 0
    assert len((await world.files().request("list", {}))["data"]) == 1


async def test_upload_of_a_dead_client_is_removed(world: World) -> None:
    await world.keeper()
    await world.upload(b"whole")
    store = ObjectStore(JetStream(world.bus))
    verbs, hour_us = FileVerbs(store, SystemClock()), UPLOAD_S * 1_000_000
    await store.put("public", new_id("file-", 1), 0, b"half", 600)
    for now_us, left in ((0, 1), (hour_us - 1, 1), (hour_us, 0)):
        await verbs.sweep(now_us)
        assert len(await store.unfinished()) == left
    assert len((await world.files().request("list", {}))["data"]) == 1


async def test_the_next_keeper_sends_the_lines_without_a_record(world: World) -> None:
    first = await world.keeper()
    batch = await world.begun(20)
    world.holds = True
    await world.until_asked(1)
    before = [*world.asked]
    await first.finish(5.0)
    world.keepers.clear()
    world.holds = False
    world.asked.clear()
    await world.keeper()
    found = await world.ended(batch)
    assert found["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    answers = await world.lines(found["output_file_id"])
    assert [each["custom_id"] for each in answers] == [f"c{i}" for i in range(20)]
    texts = [each["response"]["body"]["choices"][0]["text"] for each in answers]
    assert texts == [f"p{i}" for i in range(20)]
    again = {json.loads(d.data)["request_id"]: json.loads(d.data) for d in world.asked}
    for delivery in before:
        sent = json.loads(delivery.data)
        assert again.get(sent["request_id"], sent) == sent, "sent again, it is the same request"


async def test_a_full_queue_slows_a_batch_down_and_fails_no_line(world: World) -> None:
    await world.keeper()
    world.outcomes = [Overloaded("full", retry_after_ms=10)] * 12
    found = await world.ended(await world.begun(30))
    assert found["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert found["error_file_id"] is None


async def test_a_cancelled_batch_cancels_its_requests(world: World) -> None:
    await world.keeper()
    world.holds = True
    batch = await world.begun(20)
    await world.until_asked(8)
    world.answer(world.asked[0])
    assert (await world.batch("cancel", id=batch))["status"] == "cancelling"
    found = await world.ended(batch)
    assert (found["status"], found["request_counts"]["completed"]) == ("cancelled", 1)
    assert len(world.cancelled) >= 7
    assert [each["custom_id"] for each in await world.lines(found["output_file_id"])] == ["c0"]
    assert await JetStream(world.bus).subjects_like(subjects.FILE_STREAM, subjects.LINE_ALL) == []


async def test_a_batch_of_an_input_that_is_deleted_fails_with_the_reason(world: World) -> None:
    await world.keeper()
    world.holds = True
    lines = b"".join(
        json.dumps(
            {"custom_id": f"c{i}", "url": "/v1/completions", "body": {"prompt": "x" * 90_000}}
        ).encode()
        + b"\n"
        for i in range(300)
    )
    file = await world.upload(lines)
    asked_for = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h"}
    batch = (await world.batch("create", **asked_for))["id"]
    await world.until_asked(8)
    await world.files().request("delete", {"id": file})
    world.holds = False
    for delivery in [*world.asked]:
        world.answer(delivery)
    found = await world.ended(batch)
    assert found["status"] == "failed"
    assert "has been deleted" in found["errors"]["data"][0]["message"]
    assert 8 <= found["request_counts"]["completed"] < 300
