"""No decision is proportional to the pool: the blocks that one event visits, counted, in pools of 1,000 to
100,000 blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.scenarios.real_tier import RealTier
from loadtest.simulator.engine import Machine
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.tiers import TierSpec
from loadtest.simulator.world import Setup, World
from services.scheduler.kv_tiers import store
from services.scheduler.preemption import _has_enough
from services.scheduler.state.block_pool import BlockPool
from shared.step_model import PRESETS

POOLS = (1_000, 10_000, 100_000)
BLOCK_BYTES = 2 << 20


class Visits:
    """Counts the blocks that a pool's lists and dicts are asked for."""

    def __init__(self, pool: BlockPool) -> None:
        self.count = 0
        for name in ("refs", "key_of", "owner_of", "_last_step", "_empty"):
            setattr(pool, name, self._list(getattr(pool, name)))
        for name in ("_cached", "_dirty", "_judged", "_copying", "_stable", "copies", "block_of"):
            setattr(pool, name, self._dict(getattr(pool, name)))

    def _list(self, values: list[Any]) -> list[Any]:
        visits = self

        class Counted(list[Any]):
            def __getitem__(self, at: Any) -> Any:
                visits.count += 1
                return super().__getitem__(at)

            def __iter__(self) -> Iterator[Any]:
                return visits._each(super().__iter__())

        return Counted(values)

    def _dict(self, values: dict[Any, Any]) -> OrderedDict[Any, Any]:
        visits = self

        class Counted(OrderedDict[Any, Any]):
            def __getitem__(self, key: Any) -> Any:
                visits.count += 1
                return super().__getitem__(key)

            def __iter__(self) -> Iterator[Any]:
                return visits._each(super().__iter__())

            def popitem(self, last: bool = True) -> tuple[Any, Any]:
                visits.count += 1
                return super().popitem(last)

        return Counted(values)

    def _each(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.count += 1
            yield value

    def of(self, action: Callable[[], object]) -> int:
        """The blocks that one action visits."""
        self.count = 0
        action()
        return self.count


def asked(name: str, number: int, blocks: int, output: int = 2) -> SimRequest:
    return SimRequest(name, 0, plain_prompt(number, 16 * blocks), output, output)


def world_of(blocks: int) -> World:
    """A pool that is full of dirty blocks of ended requests, each of them worth a copy."""
    machine = Machine(PRESETS["h200-8b"], blocks=blocks, block_bytes=BLOCK_BYTES, max_context=10**6)
    tier = partial(RealTier, TierSpec(blocks * BLOCK_BYTES), BLOCK_BYTES)
    parts = [asked(f"r{at}", at, blocks // 10, output=20) for at in range(1, 10)]
    world = World(Setup((machine,), tier=tier), Workload(tuple(parts)))
    world.begin()
    while not world.scheduler.state.counters.finished or world.scheduler.state.requests:
        world.scheduler.state.reuse.add("public", 10**6, 10**6)
        world.next_event()
    assert world.scheduler.state.executors["e0"].pool.dirty_blocks > blocks // 2
    return world


@pytest.mark.parametrize("blocks", POOLS)
def test_events_visit_few_blocks_while_a_long_prompt_waits_for_copies(blocks: int) -> None:
    world = world_of(blocks)
    state = world.scheduler.state
    state.reuse.add("public", 10**6, 10**6)
    pool, most, events = state.executors["e0"].pool, 0, 0
    visits = Visits(pool)
    world.ask(asked("long", 99, blocks * 6 // 10))
    while state.waiting.groups and events < 200:
        most, events = max(most, visits.of(world.next_event)), events + 1
    assert events > 10
    assert most <= 4 * store.MAX_JUDGED, f"{most} blocks visited by one event in a pool of {blocks}"


def pool_of(blocks: int) -> BlockPool:
    """A pool of which a quarter is dirty, a quarter cached and clean, a quarter held and a quarter empty."""
    pool = BlockPool(blocks=blocks, slots=4, block_tokens=16, write_back=True)
    part = blocks // 4
    tables = []
    for name in (b"dirty", b"clean", b"held"):
        pool.reserve(part)
        table = pool.allocate(part)
        pool.register(table, [name + at.to_bytes(4, "big") for at in range(part)])
        tables.append(table)
    for table in tables[:2]:
        pool.release(table, [], last_step=0, seq=1)
    for block in tables[1]:
        pool.mark_clean(block, pool.key_of[block] or b"")
    return pool


def _copied(pool: BlockPool) -> None:
    blocks = list(islice(pool.dirty, 32))
    pool.begin_copy(blocks)
    assert pool.copied_blocks == 32
    pool.end_copy(blocks)


def _taken(pool: BlockPool) -> None:
    blocks = pool.try_allocate(32)
    assert blocks is not None
    pool.release(blocks, [], last_step=5)
    pool.acknowledge(5)


def _adopted(pool: BlockPool) -> None:
    table = pool.match([b"dirty" + at.to_bytes(4, "big") for at in range(32)])
    assert (len(table), pool.free_taken_by(table)) == (32, 0)
    pool.adopt(table)
    pool.release(table, [], last_step=0)


def _lost(pool: BlockPool) -> None:
    keys = [b"clean" + at.to_bytes(4, "big") for at in range(32)]
    pool.mark_lost_below(keys, 32)
    for key in keys:
        pool.forget(pool.block_of[key])


def _counted(pool: BlockPool) -> None:
    assert pool.held_blocks + pool.coming_blocks + pool.free_blocks == pool.blocks
    assert pool.room[0] - pool.unreserved_blocks == pool.copied_blocks == pool.fenced_blocks == 0


def _judged(pool: BlockPool) -> None:
    turn = pool.judge()
    for _ in range(32):
        pool.give_up(next(turn))


@pytest.mark.parametrize("action", [_copied, _taken, _adopted, _lost, _counted, _judged])
def test_pool_visits_few_blocks_at_any_size(
    action: Callable[[BlockPool], None],
) -> None:
    counts = []
    for blocks in POOLS:
        pool = pool_of(blocks)
        counts.append(Visits(pool).of(partial(action, pool)))
    assert counts[0] == counts[1] == counts[2] <= 32 * 12


def test_judgement_goes_round_and_keeps_the_oldest_first_for_a_copy() -> None:
    pool = pool_of(40)
    oldest = list(pool.dirty)
    turn = pool.judge()
    assert [next(turn) for _ in range(4)] == oldest[:4]
    assert list(pool.dirty) == oldest
    assert list(pool.judge()) == oldest[4:]
    assert list(pool.judge()) == list(pool.dirty) == oldest  # the next round
    pool.check()


@pytest.mark.parametrize("needed", [1, 100])
def test_victims_are_counted_until_they_free_enough(needed: int) -> None:
    counts = []
    for blocks in POOLS:
        pool = BlockPool(blocks=blocks, slots=4, block_tokens=16)
        pool.reserve(blocks)
        tables = [pool.allocate(50) for _ in range(blocks // 50)]
        rows: list[Any] = [
            SimpleNamespace(seq=n, reserved=0, parent=None, table=t) for n, t in enumerate(tables)
        ]
        executor: Any = SimpleNamespace(running=rows, pool=pool)
        visits = Visits(pool)
        assert _has_enough(executor, rows, (), needed)
        assert not _has_enough(executor, rows, (), blocks + 1)
        counts.append(visits.count)
        assert _has_enough(executor, rows, (), blocks)
        assert not _has_enough(executor, rows, tables[0][:1], blocks)
    assert counts[0] == counts[1] == counts[2] == max(50, needed)
