"""The copy lane with a copier moved by hand: what runs when, what stops it, and what is answered."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from mmap import mmap
from pathlib import Path

import pytest
from support.shm import Segment, segment
from support.virtual_loop import FakeClock

from services.executor.engine import Arena, ArenaError, YieldDevice, keep_device
from services.executor.kv_transfer import worker
from services.executor.kv_transfer.worker import RECENT_US, CopyCallbacks, CopyRate, CopyWorker
from services.kv_offload.backends.arena import shared_arena
from shared.messages import KvCopied, KvCopy, ints, longs

WITHIN_S = 90
SIZE = 64  # of a block
ROOM = 8


class HandCopier:
    """Writes down its calls; each piece waits for `go` once `hold` is set."""

    piece_bytes = 2 * SIZE

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.calls: list[tuple[str, list[int], list[int]]] = []
        self.moved_us = 0  # by the device's clock
        self.attached: mmap | None = None
        self.fail: dict[str, Exception] = {}
        self.hold = False
        self.slices_s: list[float] = []  # of an attach
        self.began: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.go = threading.Semaphore(0)

    def _do(self, what: str, blocks: Sequence[int] = (), offsets: Sequence[int] = ()) -> None:
        self.calls.append((what, list(blocks), list(offsets)))
        if error := self.fail.pop(what, None):
            raise error

    def attach(self, arena: Arena, give_way: YieldDevice = keep_device) -> None:
        self._do("attach")
        for took_s in self.slices_s:
            self.began.put(None)
            if not give_way(took_s):
                raise ArenaError("it was given up")
        self.attached = arena.view

    def detach(self) -> None:
        self._do("detach")
        self.attached = None

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        self._piece("store", blocks, offsets)

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        self._piece("load", blocks, offsets)

    def finish(self) -> int:
        self._do("finish")
        return self.moved_us

    def _piece(self, what: str, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self.attached is not None
        assert not self.attached.closed, "the mapping went while it was in use"
        if self.hold:
            self.began.put(None)
            assert self.go.acquire(timeout=WITHIN_S)
        self.clock.advance(10 * len(blocks))
        self._do(what, blocks, offsets)

    def pieces(self) -> list[tuple[str, list[int]]]:
        return [(what, blocks) for what, blocks, _ in self.calls if blocks]


class Bench:
    """A lane over a copier, with an arena mapped, whose device has begun incarnation 1."""

    def __init__(self, file: Segment) -> None:
        self.clock, self.file = FakeClock(), file
        self.computing = False
        self.copier = HandCopier(self.clock)
        self.reports: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.lane = CopyWorker(
            self.copier,
            self.clock,
            CopyCallbacks(
                on_copied=lambda epoch, copied: self.reports.put((epoch, copied)),
                on_idle=lambda: self.reports.put("quiet"),
                on_unmapped=lambda generation: self.reports.put(generation),
            ),
            lambda: self.computing,
        )
        self.lane.begin(1)
        self.lane.map(file.name, file.generation)
        self.lane.on_stepped(1, 0)
        self.copy(0)  # of nothing: answered once the arena is mapped
        assert self.answers(1) == [(0, "ok")]

    def copy(self, job: int, *blocks: int, after: int = 0, store: bool = True, **other: int) -> None:
        first = other.get("place", 0)
        offsets = longs((first + i) * SIZE for i in range(len(blocks)))
        assert self.lane.queue_copy(
            KvCopy(
                job=job,
                to_arena=store,
                after_step=after,
                arena_generation=other.get("generation", self.file.generation),
                blocks=ints(blocks),
                offsets=offsets,
                block_bytes=SIZE,
            )
        )

    def next(self) -> object:
        return self.reports.get(timeout=WITHIN_S)

    def copied(self) -> KvCopied:
        epoch, copied = self.next()  # type: ignore[misc]  # the test knows what comes
        assert epoch == self.lane._epoch
        assert isinstance(copied, KvCopied)
        return copied

    def answers(self, count: int) -> list[tuple[int, str]]:
        found = [self.copied() for _ in range(count)]
        return [(one.job, one.status) for one in found]

    def until_it_copies(self) -> None:
        self.copier.began.get(timeout=WITHIN_S)

    def end(self) -> None:
        self.copier.hold = False
        self.copier.go.release(100)
        self.lane.close(WITHIN_S)
        assert not self.lane._thread.is_alive()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with segment(ROOM * SIZE) as file:
        made = Bench(file)
        yield made
        made.end()


def test_copies_go_in_order_in_pieces_and_are_answered(bench: Bench) -> None:
    bench.copy(7, 4, 5, 6, 1, 9)
    bench.copy(8, 3, store=False, place=7)
    first, second = bench.copied(), bench.copied()
    assert (first.job, first.status, first.bytes, first.took_us) == (7, "ok", 5 * SIZE, 50)
    assert (second.job, second.status, second.bytes, second.took_us) == (8, "ok", SIZE, 10)
    assert bench.copier.calls == [
        ("attach", [], []),
        ("store", [4, 5], [0, SIZE]), ("store", [6, 1], [2 * SIZE, 3 * SIZE]), ("store", [9], [4 * SIZE]),
        ("finish", [], []),
        ("load", [3], [7 * SIZE]),
        ("finish", [], []),
    ]  # fmt: skip
    assert (bench.lane.stored.copies, bench.lane.stored.bytes) == (2, 5 * SIZE)  # one of nothing
    assert (bench.lane.loaded.copies, bench.lane.loaded.bytes) == (1, SIZE)


def test_the_wait_is_from_its_arrival_to_its_first_piece(bench: Bench) -> None:
    bench.copier.hold = True
    bench.copy(1, 4)
    bench.until_it_copies()
    bench.copy(2, 5)
    bench.clock.advance(300)
    bench.copier.hold = False
    bench.copier.go.release()
    assert [bench.copied().wait_us for _ in range(2)] == [0, 300 + 10]


def test_copy_waits_for_its_step_and_delays_no_other(bench: Bench) -> None:
    bench.copy(1, 4, after=3)
    bench.copy(2, 5, after=2)
    bench.copy(3, 6)
    assert bench.answers(1) == [(3, "ok")]
    bench.lane.on_stepped(1, 1)
    bench.lane.on_stepped(1, 2)
    assert bench.answers(1) == [(2, "ok")]
    bench.lane.on_stepped(0, 9)  # of an earlier incarnation
    bench.copy(4, 7)
    assert bench.answers(1) == [(4, "ok")]
    assert bench.lane.queued == 1
    bench.lane.on_stepped(1, 3)
    assert bench.answers(1) == [(1, "ok")]
    assert [blocks for _, blocks in bench.copier.pieces()] == [[6], [5], [7], [4]]


def test_a_new_incarnation_stops_what_runs_between_pieces_and_forgets_the_rest(bench: Bench) -> None:
    """Its blocks are another's as soon as the incarnation is announced."""
    bench.copier.hold = True
    bench.copy(1, *range(8), store=False)
    bench.copy(2, 9)
    bench.until_it_copies()
    bench.lane.begin(2)
    assert (bench.lane.is_idle, bench.lane.queued) == (False, 0)
    bench.copy(3, 10)
    bench.copier.hold = False
    bench.copier.go.release()
    assert bench.next() == "quiet"
    assert bench.lane.is_idle
    assert bench.copier.pieces() == [("load", [0, 1])]
    bench.lane.on_stepped(1, 50)  # a step of the old one that was still queued
    assert bench.copier.pieces() == [("load", [0, 1])]  # the device has not begun the new one
    bench.lane.on_stepped(2, 0)
    assert bench.answers(1) == [(3, "ok")]
    assert bench.copier.pieces() == [("load", [0, 1]), ("store", [10])]


