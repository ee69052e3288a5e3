"""The event log on its way: pieces on a subject, `headrace record`, and the two commands' words."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.actor_fleet import Fleet, Hand, watched_fleet
from support.memory_bus import MemoryBroker

from loadtest.simulator.command import report_lines
from loadtest.simulator.replay.rerun import rerun
from services.launcher.cli import main
from services.launcher.commands.record import Recording, record_from
from services.scheduler.actor import SchedulerActor
from services.scheduler.reports import event_log
from services.scheduler.reports.event_log import BusSink
from services.scheduler.state.state import Limits
from shared.errors import EngineError, Unavailable
from shared.messages import Tokenized, ints
from shared.nats import subjects
from shared.nats.interface import Delivery


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with watched_fleet() as made:
        yield made


async def recorded(fleet: Fleet, requests: int, event_log: str = "nats") -> bytes:
    """What `headrace record` writes of a scheduler that gets requests; some came before it listened."""
    actor = SchedulerActor(Limits(), "m", event_log)
    runtime = await fleet.started(actor, "s")
    tokenizer = Hand("tokenizer")
    await fleet.started(tokenizer, "t")
    into = Recording(file := io.BytesIO())
    for i in range(requests):
        if i == requests // 2 and event_log == "nats":
            listening = asyncio.create_task(record_from(fleet.broker.connect(), "s", into, None))
            while not (into.begun.is_set() or listening.done()):
                await asyncio.sleep(0)
        asked = Tokenized(
            request=f"r{i}", attempt=1, tenant="t", model="m", inbox="in", tokens=ints([1] * 9_000)
        )
        tokenizer.mailbox.send("scheduler.s", asked)
        fleet.clock.advance(200_000)
        await fleet.broker.settle()
    await runtime.finish(0)
    await fleet.broker.settle()
    if event_log == "nats":
        listening.cancel()
        await listening
    return file.getvalue()


async def test_a_recording_begins_at_its_snapshot_and_replays(fleet: Fleet) -> None:
    data = await recorded(fleet, 12)
    records = list(event_log.read(io.BytesIO(data)))
    assert [type(r).__name__ for r in records[:2]] == ["Header", "Snapshot"]
    report = rerun(records)
    assert report.difference is None
    asked = [
        r.event for r in records if isinstance(r, event_log.LoggedEvent) and "Tokenized" in repr(r.event)[:80]
    ]
    assert len(asked) == 6
    assert report.first_event > 6
    assert report.facts["scheduler"] == "s"


async def test_a_log_in_a_file_is_whole_when_the_scheduler_stops(fleet: Fleet, tmp_path: Path) -> None:
    await recorded(fleet, 3, str(tmp_path / "events.log"))
    report = rerun(event_log.read(io.BytesIO((tmp_path / "events.log").read_bytes())))
    assert report.difference is None
    assert report.first_event == 1


async def test_scheduler_without_a_log_is_an_error(fleet: Fleet) -> None:
    await fleet.started(SchedulerActor(Limits(), "m"), "s")
    with pytest.raises(Unavailable, match="--event-log nats"):
        await record_from(fleet.broker.connect(), "s", Recording(io.BytesIO()), 0)


def piece(offset: int, data: bytes, begins: bool = False) -> Delivery:
    headers = {event_log.OFFSET_HEADER: str(offset)} | ({event_log.BEGINS_HEADER: "1"} if begins else {})
    return Delivery("s", data, headers=headers)


def test_a_lost_piece_ends_the_recording() -> None:
    into = Recording(file := io.BytesIO())
    for delivery in (piece(0, b"old"), piece(3, b"ab", begins=True), piece(5, b"cd"), piece(9, b"x")):
        into.on_piece(delivery)
    into.on_piece(piece(7, b"ef"))
    assert file.getvalue() == b"abcd"
    assert into.broken.is_set()


async def test_lost_piece_is_reported() -> None:
    broker = MemoryBroker()
    scheduler, into = broker.connect(), Recording(io.BytesIO())
    await scheduler.subscribe("headrace.v1.events.s.snapshot", lambda d: scheduler.publish(d.reply, b""))
    into.begun.set()
    listening = asyncio.create_task(record_from(broker.connect(), "s", into, None))
    await broker.settle()
    scheduler.publish(subjects.events("s"), b"x", headers={event_log.OFFSET_HEADER: "77"})
    await broker.settle()
    with pytest.raises(EngineError, match="lost a part"):
        await listening


async def test_pieces_are_batched_by_time_and_size_and_begin_with_a_snapshot() -> None:
    broker, got = MemoryBroker(), list[Delivery]()
    await broker.connect().subscribe("x", got.append)
    sink = BusSink(broker.connect(), "x")
    sink.write(b"a", 1_000_000)
    sink.write(b"b", 1_100_000)
    sink.write(b"c", 1_200_000)
    sink.begin()
    sink.write(b"d" * 100_000, 1_250_000)
    sink.write(b"e", 1_251_000)
    sink.flush(1_256_000)
    await broker.settle()
    assert [len(d.data) for d in got] == [1, 2, 61_440, 38_560, 1]
    assert [int(d.headers[event_log.OFFSET_HEADER]) for d in got] == [0, 1, 3, 61_443, 100_003]
    assert [event_log.BEGINS_HEADER in d.headers for d in got] == [False, False, True, False, False]


def test_replay_prints_its_findings_and_exits_by_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(_write(tmp_path))
    path = tmp_path / "events.log"
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("scheduler s, model m, from event 1\n")
    assert "equal: every command and every hash" in out
    assert main(["replay", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] is None
    path.write_bytes(b"no log at all, but long enough")
    assert main(["replay", str(path)]) == 1
    assert "not an event log" in capsys.readouterr().err


async def _write(folder: Path) -> None:
    async with watched_fleet() as fleet:
        await recorded(fleet, 3, str(folder / "events.log"))


def test_difference_is_printed_with_its_place() -> None:
    difference = {
        "what": "state", "event": 20, "at_us": 1_500_000, "expected": "aa", "got": "bb", "equal_until": 10,
        "details": ["state.draining: False, now True"],
    }  # fmt: skip
    body = {
        "facts": {}, "first_event": 1, "events": 2000, "commands": 7, "hashes": 2, "snapshots": 1,
        "virtual_us": 1_600_000, "wall_us": 1000, "difference": difference,
    }  # fmt: skip
    assert report_lines(body)[3:] == [
        "  the state after event 20 differs; after event 10 it was equal, 1.500000 s after the first event",
        "    in the log aa, recomputed bb",
        "    state.draining: False, now True",
    ]
