"""JetStream's calls on a real nats-server with a store on disk."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.launcher import nats_server as servers
from services.launcher.nats_server import NatsServer, ServerLimits
from shared.errors import Unavailable
from shared.nats import jetstream
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery
from shared.nats.jetstream import JetStream, Puller, StreamFull, Taken, _json, deliveries

QUEUE = {
    "subjects": ["w.>"], "retention": "workqueue", "storage": "file", "discard": "new", "max_msgs": 3,
    "allow_direct": True,
}  # fmt: skip
RECORDS = {
    "subjects": ["d.>"], "storage": "file", "discard": "new", "max_msgs_per_subject": 1, "max_bytes": 1_000,
    "allow_direct": True, "allow_msg_ttl": True,
}  # fmt: skip
CONSUMER = {"ack_policy": "explicit", "ack_wait": 30 * 10**9, "max_deliver": -1}


@pytest.fixture
def server() -> Iterator[NatsServer]:
    limits = replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="64MB")
    server = servers.start(limits=limits)
    yield server
    server.stop()


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, timeout_s=30)
    yield bus
    await bus.drain()


async def streams(bus: NatsBus) -> JetStream:
    found = JetStream(bus)
    await found.make_stream("W", QUEUE)
    await found.make_stream("D", RECORDS)
    await found.make_consumer("W", "k", CONSUMER)
    return found


async def until_pending(js: JetStream, count: int) -> None:
    """Return when consumer k has so many messages to deliver: a stream answers for a message before its
    consumers know of it."""
    async with asyncio.timeout(60):
        while [each["num_pending"] for each in await js.consumers("W")] != [count]:
            pass


async def test_a_subject_is_created_once_and_read_back(bus: NatsBus) -> None:
    js = await streams(bus)
    await js.create("d.a.1", b"first")
    with pytest.raises(Taken):
        await js.create("d.a.1", b"second")
    assert await js.last("D", "d.a.1") == b"first"
    assert await js.last("D", "d.a.2") is None


async def test_stream_leader_is_queried_for_messages_that_a_replica_may_lack(bus: NatsBus) -> None:
    js = await streams(bus)
    replicated = JetStream(bus, replicated=True)
    await js.create("w.1", b"\x00one")
    assert await replicated.last("W", "w.2") is None
    assert await replicated.last("W", "w.1") == b"\x00one" == await replicated._last_at_leader("W", "w.1")


@pytest.mark.parametrize("copied", [True, False])
async def test_a_mirror_answers_for_no_message_that_it_alone_has_and_for_none_that_it_lacks(
    bus: NatsBus, copied: bool
) -> None:
    """An operator's backup: the server gives its readers of one stream to the mirrors in turn."""
    js = await streams(bus)
    old, new = b"\x00old" * 250_000, b"new"  # 1 MB, and a third more in the leader's answer
    await js.replace("d.kept", b"kept")
    await js._call("$JS.API.STREAM.UPDATE.D", _json({"name": "D", **RECORDS, "max_bytes": 4_000_000}))
    await js.replace("d.a", old)
    lacks = {} if copied else {"filter_subject": "d.kept"}
    await js.make_stream("BACKUP", {"storage": "file", "mirror": {"name": "D", **lacks}})
    async with asyncio.timeout(60):
        while (await js._info("BACKUP", {})).get("mirror", {}).get("active", -1) < 0:
            await asyncio.sleep(0.01)
        while (await js._info("BACKUP", {}))["state"]["messages"] < 1 + copied:
            await asyncio.sleep(0.01)
        answered = set[str | None]()  # by streams, None: no such message
        while len(answered) < 2:
            answer = await js._request("$JS.API.DIRECT.GET.D.d.a", b"")
            answered.add(answer.headers.get("Nats-Stream"))
    assert answered == {"D", "BACKUP" if copied else None}
    assert {await js.last("D", "d.a") for _ in range(40)} == {old}
    await js.replace("d.a", new)
    assert {await js.last("D", "d.a") for _ in range(40)} == {new}
    await js.purge("D", "d.a")
    assert {await js.last("D", "d.a") for _ in range(40)} == {None}
    assert {await js.last("D", "d.kept") for _ in range(40)} == {b"kept"}
    assert {await js.last("D", "d.a", sure=False) for _ in range(40)} == {None}, "a deleted message came back"


