"""The sequences of a draining executor move to another one, with the same tokens; see executors/moves.py."""

from __future__ import annotations

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.scheduler import admission, preemption
from services.scheduler.executors import moves
from services.scheduler.kv_tiers import lookups, store
from services.scheduler.kv_tiers.store import LEFT_TOKENS
from services.scheduler.state.requests import PeerDraining, Sequence
from services.scheduler.state.state import Executor, Limits, State

AFTER_US = 3_000_000


def drained(fake: FakeTier | None = None) -> World:
    """Four requests run on an executor that begins to drain, and another one joins."""
    world = World(Limits(move_after_us=AFTER_US))
    world.add_engine("e1", slots=8, blocks=200, max_context=128)
    if fake is not None:
        world.add_tier(fake)
    for number in range(4):
        world.ask(f"r{number}", [number + 3] * 50, 50, n=1 + number % 2)
    steps(world, 8)
    world.add_engine("e2", epoch=2, slots=8, blocks=200, max_context=128)
    world.handle(PeerDraining("executor", "e1"))
    return world


def steps(world: World, count: int) -> None:
    for _ in range(count):
        for name in world.engines:
            world.deliver(name)
            world.deliver_copy(name)
        world.deliver_tier()


def running(world: World, name: str) -> int:
    return len(world.scheduler.state.executors[name].running)


def finished(world: World) -> World:
    world.run()
    for request in world.asked:
        world.assert_answers(request)
    world.assert_idle()
    return world


def test_sequences_stay_for_a_while_and_then_move() -> None:
    world = drained()
    steps(world, 4)
    assert (running(world, "e1"), running(world, "e2")) == (6, 0)
    world.tick(AFTER_US)
    assert (running(world, "e1"), running(world, "e2")) == (0, 6)
    assert finished(world).scheduler.state.counters.moves == 6


def test_moved_sequences_find_their_blocks_in_the_tier() -> None:
    world = drained(FakeTier(capacity=200))
    world.tick(AFTER_US)
    assert running(world, "e1") > 0, "they run while their blocks are copied"
    meter = finished(world).scheduler.state.counters
    assert meter.moves == 6
    assert meter.loads > 0
    assert meter.recomputed_tokens <= 6 * (LEFT_TOKENS + 4)  # and what was in flight
    assert meter.preemptions == 0


@pytest.mark.parametrize("switch", ["no_room", "missing", "lossy", "copy_fails", "lost"])
def test_a_tier_that_is_of_no_use_costs_only_time(switch: str) -> None:
    world = drained(FakeTier(capacity=200))
    if switch == "copy_fails":
        for engine in world.engines.values():
            engine.copy_fails = True
    elif switch != "lost":
        setattr(world.tier, switch, True)
    world.tick(AFTER_US)
    if switch == "lost":
        world.lose_tier()
    assert finished(world).scheduler.state.counters.moves == 6


def test_a_prompt_is_computed_to_its_end_first() -> None:
    world = World(Limits(move_after_us=0, step_tokens=8))
    world.add_engine("e1", slots=8, blocks=64)
    world.ask("long", [5] * 40, 8, n=2)
    world.deliver("e1")
    world.add_engine("e2", epoch=2, slots=8, blocks=64)
    world.handle(PeerDraining("executor", "e1"))
    while running(world, "e1") == 2:
        assert not world.readers_of("long")[0].tokens
        world.deliver("e1")
    chunks = [plan for plan in world.plans if plan.exec_epoch == 1 and max(plan.counts) > 1]
    assert sum(max(plan.counts) for plan in chunks) == 40
    finished(world)


def test_sequences_stay_without_another_executor() -> None:
    world = World(Limits(move_after_us=0))
    world.add_engine("e1")
    world.ask("a", [5] * 9, 20)
    world.deliver()
    world.handle(PeerDraining("executor", "e1"))
    assert finished(world).scheduler.state.counters.moves == 0


def test_sequences_move_as_room_comes() -> None:
    """The other executor has two slots, one of them taken."""
    world = World(Limits(move_after_us=0))
    world.add_engine("e1", slots=4, blocks=64)
    for number in range(3):
        world.ask(f"r{number}", [number + 3] * 9, 30)
    world.deliver("e1")
    world.add_engine("e2", epoch=2, slots=2, blocks=64)
    world.ask("there", [9] * 9, 12)
    world.handle(PeerDraining("executor", "e1"))
    steps(world, 3)
    assert (running(world, "e1"), running(world, "e2")) == (2, 2)
    assert not world.scheduler.state.waiting, "nothing leaves before there is room"
    assert finished(world).scheduler.state.counters.moves > 1


def test_sequence_without_a_token_from_here_does_not_move_on() -> None:
    """Both drain in turn: each move follows a token, so nothing moves for ever."""
    world = World(Limits(move_after_us=0))
    world.add_engine("e1", slots=4, blocks=64)
    world.add_engine("e2", epoch=2, slots=4, blocks=64)
    world.ask("a", [5] * 9, 30)
    for at in range(10):
        drains, other = ("e1", "e2") if running(world, "e1") else ("e2", "e1")
        world.add_engine(other, epoch=10 + at, slots=4, blocks=64)
        world.handle(PeerDraining("executor", drains))
        moves = world.scheduler.state.counters.moves
        world.tick(10)
        assert world.scheduler.state.counters.moves == moves
        steps(world, 4)
    finished(world)


def test_a_sequence_that_admission_takes_off_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are of another executor then, and their numbers mean others here."""
    world = drained()
    steps(world, 4)
    state = world.scheduler.state
    executor, admit, copied = state.executors["e1"], admission.admit, list[str]()

    def admit_and_preempt(state: State) -> None:
        for sequence in executor.running[:1] if not state.counters.preemptions else ():
            preemption.preempt(state, executor, sequence, "for a higher class", [])
        admit(state)

    def keep_below(state: State, executor: Executor, sequence: Sequence) -> bool:
        copied.append(sequence.executor)
        return True

    monkeypatch.setattr(admission, "admit", admit_and_preempt)
    monkeypatch.setattr(store, "keep_below", keep_below)
    moves.move_all(state, executor, sorted(executor.running, key=lambda s: -s.seq), "a test")
    assert set(copied) == {"e1"}
    assert state.counters.preemptions >= 1
    finished(world)


def test_load_in_parts_is_no_backlog_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing would follow a long sequence to its new executor before the last part is there."""
    monkeypatch.setattr(lookups, "MAX_KEYS", 4)
    world = World(Limits(move_after_us=0))
    sizes = {"slots": 8, "blocks": 200, "max_context": 256, "max_step_tokens": 256}
    world.add_engine("e1", **sizes)
    world.add_tier(FakeTier(capacity=200))
    world.ask("long", list(range(3, 103)), 60)
    steps(world, 2)
    world.add_engine("e2", epoch=2, **sizes)
    world.handle(PeerDraining("executor", "e1"))
    (sequence,) = world.scheduler.state.sequences.values()
    backlogs = list[int]()
    for _ in range(40):
        steps(world, 1)
        if sequence.executor == "e2" and sequence.copies.load_job:
            backlogs.append(world.scheduler.state.executors["e2"].row_sums().backlog_tokens)
    assert world.scheduler.state.counters.loads >= 100 // 4 // 4
    assert max(backlogs) <= LEFT_TOKENS + 4
    finished(world)
