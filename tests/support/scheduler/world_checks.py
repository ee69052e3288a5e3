"""What must hold of the scheduler after every event, after any history: checks for `World.checks`.

Each recounts from the sequences alone what the scheduler keeps up to date as it goes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from support.scheduler.world import World

from services.scheduler import load_shedding, step_planner
from services.scheduler.headroom import can_fit, headroom_blocks, headroom_bound, rows_without_block
from services.scheduler.overlap import mode_of
from services.scheduler.preemption import decode_shape
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import Executor, InFlight
from services.scheduler.step_planner import ready_rows
from shared.step_model import shape_of_rows


def limits(world: World) -> None:
    """No executor is asked for more than it has."""
    for executor in world.scheduler.state.executors.values():
        hello = executor.hello
        for s in executor.running:
            assert s.computed < s.max_length <= hello.max_context
            assert s.planned_length <= s.max_length
            assert len(s.table) * hello.block_tokens <= s.max_length + hello.block_tokens
        for flight in executor.in_flight:
            plan = flight.plan
            assert sum(plan.counts) <= hello.max_step_tokens
            assert len(set(plan.slots)) == len(plan.slots), "two rows of one sequence"


def overlap(world: World) -> None:
    """What may be in flight together, by the mode that each step was planned in."""
    for executor in world.scheduler.state.executors.values():
        flights = list(executor.in_flight)
        assert all(flight.plan.mode != "single" for flight in flights[1:])
        sampled = Counter(row for flight in flights for row in _rows(flight))
        assert all(n == 1 for (seq, _), n in sampled.items() if _host_fed(world, seq))
        for at, flight in enumerate(flights):
            if flight.plan.mode == "two_batch":
                before = {row for earlier in flights[:at] for row in _rows(earlier)}
                assert before.isdisjoint(_rows(flight)), "a row of both micro-batches"
        for one, two in pairwise(flights):
            if one.plan.mode == two.plan.mode == "two_batch" and one.plan.micro_batch != two.plan.micro_batch:
                assert set(one.plan.slots).isdisjoint(two.plan.slots)


def no_idle_window(world: World) -> None:
    """Nothing that could be computed waits while the window is open: with `mixed` steps, and if there are
    blocks for it, or are about to be."""
    fixed = world.limits.overlap in ("single", "run_ahead", "two_batch") and world.limits.window > 1
    if not fixed or world.limits.policy.batching != "mixed":
        return
    depth = {"single": 1, "run_ahead": world.limits.window, "two_batch": 2}[world.limits.overlap]
    for executor in world.scheduler.state.executors.values():
        if executor.awaits_copies:
            assert executor.pool.copying_blocks, "it waits for nothing"
            assert not executor.in_flight
        elif executor.in_flight and step_planner.are_copies_ending(
            world.scheduler.state, executor, len(rows_without_block(executor))
        ):
            assert world.scheduler.state.tiers.jobs, "it waits for nothing"
        elif executor.in_flight and executor.hold.step == executor.step:
            assert executor.pool.fenced_slots, "it waits for nothing"
        elif len(executor.in_flight) < depth:
            decodes, prompts = ready_rows(executor, world.limits.overlap == "run_ahead", None)
            assert not prompts
            assert all(_wants_block(executor, s) for s in decodes)
            assert not decodes or executor.pool.coming_blocks, "rows that wait for blocks that do not come"


def none_forgotten(world: World) -> None:
    """While no step and no copy is in flight nothing but new requests brings the next event: no request may
    wait then."""
    state = world.scheduler.state
    if state.tiers.jobs or state.tiers.lookups:
        return
    executors = [executor for executor in state.executors.values() if not executor.draining]
    if any(executor.in_flight for executor in state.executors.values()):
        return
    for executor in executors:
        assert not executor.running, "sequences that run, and no step"
        first = state.waiting.first(executor.hello.model)
        assert first is None or not can_fit(executor, first), "an executor is idle while a group waits"


def sums(world: World) -> None:
    """What admission and the forecast derive from the rows without a loop over them equals a recount, or
    bounds it. Called after each event, so a change of the rows that does not count in `changes` shows."""
    state, rules = world.scheduler.state, load_shedding
    for executor in state.executors.values():
        running, found = executor.running, executor.row_sums()
        cached = [s.computed for s in running if not s.is_prefilling]
        assert found.speed in (0, 1_000_000_000_000 // max(rules.ns_per_token(executor), 1))
        assert found.base_us in (-1, executor.cost_model.predict_us(decode_shape(executor)) if cached else 0)
        assert decode_shape(executor) == shape_of_rows((at, 1) for at in cached)
        for level in range(3):
            stay = [s for s in running if s.level <= level or s.turn.pinned]
            ends = sorted((rules._left(state, s), len(s.table)) for s in stay)
            others = sum(len(s.table) for s in running if s not in stay)
            assert rules._ends(state, executor, level) == (ends, others)
            for slots, tokens, output in ((1, 8, 1), (4, 100, 5), (12, 8, state.mean_output_tokens)):
                bound_us = rules._most_wait_us(state, executor, slots, tokens, output)
                assert rules._slot_wait_us(state, executor, level, slots, tokens, output) <= bound_us
        for group in state.waiting:
            bound = headroom_bound(state, executor, group.sequences[0])
            # Until it is forked, a choice holds no prompt block: its parent's are counted twice.
            forked = not any(s.parent for s in running)
            spare = headroom_blocks(state, executor, group.sequences)
            assert not forked or bound == executor.pool.blocks or spare <= bound
        if executor.settled == executor.changes:
            pace = replace(executor.pace)
            depth = mode_of(state, executor)[1]
            assert not executor.running or len(executor.in_flight) >= depth
            assert executor.pace == pace


ALL = [limits, overlap, no_idle_window, none_forgotten, sums]


class Turns:
    """Where steps alternate, A and B together are every ready row: one that is ready is in one of the next
    two steps, unless blocks are short."""

    def __init__(self) -> None:
        self.since: dict[tuple[int, int], int] = {}

    def __call__(self, world: World) -> None:
        if world.limits.overlap != "two_batch" or world.limits.window == 1:
            return
        now: dict[tuple[int, int], int] = {}
        for executor in world.scheduler.state.executors.values():
            for s in ready_rows(executor, False, None)[0]:
                since = self.since.get((s.seq, s.placement), executor.step)
                if _wants_block(executor, s) or world.limits.policy.batching != "mixed":
                    since = executor.step
                assert executor.step - since < 2, "a ready row in neither A nor B"
                now[s.seq, s.placement] = since
        self.since = now


def _rows(flight: InFlight) -> set[tuple[int, int]]:
    return {(s.seq, placement) for s, placement in flight.rows}


def _host_fed(world: World, seq: int) -> bool:
    sequence = world.scheduler.state.sequences.get(seq)
    return sequence is not None and sequence.host_fed


def _wants_block(executor: Executor, s: Sequence) -> bool:
    return s.computed >= len(s.table) * executor.hello.block_tokens