async def test_a_full_stream_refuses_and_keeps_what_it_has(bus: NatsBus) -> None:
    js = await streams(bus)
    for i in range(3):
        await js.create(f"w.{i}", b"x")
    with pytest.raises(StreamFull) as caught:
        await js.create("w.3", b"x")
    assert (caught.value.code, caught.value.retry_after_ms > 0) == (429, True)
    with pytest.raises(StreamFull):
        for i in range(9):
            await js.create(f"d.{i}", b"x" * 300)
    assert [await js.last("W", f"w.{i}") for i in range(4)] == [b"x", b"x", b"x", None]
    assert await js.last("D", "d.0") == b"x" * 300


async def test_streams_that_fill_the_disk_are_created_once(server: NatsServer, bus: NatsBus) -> None:
    """The server would count their space a second time."""
    config = {**QUEUE, "max_bytes": 40 * 1024 * 1024}
    js = JetStream(bus)
    await js.make_stream("W", config)
    await js.make_stream("W", config)
    with pytest.raises(StreamFull):
        await js.make_stream("X", {**config, "subjects": ["x"]})


async def test_a_stream_of_other_settings_stays(bus: NatsBus) -> None:
    js = await streams(bus)
    await js.make_stream("W", {**QUEUE, "max_msgs": 9})
    for i in range(3):
        await js.create(f"w.{i}", b"x")
    with pytest.raises(StreamFull):
        await js.create("w.3", b"x")


async def test_pulled_messages_come_again_until_they_are_acked(bus: NatsBus) -> None:
    js, got = await streams(bus), list[Delivery]()
    await js.create("w.1", b"one")
    await js.create("w.2", b"two")
    await until_pending(js, 2)
    puller = await Puller.open(bus, got.append)
    assert await puller.pull("W", "k", 2) == 2
    assert [(d.subject, d.data, deliveries(d.reply)) for d in got] == [("w.1", b"one", 1), ("w.2", b"two", 1)]
    assert await puller.pull("W", "k", 1) == 0
    js.ack(got[0].reply)
    js.progress(got[1].reply)
    js.nak(got[1].reply, 1_000)
    async with asyncio.timeout(60):  # acks are handled some time after they were sent
        while not await puller.pull("W", "k", 3):
            pass
    assert [(d.subject, deliveries(d.reply)) for d in got[2:]] == [("w.2", 2)]
    js.ack(got[2].reply)
    assert await puller.pull("W", "k", 1) == 0, "the end of an empty pull was not received"
    assert len(got) == 3
    async with asyncio.timeout(60):
        while await js.subjects_like("W", "w.>"):
            pass
    assert await js.last("W", "w.1") is await js.last("W", "w.2") is None
    await js.create("w.1", b"an acked message leaves its subject free")


async def test_consumers_and_subjects_are_listed_page_by_page(bus: NatsBus) -> None:
    js = JetStream(bus)
    await js.make_stream("P", {"subjects": ["p.>"], "retention": "workqueue", "storage": "memory"})
    for number in range(300):  # the server lists 256 a page
        await js.create(f"p.{number}", b"x")
    assert set(await js.subjects_like("P", "p.>")) == {f"p.{number}" for number in range(300)}
    assert await js.subjects_like("P", "p.x.>") == []
    await js.make_consumer("P", "k", CONSUMER)
    for _ in range(2):
        await js.delete_consumer("P", "k")
    assert await js.consumers("P") == []
    for number in range(300):
        await js.make_consumer("P", f"k{number}", {**CONSUMER, "filter_subject": f"p.{number}"})
    found = await js.consumers("P")
    assert {(c["config"]["filter_subject"], c["num_pending"]) for c in found} == {
        (f"p.{number}", 1) for number in range(300)
    }


async def test_a_pull_of_a_missing_consumer_is_noticed(bus: NatsBus) -> None:
    await streams(bus)
    puller = await Puller.open(bus, lambda _: None)
    assert await puller.pull("W", "gone", 1) is None