def test_new_incarnation_is_quiet_at_once_without_a_running_copy(bench: Bench) -> None:
    bench.copy(1, 4, after=3)
    bench.lane.begin(2)
    assert bench.lane.is_idle


def test_a_new_arena_ends_the_copies_of_the_old_one_and_is_used(bench: Bench) -> None:
    bench.copier.hold = True
    bench.copy(1, *range(8))
    bench.copy(2, 9)
    bench.until_it_copies()
    old = bench.file
    with segment(ROOM * SIZE) as bench.file:
        bench.lane.map(bench.file.name, bench.file.generation)
        bench.copier.hold = False
        bench.copier.go.release()
        first = bench.copied()
        assert (first.job, first.status, first.bytes) == (1, "stale_arena", 2 * SIZE)
        assert bench.next() == old.generation  # nothing of it is left
        assert bench.answers(1) == [(2, "stale_arena")]
        bench.copy(3, 1)
        bench.copy(4, 1, generation=old.generation)
        assert bench.answers(2) == [(3, "ok"), (4, "stale_arena")]
        assert bench.lane.generation == bench.file.generation
        assert [what for what, _, _ in bench.copier.calls] == [
            "attach", "store", "finish", "detach", "attach", "store", "finish"
        ]  # fmt: skip


def test_the_old_mapping_stays_when_its_file_goes(bench: Bench) -> None:
    bench.file.path.unlink()
    bench.copy(1, 1)
    assert bench.answers(1) == [(1, "ok")]


