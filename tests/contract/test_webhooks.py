"""Webhooks of a keeper on a real nats-server: a client, a model, and receivers that fail at first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from support.self_signed import self_signed

from services.keeper import queues, webhooks
from services.keeper.actor import KeeperActor
from services.keeper.webhooks import TRIES_OF_HOST, Target, Webhooks, post, target_of
from services.launcher import nats_server as servers
from services.launcher.nats_server import NatsServer, ServerLimits
from shared.actor.runtime import Runtime
from shared.client.client import Client
from shared.client.file_client import FileClient, asked
from shared.clock import SystemClock
from shared.errors import BadRequest, SetupError, Unavailable
from shared.nats import subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery
from shared.nats.jetstream import JetStream, Puller
from shared.replies import to_json

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass
class Receiver:
    """An HTTP server that answers with the next of `statuses`, then 204; it does not answer to None."""

    statuses: list[int | bytes | None] = field(default_factory=list)
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)  # line, headers, body
    came: asyncio.Condition = field(default_factory=asyncio.Condition)
    port: int = 0

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1")
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            headers = dict(each.lower().split(": ", 1) for each in lines[:])
            headers["webhook-signature"] = next(x for x in lines if x.startswith("webhook-sig")).split(": ")[
                1
            ]
            body = await reader.readexactly(int(headers["content-length"]))
            status = self.statuses.pop(0) if self.statuses else 204
            async with self.came:
                self.got.append((line, headers, body))
                self.came.notify_all()
            if status is None:
                await reader.read()
            elif isinstance(status, bytes):
                writer.write(status)
            else:
                writer.write(f"HTTP/1.1 {status} X\r\nLocation: {self.origin}/else\r\n\r\n".encode())
        writer.close()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60), self.came:
            await self.came.wait_for(lambda: len(self.got) >= count)


class World:
    """Keepers, a client, and a model that answers at once."""

    def __init__(self, server: NatsServer, folder: Path) -> None:
        self.server, self.hosts = server, folder / "webhooks"
        self.keepers: list[Runtime] = []
        self.receiver, self.other = Receiver(), Receiver()

    async def open(self) -> None:
        await self.receiver.open()
        await self.other.open()
        self.hosts.write_text(f"{self.receiver.origin} {SECRET}\n{self.other.origin} {SECRET}\n")
        self.bus = await NatsBus.connect(self.server.url, timeout_s=30)
        self.client = await Client.open(self.bus)
        for subject, answer in {
            "headrace.store.check.*.m": {"seed": 7, "slo_class": "standard"},
            "headrace.v1.models": {"data": [{"id": "m"}]},
            "headrace.v1.generate.*.m": {"created": 1, "usage": {}, "choices": [CHOICE]},
        }.items():
            await self.bus.subscribe(subject, self._answering(to_json(answer)))
        await self.bus.flush()

    def _answering(self, data: bytes) -> Any:
        def answer(delivery: Delivery) -> None:
            self.bus.publish(delivery.reply, data)

        return answer

    async def keeper(self, hosts: str | None = None) -> Runtime:
        bus = await NatsBus.connect(self.server.url, timeout_s=30)
        actor = KeeperActor(webhooks=str(self.hosts) if hosts is None else hosts)
        keeper = Runtime(actor, bus, "f", f"k{len(self.keepers)}")
        await keeper.start()
        self.keepers.append(keeper)
        return keeper

    async def submit(self, request_id: str = "r", path: str = "/x?y=1", **more: Any) -> dict[str, Any]:
        body = {"prompt": "Hi", "request_id": request_id, "webhook": f"{self.receiver.origin}{path}", **more}
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self.client.request(subjects.submit("public", "m"), body)
                except Unavailable:  # the streams are not made yet
                    await asyncio.sleep(0.02)

    async def status(self, request_id: str = "r") -> str:
        return str((await self.client.state(request_id))["status"])

    async def messages(self, stream: str) -> int:
        info = await self.bus.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_us=5_000_000)
        return int(json.loads(info.data).get("state", {"messages": -1})["messages"])

    async def empty(self, *streams: str) -> None:
        async with asyncio.timeout(60):
            while any([await self.messages(stream) for stream in streams]):
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        for keeper in self.keepers:
            await keeper.finish(5.0)
        await self.bus.drain()


CHOICE = {"index": 0, "text": "Ho", "logprobs": None, "finish_reason": "stop"}


@pytest.fixture
def server() -> Iterator[NatsServer]:
    server = servers.start(limits=replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="4GB"))
    yield server
    server.stop()


@pytest.fixture
async def world(server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("services.keeper.webhooks.FIRST_DELAY_US", 10_000)
    monkeypatch.setattr(webhooks, "EVENTS_POLL_S", 0.05)
    monkeypatch.setitem(queues._CONFIG, "ack_wait", 1_000_000_000)
    world = World(server, tmp_path)
    await world.open()
    yield world
    await world.close()


async def test_an_event_is_sent_until_it_is_taken(world: World) -> None:
    keeper = await world.keeper()
    world.receiver.statuses = [500, 302, b"SSH-2.0-x\r\n"]
    assert (await world.submit())["status"] == "queued"
    await world.receiver.until(4)
    await world.empty(subjects.HOOK_STREAM, subjects.WORK_STREAM)
    assert len(world.receiver.got) == 4, "the redirect was followed, or a taken event sent again"
    assert len({headers["webhook-id"] for _, headers, _ in world.receiver.got}) == 1
    line, headers, body = world.receiver.got[-1]
    assert (line, headers["host"]) == ("POST /x?y=1 HTTP/1.1", f"127.0.0.1:{world.receiver.port}")
    event = OpenAI(api_key="x").webhooks.unwrap(body, headers, secret=SECRET)
    assert (event.id, event.data.id) == (headers["webhook-id"], "r")
    assert json.loads(body)["type"] == "request.completed"
    counts = {point.name: point.value for point in keeper.actor.metrics if "webhooks" in point.name}
    assert [*counts.values()] == [1, 3, 0, 0]
    assert (await world.submit())["status"] == "completed", "the same request again is no second event"
    assert await world.messages(subjects.HOOK_STREAM) == 0


async def test_a_url_that_is_not_listed_is_refused_before_anything_is_stored(world: World) -> None:
    await world.keeper()
    await world.submit("first")
    await world.empty(subjects.WORK_STREAM)
    records = await world.messages(subjects.RECORD_STREAM)
    for url in ("http://127.0.0.1:1/", "https://good.example@evil.example/", 7, {"url": "x"}):
        with pytest.raises(BadRequest) as caught:
            await world.submit(webhook=url)
        assert caught.value.param == "webhook"
    assert [await world.messages(s) for s in (subjects.WORK_STREAM, subjects.RECORD_STREAM)] == [0, records]
    world.hosts.write_text(f"other.example {SECRET}\n")  # the file is read again, and hosts may go
    async with asyncio.timeout(60):
        while True:
            with suppress(BadRequest):
                await world.submit(webhook="https://other.example/")
                break
            await asyncio.sleep(0.05)
    with pytest.raises(BadRequest, match="not among the hosts"):
        await world.submit("second")


async def test_webhook_is_refused_and_the_stream_is_absent_without_the_setting(world: World) -> None:
    await world.keeper("")
    await world.submit(webhook=None)
    with pytest.raises(BadRequest, match="this fleet calls none"):
        await world.submit("other")
    assert await world.messages(subjects.HOOK_STREAM) == -1


async def test_a_file_that_is_wrong_is_an_error_at_the_start(world: World) -> None:
    world.hosts.write_text("127.0.0.1 secret\n")
    with pytest.raises(SetupError, match="line 1: a secret is whsec_"):
        await world.keeper()
    world.keepers.clear()


@pytest.mark.parametrize("lost", ["land", "_send"])
async def test_a_keeper_dies_after_the_record(
    world: World, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Before the event is stored, and after that; then with the nats-server."""

    async def dead(*_: Any) -> None:
        await asyncio.sleep(3_600 if lost == "_send" else 0)

    with monkeypatch.context() as patched:
        patched.setattr(Webhooks, lost, dead)
        first = await world.keeper()
        await world.submit()
        async with asyncio.timeout(60):
            while await world.status() != "completed":
                await asyncio.sleep(0.02)
        if lost == "_send":
            await world.empty(subjects.WORK_STREAM)
        await first.finish(5.0)
    assert (await world.messages(subjects.HOOK_STREAM), world.receiver.got) == (int(lost == "_send"), [])
    if lost == "_send":
        back = asyncio.Event()
        world.bus.on_fault(lambda fault: back.set() if fault.kind == "reconnected" else None)
        world.server.process.kill()
        world.server.process.wait()
        world.server.restart()
        await asyncio.wait_for(back.wait(), 20)
    await world.keeper()
    await world.receiver.until(1)
    await world.empty(subjects.HOOK_STREAM, subjects.WORK_STREAM)
    assert len(world.receiver.got) == 1


