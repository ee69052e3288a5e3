"""The log of a scheduler: written, read, torn, damaged, and done again."""

from __future__ import annotations

import io
import random
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from loadtest.simulator.replay.rerun import core_of, rerun, rerun_file
from services.scheduler.core import Scheduler
from services.scheduler.reports import event_log
from services.scheduler.reports.event_log import FileSink, LogError, Recorder, state_hash
from services.scheduler.state.requests import (
    Arrived,
    DrainRequested,
    DrainTimedOut,
    Event,
    PeerReady,
    Send,
    Ticked,
)
from services.scheduler.state.state import Limits
from shared.messages import Cancel, StepResult, Tokenized, ints

FACTS = {"scheduler": "s1"}


@dataclass
class Pages:
    """A sink in memory."""

    data: bytearray = field(default_factory=bytearray)
    begins: list[int] = field(default_factory=list)

    def begin(self) -> None:
        self.begins.append(len(self.data))

    def write(self, data: bytes, now_us: int) -> None:
        self.data += data

    def flush(self, now_us: int) -> None: ...

    def close(self) -> None: ...


def recorded_world(sink: Pages, limits: Limits | None = None) -> World:
    world = World(limits or Limits())
    world.scheduler = Recorder(world.scheduler, sink, FACTS)  # type: ignore[assignment]  # the same door
    return world


def busy_log(sink: Pages, seed: int = 1, requests: int = 60) -> World:
    """Requests of all kinds that come, are cancelled, lose their engine, and end."""
    world, draw = recorded_world(sink), random.Random(seed)
    world.add_engine()
    for i in range(requests):
        prompt = [draw.randrange(3, 900) for _ in range(draw.randrange(1, 30))]
        world.ask(f"r{i}", prompt, draw.randrange(1, 20), n=draw.choice([1, 1, 2]), stops=draw.random() < 0.5)
        for _ in range(draw.randrange(4)):
            world.deliver()
        if draw.random() < 0.1:
            world.handle(Arrived("client", Cancel(tenant="public", request=f"r{draw.randrange(i + 1)}")))
        if draw.random() < 0.1:
            world.tick(draw.randrange(10_000))
    world.crash("e1")
    world.add_engine("e1", epoch=2)
    world.run()
    return world


def test_answers_of_tiers_are_replayed(often: None) -> None:
    """Lookups, stores, loads and their failures are events like all others."""
    pages = Pages()
    world = recorded_world(pages)
    world.add_engine(blocks=12, slots=6)
    world.add_tier(FakeTier(capacity=20, l2_us=300))
    for number in range(30):
        world.ask(f"r{number}", [number + 3] * 6, 18)
    for _ in range(60):
        world.run()
        world.tick(20_000)
    meter = world.scheduler.state.counters
    assert meter.loads > 0
    assert meter.stored_blocks > 0
    world.restart_tier()
    world.ask("last", [5] * 9, 4)
    world.run()
    world.lose_tier()
    done = rerun(read(pages.data))
    assert done.difference is None
    assert done.events > 100
    assert done.hashes > 5