def test_range_outside_the_arena_is_not_copied(bench: Bench) -> None:
    bench.copy(1, 1, 2, place=ROOM - 1)  # its second half is past the end
    bench.copy(2, 1, place=-1)
    bench.copy(3, 1, place=ROOM - 1)
    assert bench.answers(3) == [(1, "failed"), (2, "failed"), (3, "ok")]
    bench.file.path.open("r+b").truncate(SIZE)  # a touch of the rest would kill the process
    bench.copy(4, 1)
    assert bench.answers(1) == [(4, "failed")]
    assert bench.copier.pieces() == [("store", [1])]


def test_an_error_of_the_device_is_the_answer_and_the_copy_thread_goes_on(bench: Bench) -> None:
    bench.copier.fail["store"] = RuntimeError("the bus is down")
    bench.copy(1, 1)
    bench.copy(2, 2)
    assert bench.answers(2) == [(1, "failed"), (2, "ok")]
    assert bench.lane.stored.bytes == SIZE
    calls = [what for what, _, _ in bench.copier.calls]
    assert calls == ["attach", "store", "finish", "store", "finish"]  # what was asked before it may still run


def test_the_time_of_a_copy_is_the_devices_where_it_has_a_clock(bench: Bench) -> None:
    bench.copier.moved_us = 7
    bench.copy(1, 1, 2)
    assert bench.copied().took_us == 7  # 20 by the host's
    assert bench.lane.stored.us == 20
    bench.copier.moved_us = 700
    bench.copy(2, 1, 2)
    assert bench.copied().took_us == 20  # two clocks may differ


def test_a_copy_that_fails_at_its_end_is_no_copy(bench: Bench) -> None:
    bench.copier.fail["finish"] = RuntimeError("the bus was down")
    bench.copy(1, 1)
    bench.copy(2, 2)
    assert bench.answers(2) == [(1, "failed"), (2, "ok")]
    assert bench.lane.stored.bytes == SIZE


@pytest.mark.parametrize("how", ["gone", "empty", "another name", "not attached"])
def test_an_arena_that_cannot_be_had_is_no_arena(bench: Bench, how: str) -> None:
    old = bench.file.generation
    with segment(0 if how == "empty" else SIZE) as file:
        if how == "gone":
            file.path.unlink()
        if how == "not attached":
            bench.copier.fail["attach"] = RuntimeError("the driver has no memory")
        bench.lane.map(file.name, file.generation + (how == "another name"))
        assert bench.next() == old
        bench.copy(1, 1, generation=file.generation)
        assert bench.answers(1) == [(1, "no_arena")]
        assert (bench.lane.generation, bench.copier.attached) == (0, None)


def test_no_arena_ends_the_mapping(bench: Bench) -> None:
    bench.lane.map("", 0)
    assert bench.next() == bench.file.generation
    bench.copy(1, 1)
    assert bench.answers(1) == [(1, "no_arena")]


def test_closing_stops_the_copy_and_unmaps(bench: Bench) -> None:
    bench.copier.hold = True
    bench.copy(1, *range(8))
    bench.until_it_copies()
    closing = threading.Thread(target=bench.lane.close, args=(WITHIN_S,))
    closing.start()
    while not bench.lane._closed:
        closing.join(0.001)
    bench.copier.hold = False
    bench.copier.go.release()
    closing.join(WITHIN_S)
    assert bench.next() == bench.file.generation
    assert bench.copier.pieces() == [("store", [0, 1])]
    assert bench.reports.empty()
    bench.lane.close(WITHIN_S)  # again


def test_a_mapping_in_use_stays_and_is_not_called_released(bench: Bench) -> None:
    bench.copy(1, 1)
    bench.answers(1)
    assert bench.copier.attached is not None
    kept = memoryview(bench.copier.attached)
    bench.lane.map("", 0)
    bench.copy(2, 1)
    assert bench.answers(1) == [(2, "no_arena")]
    kept.release()