async def test_an_event_that_cannot_be_stored_keeps_its_request_in_the_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "AGAIN_US", 10_000)
    store, failures = Webhooks._store, [Unavailable("full"), Unavailable("full")]

    async def flaky(self: Webhooks, hook: Any) -> None:
        if failures:
            raise failures.pop()
        await store(self, hook)

    monkeypatch.setattr(Webhooks, "_store", flaky)
    await world.keeper()
    await world.submit()
    await world.receiver.until(1)
    await world.empty(subjects.HOOK_STREAM, subjects.WORK_STREAM)
    assert (failures, len(world.receiver.got)) == ([], 1)


async def test_a_request_that_was_deleted_before_has_no_event(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, may, stored = Webhooks._store, asyncio.Event(), list[Any]()

    async def late(self: Webhooks, hook: Any) -> None:
        await may.wait()
        await store(self, hook)
        stored.append(hook)

    monkeypatch.setattr(Webhooks, "_store", late)
    await world.keeper()
    await world.submit()
    async with asyncio.timeout(60):
        while await world.status() != "completed":
            await asyncio.sleep(0.02)
    await world.client.request(subjects.delete("public", "r"))
    may.set()
    await world.empty(subjects.WORK_STREAM)
    assert (len(stored) > 0, await world.messages(subjects.HOOK_STREAM), world.receiver.got) == (True, 0, [])


async def test_a_keeper_dies_between_the_event_and_the_ack(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    land, lost = Webhooks.land, list[str]()

    async def without_ack(self: Webhooks, hook: Any, reply: str) -> None:
        if lost:
            await land(self, hook, reply)
        else:
            await self._store(hook)
            lost.append(reply)

    monkeypatch.setattr(Webhooks, "land", without_ack)
    monkeypatch.setattr(webhooks, "TRY_S", 60)
    world.receiver.statuses = [None]
    await world.keeper()
    await world.submit()
    await world.receiver.until(1)
    await world.empty(subjects.WORK_STREAM)
    assert (len(lost), await world.messages(subjects.HOOK_STREAM), len(world.receiver.got)) == (1, 1, 1)


async def test_a_host_that_hangs_holds_up_no_other_and_no_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "TRY_S", 60)
    monkeypatch.setitem(webhooks.CONSUMER, "ack_wait", 3_600_000_000_000)
    keeper = await world.keeper()
    count = 3 * TRIES_OF_HOST
    world.receiver.statuses = [None] * count
    for number in range(count):
        await world.submit(f"r{number}")
    await world.receiver.until(TRIES_OF_HOST)
    await world.submit("last", webhook=f"{world.other.origin}/")
    await world.other.until(1)
    assert [await world.status(f"r{number}") for number in range(count)] == ["completed"] * count
    assert len(world.receiver.got) == TRIES_OF_HOST
    assert await world.messages(subjects.HOOK_STREAM) == count
    world.receiver.statuses.clear()
    await keeper.finish(5.0)  # its tries are given back at once
    await world.keeper()
    await world.receiver.until(TRIES_OF_HOST + count)
    await world.empty(subjects.HOOK_STREAM)


async def test_a_host_that_is_down_with_more_events_than_a_consumer_waits_for_holds_up_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the server delivers nothing while 1,000 messages wait for their acks, and does not answer
    pulls. The consumer may be one of an earlier version."""
    monkeypatch.setattr("services.keeper.webhooks.FIRST_DELAY_US", 3_600_000_000)
    pull, pulled, at_once, most = Puller.pull, list[int | None](), 0, 0

    async def noted(puller: Puller, *asked: Any) -> int | None:
        pulled.append(await pull(puller, *asked))
        return pulled[-1]

    async def refused(target: Target, *_: Any) -> int:
        nonlocal at_once, most
        if target.origin == world.other.origin:
            return await post(target, *_)
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        tried.append(target.path)
        return 503

    tried = list[str]()
    monkeypatch.setattr(Puller, "pull", noted)
    monkeypatch.setattr(webhooks, "post", refused)
    streams, key = JetStream(world.bus), target_of(world.receiver.origin).key
    await streams.make_stream(subjects.HOOK_STREAM, webhooks.STREAM)
    earlier = {"ack_policy": "explicit", "ack_wait": 30_000_000_000, "max_deliver": -1}
    earlier["filter_subject"] = f"headrace.store.hook.{key}.*"
    await streams.make_consumer(subjects.HOOK_STREAM, key, earlier)
    for start in range(0, 1_500, 100):
        events = {
            f"evt_{n}": {"url": f"{world.receiver.origin}/{n}", "body": "{}"}
            for n in range(start, start + 100)
        }
        calls = [
            streams.create(subjects.hook(key, "public", name), to_json(event))
            for name, event in events.items()
        ]
        await asyncio.gather(*calls)
    keeper = await world.keeper()
    async with asyncio.timeout(60):
        while len(tried) < 1_500:
            await asyncio.sleep(0.02)
    await world.submit(webhook=f"{world.other.origin}/")
    await world.other.until(1)
    await keeper.finish(5.0)
    assert (len({*tried}), len(tried), most <= TRIES_OF_HOST) == (1_500, 1_500, True)
    assert None not in pulled, "a pull was not answered, and the other host waited for it"


async def test_a_receiver_that_is_down_fills_no_stream_for_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of its own events go, of the tenant that has most of them, and they are counted."""
    monkeypatch.setattr("services.keeper.webhooks.FIRST_DELAY_US", 3_600_000_000)
    monkeypatch.setitem(webhooks.STREAM, "max_bytes", 200_000)
    monkeypatch.setattr(webhooks, "AGAIN_US", 50_000)

    async def refused(target: Target, *more: Any) -> int:
        return 503 if target.origin == world.receiver.origin else await post(target, *more)

    monkeypatch.setattr(webhooks, "post", refused)
    keeper, long = await world.keeper(), "/" + "x" * 1_500
    acme = replace(world.client, tenant="acme")
    body = {"prompt": "Hi", "webhook": f"{world.receiver.origin}/"}
    await world.submit("first")
    for n in range(5):
        await acme.request(subjects.submit("acme", "m"), {**body, "request_id": f"a{n}"})
    for n in range(200):
        await world.submit(f"r{n}", long)
    body["webhook"] = f"{world.other.origin}/"
    await acme.request(subjects.submit("acme", "m"), {**body, "request_id": "last"})
    await world.other.until(1)
    await world.empty(subjects.WORK_STREAM)
    streams = JetStream(world.bus)
    held = await streams.subjects_like(subjects.HOOK_STREAM, subjects.HOOK_ALL)
    acmes = [name for name in held if name.split(".")[4] == "acme"]
    dropped = next(p.value for p in keeper.actor.metrics if p.name == "headrace.keeper.webhooks_dropped")
    assert (len(acmes), dropped) == (5, 201 + 5 - len(held))
    assert 20 < len(held) < 100
    assert keeper.actor.status()["webhooks_dropped"] == {world.receiver.origin: dropped}


async def test_shares_of_the_stream_count_only_tenants_with_waiting_events(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of those whose events were delivered; and whichever keeper stored the events that wait."""
    monkeypatch.setattr("services.keeper.webhooks.FIRST_DELAY_US", 3_600_000_000)
    monkeypatch.setitem(webhooks.STREAM, "max_bytes", 200_000)
    down = "http://127.0.0.1:1"
    world.hosts.write_text(f"{world.other.origin} {SECRET}\n{down} {SECRET}\n")
    keeper, body = await world.keeper(), {"prompt": "Hi", "webhook": f"{world.other.origin}/"}
    await world.submit("first", webhook=f"{world.other.origin}/")
    for tenant in "abcdefghi":
        await replace(world.client, tenant=tenant).request(subjects.submit(tenant, "m"), body)
    await world.other.until(10)
    await world.empty(subjects.WORK_STREAM, subjects.HOOK_STREAM)
    streams, key, url = JetStream(world.bus), target_of(down).key, f"{down}/{'x' * 1_500}"
    event = to_json({"url": url, "body": "{}"})
    for n in range(70):  # as another keeper stores them
        await streams.create(subjects.hook(key, "public", f"evt_{n}"), event)
    await world.submit("its-own", webhook=url)
    async with asyncio.timeout(60):
        while not (dropped := keeper.actor.status()["webhooks_dropped"]):
            await asyncio.sleep(0.02)
    held = await world.messages(subjects.HOOK_STREAM)
    assert held > 40, "half of 200 kB, of one host and tenant"
    assert dropped.keys() == {down}


async def test_a_stream_of_events_that_is_removed_is_made_again(world: World) -> None:
    """Without a restart; the events in it are lost, and later ones come."""
    keeper = await world.keeper()
    await world.submit("before")
    await world.receiver.until(1)
    await world.empty(subjects.HOOK_STREAM)
    await world.bus.request(f"$JS.API.STREAM.DELETE.{subjects.HOOK_STREAM}", b"", timeout_us=5_000_000)
    await world.submit("after")
    await world.receiver.until(2)
    assert [*keeper.actor.status()["removed"]] == [subjects.HOOK_STREAM]  # type: ignore[call-overload]


@pytest.mark.parametrize(("statuses", "most", "tries"), [([503] * 9, 2, 2), ([410], 9, 1)])
async def test_an_event_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch, statuses: Sequence[int], most: int, tries: int
) -> None:
    monkeypatch.setattr("services.keeper.webhooks.MAX_TRIES", most)
    keeper = await world.keeper()
    world.receiver.statuses = [*statuses]
    await world.submit()
    await world.receiver.until(tries)
    await world.empty(subjects.HOOK_STREAM)
    counts = {point.name: point.value for point in keeper.actor.metrics if "webhooks" in point.name}
    assert (len(world.receiver.got), [*counts.values()]) == (tries, [0, tries - 1, 1, 0])


async def test_the_end_of_a_batch_is_an_event(world: World) -> None:
    await world.keeper()
    await world.submit("first", webhook=f"{world.other.origin}/")  # the streams are there
    line = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "Hi"}}

    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps(line).encode()

    described = {"filename": "in.jsonl", "purpose": "batch"}
    file = (await FileClient(world.client, SystemClock()).upload(pieces(), lambda: described))["id"]
    job = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(BadRequest, match="not among the hosts"):
        await asked(
            world.client, subjects.batches("public", "create"), {**job, "webhook": "https://a.example"}
        )
    job["webhook"] = f"{world.receiver.origin}/b"
    made = await asked(world.client, subjects.batches("public", "create"), job)
    await world.receiver.until(1)
    _, headers, body = world.receiver.got[0]
    event = OpenAI(api_key="x").webhooks.unwrap(body, headers, secret=SECRET)
    assert (event.type, event.data.id) == ("batch.completed", made["id"])
    assert "webhook" not in json.dumps(await asked(world.client, subjects.batches("public", "show"), made))


async def test_one_try_has_a_time_limit_and_reads_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver([200, 302, b"x" * 10_000, b"", b"HTTP/1.1 2", b"HTTP/1.1 20x\r\n", None])
    await receiver.open()
    target = target_of(receiver.origin)

    async def sent() -> int:
        return await post(target, {"webhook-signature": "v1,x"}, b"{}")

    assert [await sent(), await sent()] == [200, 302]
    for wrong in (ValueError, EOFError, EOFError, ValueError):
        with pytest.raises(wrong):
            await sent()
    monkeypatch.setattr(webhooks, "TRY_S", 0.05)
    with pytest.raises(TimeoutError):
        await sent()
    assert len(receiver.got) == 7


async def test_a_certificate_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key, receiver = tmp_path / "c.pem", tmp_path / "k.pem", Receiver()
    self_signed(certificate, key)
    context = webhooks.ssl.create_default_context(webhooks.ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    listener = await asyncio.start_server(receiver._serve, "127.0.0.1", ssl=context)
    target = target_of(f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    webhooks._tls.cache_clear()
    with pytest.raises(OSError, match="certificate verify failed"):
        await post(target, {"webhook-signature": "v1,x"}, b"{}")
    webhooks._tls.cache_clear()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert await post(target, {"webhook-signature": "v1,x"}, b"{}") == 204
    webhooks._tls.cache_clear()
    listener.close()