def read(data: bytes | bytearray) -> list[event_log.Record]:
    return list(event_log.read(io.BytesIO(bytes(data))))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes and snapshots of a long log, in a short one."""
    monkeypatch.setattr(event_log, "HASH_EVERY", 10)
    monkeypatch.setattr(event_log, "HASH_EVERY_PER_SEQUENCE", 0)
    monkeypatch.setattr(event_log, "SNAPSHOT_EVERY", 100)


EVENTS: list[Event] = [
    PeerReady("executor", "e1", 7),
    Ticked(),
    DrainRequested(),
    DrainTimedOut(),
    Arrived("client", Cancel(tenant="t", request="r"), "00-1", 5),
    Arrived(
        "tokenizer.t",
        Tokenized(request="r", attempt=1, tenant="t", model="m", inbox="i", tokens=ints([1] * 90_000)),
    ),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_of_any_size_comes_back(event: Event) -> None:
    frames = event_log.header(FACTS) + event_log.happened(123, event, [])
    assert read(frames) == [
        event_log.Header(FACTS),
        event_log.LoggedEvent(1, 123, event, event_log.digest_of([])),
    ]


def test_commands_that_differ_in_anything_have_another_digest() -> None:
    one = Send("detokenizer.d", Cancel(tenant="t", request="r"), "trace")
    others = [[], [one, one], [replace(one, to="x")], [replace(one, trace="")]]
    others.append([replace(one, message=Cancel(tenant="t", request="s"))])
    digests = {event_log.digest_of(commands) for commands in [[one], *others]}
    assert len(digests) == 6


def test_a_run_comes_out_equal(often: None) -> None:
    sink = Pages()
    world = busy_log(sink)
    report = rerun(event_log.read(io.BytesIO(sink.data)))
    assert report.difference is None
    records = read(sink.data)
    events = [r for r in records if isinstance(r, event_log.LoggedEvent)]
    assert report.events == len(events) > 150
    assert report.hashes == len(events) // 10
    assert report.snapshots == 1 + len(events) // 100
    assert report.virtual_us == world.now_us - events[0].now_us
    assert report.facts == FACTS


def test_the_last_snapshot_and_its_tail_equal_the_whole(often: None, tmp_path: Path) -> None:
    sink = Pages()
    world = busy_log(sink)
    path = tmp_path / "events.log"
    path.write_bytes(sink.data)
    report = rerun_file(path, last_only=True)
    assert report.difference is None
    whole = rerun_file(path)
    assert report.first_event == whole.events // 100 * 100 + 1
    assert report.events == whole.events % 100
    *_, (start, snapshot) = _snapshots(sink.data)
    core = core_of(snapshot)
    for record in read(sink.data)[start:]:
        if isinstance(record, event_log.LoggedEvent):
            core.handle(record.event, record.now_us)
    assert state_hash(core.state) == state_hash(world.scheduler.state)


def _snapshots(data: bytearray) -> list[tuple[int, bytes]]:
    return [(i, r.data) for i, r in enumerate(read(data)) if isinstance(r, event_log.Snapshot)]


def test_the_larger_the_state_the_rarer_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "HASH_EVERY", 4)
    monkeypatch.setattr(event_log, "HASH_EVERY_PER_SEQUENCE", 3)
    sink = Pages()
    world = recorded_world(sink)
    world.add_engine()
    world.ask("r", [1, 2], 3, n=2)
    for _ in range(20):
        world.tick(1)
    hashes = [r.number for r in read(sink.data) if isinstance(r, event_log.StateHash)]
    assert hashes == [10, 20]  # of 22 events; two sequences wait for a result


def test_another_answer_to_an_event_is_found_at_once() -> None:
    sink = Pages()
    busy_log(sink, requests=10)
    records = read(sink.data)
    at = next(
        i for i, r in enumerate(records) if isinstance(r, event_log.LoggedEvent) and _is_result(r.event)
    )
    happened = records[at]
    assert isinstance(happened, event_log.LoggedEvent)
    wrong = replace(happened, digest=bytes(8))
    report = rerun([*records[:at], wrong, *records[at + 1 :]])
    assert report.difference is not None
    assert (report.difference.what, report.difference.event) == ("commands", happened.number)
    assert report.difference.expected == "00" * 8
    assert report.difference.got == happened.digest.hex()
    assert report.difference.at_us == happened.now_us - _first(records).now_us
    assert report.difference.details[0].startswith("event Arrived(source='executor.e1', message=StepResult(")
    assert any(line.startswith("command to executor.e1: StepPlan(") for line in report.difference.details)
    assert report.events == happened.number


def _is_result(event: Event) -> bool:
    return isinstance(event, Arrived) and isinstance(event.message, StepResult)


def _first(records: list[event_log.Record]) -> event_log.LoggedEvent:
    return next(r for r in records if isinstance(r, event_log.LoggedEvent))


def test_a_state_that_went_its_own_way_is_named(often: None) -> None:
    """The scheduler of the log has a tombstone that no event made, from event 45 on."""
    sink = Pages()
    world = recorded_world(sink)
    world.add_engine()
    for i in range(60):
        world.ask(f"r{i}", [5, 6], 2)
        world.run()
        if _events(sink) >= 45 and not world.scheduler.state.tombstones:
            world.scheduler.state.tombstones["t", "x"] = 2**40
    report = rerun(read(sink.data))
    difference = report.difference
    assert difference is not None
    assert (difference.what, difference.event, difference.equal_until) == ("state", 50, 40)
    assert difference.details == ["state.tombstones.keys(): ([0, ['t', 'x']],), now ()"]


def _events(sink: Pages) -> int:
    return sum(isinstance(r, event_log.LoggedEvent) for r in read(sink.data))


def test_an_event_that_the_core_fails_on_is_in_the_log() -> None:
    sink = Pages()
    world = recorded_world(sink)
    world.add_engine()
    broken = StepResult(exec_epoch=1, step=1, ids=ints([1]), done=ints([0]))
    world.ask("r", [1, 2], 3)
    world.scheduler.state.executors["e1"].in_flight[0].rows[:] = [None]  # type: ignore[list-item]  # a bug
    world.scheduler.begin(world.now_us)  # type: ignore[attr-defined]  # it is a Recorder
    with pytest.raises(TypeError):
        world.handle(Arrived("executor.e1", broken))
    number = _events(sink)
    report = rerun(event_log.read(io.BytesIO(sink.data[sink.begins[-1] :])))
    assert report.difference is not None
    assert (report.difference.what, report.difference.event) == ("failure", number)
    assert report.difference.details[0].startswith("Arrived: TypeError(")


@pytest.mark.parametrize("torn", [1, 7, 8, 9, 40])
def test_a_torn_end_is_ignored(torn: int) -> None:
    sink = Pages()
    busy_log(sink, requests=5)
    whole = read(sink.data)
    assert read(sink.data[:-torn]) == whole[: len(read(sink.data[:-torn]))]
    assert len(whole) - 2 <= len(read(sink.data[:-torn])) < len(whole)


def test_damage_before_the_end_is_an_error() -> None:
    sink = Pages()
    busy_log(sink, requests=5)
    sink.data[len(sink.data) // 2] ^= 1
    with pytest.raises(LogError, match="damaged at byte"):
        read(sink.data)


@pytest.mark.parametrize("data", [b"plain text, long enough", b"short", bytes(200)])
def test_damaged_log_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(LogError):
        rerun_file(path)


@pytest.mark.parametrize("version", [1, 15, 19])
def test_another_version_is_refused(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "VERSION", version)
    data = event_log.header(FACTS)
    monkeypatch.undo()
    with pytest.raises(LogError, match=f"of version {version}, and this Headrace reads version 20"):
        read(data)


def test_missing_file_and_empty_file_have_different_errors(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="cannot be read: No such file"):
        rerun_file(tmp_path / "none")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(LogError, match="is empty"):
        rerun_file(tmp_path / "empty")


def test_log_without_a_snapshot_is_an_error_that_names_it() -> None:
    with pytest.raises(LogError, match="no whole snapshot"):
        rerun(read(event_log.header(FACTS) + event_log.happened(1, Ticked(), [])))


def test_a_snapshot_is_paged_and_joined() -> None:
    data = bytes(range(256)) * 1000
    frames = list(event_log.snapshot_pages(7, data))
    assert len(frames) == -(-len(data) // event_log.PAGE_BYTES)
    assert max(map(len, frames)) < 64 * 1024
    assert read(event_log.header(FACTS) + b"".join(frames)) == [
        event_log.Header(FACTS),
        event_log.Snapshot(7, data),
    ]


def test_a_file_is_flushed_each_second_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    first = FileSink(path)
    first.write(b"ab", 5_000_000)
    assert path.read_bytes() == b"ab"
    first.write(b"cd", 5_999_999)
    assert path.read_bytes() == b"ab"
    first.flush(6_000_000)
    assert path.read_bytes() == b"abcd"
    second = FileSink(path)
    assert second.path == tmp_path / "events-2.log"
    for sink in (first, second):
        sink.close()


def test_the_recorder_answers_as_its_core() -> None:
    sink = Pages()
    core = Scheduler(Limits())
    stands_in = Recorder(core, sink, FACTS)
    assert stands_in.state is core.state
    assert stands_in.is_idle
    assert stands_in.handle(Ticked(), 5) == []
    assert [frame[0] for frame in struct.iter_unpack("<I", sink.data[:4])] == [
        len(event_log.header(FACTS)) - 8
    ]