def test_copies_over_the_bound_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_QUEUED", 2)
    bench.copy(1, 1, after=1)
    bench.copy(2, 1, after=1)
    with pytest.raises(AssertionError):
        bench.copy(3, 1, after=1)
    bench.lane.on_stepped(1, 1)
    assert bench.answers(2) == [(1, "ok"), (2, "ok")]


def test_arena_that_cannot_be_mapped_is_an_error_with_the_reason() -> None:
    with segment(SIZE) as file:
        with pytest.raises(ArenaError, match="is not of generation 1234567: restart kv_offload"):
            Arena(file.name, 1_234_567)
        with pytest.raises(ArenaError, match="is not of generation"):
            Arena(file.name, file.generation % 10 if file.generation > 9 else 0)
        with pytest.raises(ArenaError, match="is not of generation"):
            Arena(f"../shm/{file.name}", file.generation)
        file.path.write_bytes(b"")
        with pytest.raises(ArenaError, match=f"cannot map the arena {file.name} of 0 bytes"):
            Arena(file.name, file.generation)
    with pytest.raises(ArenaError, match="No such file or directory; kv_offload must run on this host"):
        Arena(file.name, file.generation)


def test_no_descriptor_is_left_open() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    with segment(SIZE) as file:
        arena = Arena(file.name, file.generation)
        assert descriptors() > before
        arena.close()
        file.path.write_bytes(b"")
        with pytest.raises(ArenaError):
            Arena(file.name, file.generation)
    assert descriptors() == before


def test_the_rate_is_that_of_the_last_copies() -> None:
    rate = CopyRate()
    assert rate.mb_s == 0
    rate.add(8_000, 4)
    assert rate.mb_s == 2_000
    rate.add(8_000, 2)
    assert rate.mb_s == round((8_000 * 7 / 8 + 8_000) / (4 * 7 / 8 + 2))
    for _ in range(200):
        rate.add(8_000, 1)
    assert (rate.mb_s, rate.copies, rate.bytes) == (8_000, 202, 202 * 8_000)


def test_arena_of_kv_offload_is_mapped_by_its_heartbeat(bench: Bench) -> None:
    """The one place where both sides of the segment meet without a process between them."""
    old = bench.file.generation
    theirs = shared_arena("a-test.host", 1_700_000_000_000_123, 4 * 4_096)
    try:
        offset = theirs.allocate(b"k" * 32, 4_096)
        assert offset is not None
        bench.lane.map(theirs.name, theirs.generation)
        assert bench.next() == old
        bench.copy(1)
        assert bench.answers(1) == [(1, "ok")]
        assert bench.copier.attached is not None
        bench.copier.attached[offset : offset + 5] = b"hello"
        assert bytes(theirs.view(b"k" * 32)[:5]) == b"hello"
        assert bench.lane.generation == theirs.generation
    finally:
        theirs.close()


HOURS_S = 10_000.0


@pytest.mark.parametrize("beside", ["a step under way", "a step just computed"])
def test_an_arena_is_attached_in_slices_with_rests_while_steps_go_on(bench: Bench, beside: str) -> None:
    with segment(ROOM * SIZE) as other:
        bench.copier.slices_s = [HOURS_S, HOURS_S]
        bench.computing = beside == "a step under way"
        bench.lane.on_stepped(1, 1 if beside == "a step just computed" else 0)
        bench.lane.map(other.name, other.generation)
        bench.until_it_copies()  # the first slice, and now it rests: for hours, unless the arena is given up
        bench.copy(1, 4, generation=other.generation)
        bench.lane.map("", 0)
        assert bench.next() == bench.file.generation
        assert bench.answers(1) == [(1, "no_arena")]
        assert bench.copier.began.empty()
        assert bench.copier.attached is None


def test_arena_is_attached_without_rests_when_no_step_runs(bench: Bench) -> None:
    with segment(ROOM * SIZE) as other:
        bench.copier.slices_s = [HOURS_S, HOURS_S]
        bench.lane.on_stepped(1, 1)
        bench.clock.advance(RECENT_US)
        bench.lane.map(other.name, other.generation)
        bench.copy(1, generation=other.generation)
        assert bench.next() == bench.file.generation
        assert bench.answers(1) == [(1, "ok")]
        assert bench.lane.generation == other.generation