async def test_pull_waits_for_a_stored_message_that_its_consumer_has_not_seen_yet(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    js, got, stored = await streams(bus), list[Delivery](), Counter(k=1)
    puller = await Puller.open(bus, got.append, stored)
    with monkeypatch.context() as slow:
        slow.setattr(jetstream, "SEEN_US", 50_000_000)
        slow.setattr(jetstream, "CALL_US", 60_000_000)
        pulling = asyncio.create_task(puller.pull("W", "k", 2))
        await asyncio.sleep(0)  # the pull is on its way to the server, and so before the message
        await js.create("w.1", b"one")
        assert await pulling == 1, "it waits for the first message alone"
    assert ([each.data for each in got], stored) == ([b"one"], Counter())
    stored["k"] = 1  # another reader has taken it
    assert (await puller.pull("W", "k", 2), stored) == (0, Counter())


async def test_a_message_that_is_stored_during_a_pull_that_brings_none_is_waited_for(bus: NatsBus) -> None:
    await streams(bus)
    stored = Counter[str]()
    puller = await Puller.open(bus, lambda _: None, stored)
    pulling = asyncio.create_task(puller.pull("W", "k", 2))
    await asyncio.sleep(0)  # the pull is on its way to the server
    stored["k"] += 1
    assert (await pulling, stored) == (0, Counter(k=1))
    assert (await puller.pull("W", "k", 2), stored) == (0, Counter())


async def test_pulls_go_on_after_the_server_was_killed_and_started_again(
    server: NatsServer, bus: NatsBus
) -> None:
    js, got, back = await streams(bus), list[Delivery](), asyncio.Event()
    bus.on_fault(lambda fault: back.set() if fault.kind == "reconnected" else None)
    await js.create("w.1", b"one")
    await until_pending(js, 1)
    puller = await Puller.open(bus, got.append)
    assert await puller.pull("W", "k", 1) == 1
    server.process.kill()
    server.process.wait()
    assert await puller.pull("W", "k", 1) is None
    server.restart()
    await asyncio.wait_for(back.wait(), 20)
    await js.create("w.2", b"two")
    assert await js.last("W", "w.1") == b"one"
    async with asyncio.timeout(60):
        while got[-1].data != b"two":  # the server may have forgotten that it has delivered the first one
            await puller.pull("W", "k", 2)


def test_the_count_of_deliveries_is_read_from_both_forms_of_an_ack() -> None:
    assert deliveries("$JS.ACK.W.k.7.1.1.1795624588273375888.2") == 7
    assert deliveries("$JS.ACK.hub.ACC.W.k.7.1.1.1795624588273375888.2.token") == 7


def test_folders_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / 'caf\u00e9 \u2603 "q" \udcff'  # the last is no UTF-8
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    store = str(folder / "store")
    server = servers.start(limits=replace(ServerLimits(), jetstream_file="64MB", store=store))
    server.stop()
    assert (folder / "store" / "jetstream").is_dir()


async def test_calls_are_unavailable_with_the_reason_without_jetstream(nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(nats_server.url, timeout_s=30)
    js = JetStream(bus)
    calls = (
        js.create("w.1", b""),
        js.last("W", "w.1"),
        js.make_stream("W", QUEUE),
        js.make_consumer("W", "k", {}),
    )
    for call in calls:
        with pytest.raises(Unavailable, match="no JetStream"):
            await call
    await bus.drain()


async def test_a_pull_without_an_answer_brings_nothing_later(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps a pull of a consumer that waits for acks, also one without a wait."""
    js, got = await streams(bus), list[Delivery]()
    await js.make_consumer("W", "k", {**CONSUMER, "max_ack_pending": 1})
    for name in "123":
        await js.create(f"w.{name}", b"x")
    await until_pending(js, 3)
    puller = await Puller.open(bus, got.append)
    assert await puller.pull("W", "k", 2) == 1
    monkeypatch.setattr(jetstream, "CALL_US", 50_000)
    assert [await puller.pull("W", "k", 2) for _ in range(3)] == [None] * 3
    monkeypatch.undo()
    assert [consumer["num_waiting"] for consumer in await js.consumers("W")] == [0]
    js.ack(got[0].reply)
    assert await puller.pull("W", "k", 1) == 1
    assert [each.subject for each in got] == ["w.1", "w.2"]
