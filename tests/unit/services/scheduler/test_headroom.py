"""What admission keeps free for sequences of known length, against their growth played out step by step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler.world import World

from services.scheduler import headroom
from services.scheduler.state.policies import Policy
from services.scheduler.state.state import Limits

BLOCK = 4


@dataclass(frozen=True)
class Row:
    """A sequence that grows by a token a step: its present and last length, and the blocks that it holds."""

    length: int
    most: int
    blocks: int


def played(rows: list[Row]) -> int:
    """The most blocks beyond the present ones that all need at one time: a row ends after its last token."""
    peak = 0
    for step in range(1, max((row.most - row.length for row in rows), default=0) + 1):
        alive = [row for row in rows if row.most - row.length >= step]
        needs = sum(max(-(-(row.length + step) // BLOCK) - row.blocks, 0) for row in alive)
        freed = sum(row.blocks for row in rows if row.most - row.length < step)
        peak = max(peak, needs - freed)
    return peak


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 30))
        most = length + draw(st.integers(1, 30))
        needed, all_of_it = -(-length // BLOCK), -(-most // BLOCK)
        rows.append(Row(length, most, draw(st.sampled_from([needed, all_of_it]))))
    return rows


@given(some_rows())
def test_headroom_is_enough_and_at_most_a_block_a_row_too_much(rows: list[Row]) -> None:
    ends = [headroom._End(r.most - r.length, r.blocks * BLOCK - r.length, r.blocks * BLOCK) for r in rows]
    kept = headroom._peak_blocks(ends, BLOCK, 0)
    assert played(rows) <= kept <= played(rows) + len(rows)


def crowd(kv: str) -> World:
    """Six requests of 8 tokens that want 24 more each, in 20 blocks: two of them fit to their ends."""
    world = World(Limits(policy=Policy(reservation=kv)))
    world.add_engine(blocks=20, slots=8, block_tokens=BLOCK)
    for i in range(6):
        world.ask(f"r{i}", [5 + i] * 8, 24)
    world.run()
    return world


def test_sequence_foreseen_by_the_headroom_is_never_paused() -> None:
    assert crowd("on_demand").scheduler.state.counters.preemptions > 0
    world = crowd("foreseen")
    assert world.scheduler.state.counters.preemptions == 0
    assert world.scheduler.state.counters.generated_tokens == 6 * 24


def test_more_run_at_once_than_where_all_is_promised() -> None:
    """Rows that began at other times end at other times: what one gives back the next one grows into."""

    def steps(kv: str) -> int:
        world = World(Limits(policy=Policy(reservation=kv)))
        world.add_engine(blocks=20, slots=8, block_tokens=BLOCK)
        for i in range(8):
            world.ask(f"r{i}", [5 + i] * 8, 6 + 6 * (i % 4))
        world.run()
        (executor,) = world.scheduler.state.executors.values()
        return executor.steps_done

    assert steps("foreseen") <= steps("reserve")


@pytest.mark.parametrize("kv", ["on_demand", "reserve", "loadtest.policies:greedy"])
def test_others_look_at_no_length(kv: str) -> None:
    world = World(Limits(policy=Policy(reservation=kv)))
    world.add_engine(blocks=64, slots=8, block_tokens=BLOCK)
    world.ask("r", [5] * 8, 40)
    state = world.scheduler.state
    (executor,), (sequence,) = state.executors.values(), state.sequences.values()
    spare = headroom.headroom_blocks(state, executor, [sequence])
    assert spare == headroom.headroom_blocks(state, executor)
