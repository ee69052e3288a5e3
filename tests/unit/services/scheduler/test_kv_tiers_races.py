"""What two things at once must not do to tiers: late answers, stores while draining, old arenas, forks."""

from __future__ import annotations

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World
from support.scheduler.world_checks import none_forgotten

from services.scheduler import preemption, prefix_cache
from services.scheduler.kv_tiers import load, lookups, store
from services.scheduler.preemption import RecomputeCost
from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import (
    NO_TAIL,
    Arrived,
    DrainRequested,
    OffloadLost,
    OffloadReady,
    Tail,
    Ticked,
)
from services.scheduler.state.reuse import Reused
from services.scheduler.state.state import Executor, Limits
from shared.messages import KvFound, KvLookup, StepResult, ints
from shared.telemetry.traces import Choice, RequestFacts, request_spans

PROMPT = list(range(3, 24))  # 21 tokens: five blocks of four, and one
PLACE = ("k1", "f")


def fresh(limits: Limits | None = None, blocks: int = 32) -> World:
    world = World(limits or Limits(), now_us=1_000)
    world.add_engine(blocks=blocks)
    world.add_tier(FakeTier(capacity=64))
    return world


def only(world: World) -> Executor:
    (executor,) = world.scheduler.state.executors.values()
    return executor


def stored(limits: Limits | None = None) -> World:
    """A world in which the prompt's blocks are in the tier, and nowhere else."""
    world = fresh(limits)
    world.ask("first", PROMPT, 2)
    world.run()
    world.tick(200_000)
    world.run()
    assert len(world.tier.l1) == 5
    only(world).pool.forget_cache()
    return world


def paused(world: World) -> None:
    """The one that runs waits again, and the device has nothing of it."""
    executor, state = only(world), world.scheduler.state
    while executor.running[0].is_prefilling:
        assert world.deliver()
    state.now_us = world.now_us
    preemption.preempt(state, executor, executor.running[0], "for a test", [executor.running[0]])
    executor.pool.forget_cache()
    while world.deliver():
        pass


def test_draining_scheduler_starts_no_unneeded_store() -> None:
    world = fresh()
    world.ask("first", PROMPT, 2)
    world.handle(DrainRequested())
    world.run()
    world.tick(200_000)
    world.run()
    assert only(world).pool.dirty_blocks == 5
    assert "KvReserve" not in world.tier.counts
    assert world.scheduler.is_idle


def test_blocks_of_an_old_arena_are_not_in_the_new_one() -> None:
    world = stored()
    world.ask("second", PROMPT, 2)
    while not world.copies["e1"]:
        assert world.deliver_tier()
    assert world.make_copy()  # out of the old arena, which is whole
    world.restart_tier()
    assert world.deliver_copy()
    (sequence,) = only(world).running
    assert sequence.cached_tokens == 20
    assert not only(world).pool.clean
    world.run()
    world.assert_answers("second")


def test_stores_that_end_one_after_another_delay_no_other_for_long() -> None:
    """A paused one asks again when something has been stored since; not for ever."""
    world = stored()
    world.ask("second", PROMPT, 9)
    while not (only(world).running and only(world).running[0].prefill_chunks):
        assert world.deliver_tier() or world.deliver_copy() or world.deliver()
    paused(world)
    state, since_us = world.scheduler.state, world.now_us
    while state.waiting:
        state.tiers.by_host["h"].stores += 1  # another sequence's
        world.now_us += 1_000
        world.deliver_tier()
        assert world.now_us < since_us + 2 * lookups.WAIT_US, "it asks for ever"
    world.run()
    world.assert_answers("second")


def test_slow_copy_of_a_tail_delays_no_other() -> None:
    """A few tokens are sooner computed again than waited for: the executor may be long over its copies, and
    the next in the queue delays all after it."""
    world = fresh()
    world.ask("first", PROMPT, 9)
    while not (only(world).running and len(only(world).running[0].tokens) > len(PROMPT)):
        assert world.deliver_tier() or world.deliver()
    executor, state = only(world), world.scheduler.state
    (sequence,) = executor.running
    state.now_us = world.now_us
    preemption.preempt(state, executor, sequence, "for a test", [sequence])
    tail = executor.pool.block_of.get(sequence.tail.key)
    assert tail is not None
    world.check_every = 0
    executor.pool.begin_copy([tail])  # and nothing comes back
    world.ask("second", PROMPT[::-1], 2)
    for _ in range(2 * lookups.MOST_WAIT_US // 10_000):
        world.tick(10_000)
        while world.deliver_tier() or world.deliver():
            pass
    world.assert_answers("first")
    world.assert_answers("second")


def test_a_late_answer_to_an_earlier_wait_is_not_taken_for_the_present_one() -> None:
    world = stored()
    world.tier.frozen = True
    world.ask("second", PROMPT, 9)
    state = world.scheduler.state
    (early,) = state.tiers.lookups
    world.tick(lookups.WAIT_US)
    paused(world)
    (group,) = state.waiting
    assert group.lookup_results[PLACE].at_us < 0
    world.handle(Arrived("kv_offload.k1", KvFound(job=early, tiers=ints([0] * 5))))
    assert group.lookup_results[PLACE].at_us < 0
    (late,) = state.tiers.lookups
    world.handle(Arrived("kv_offload.k1", KvFound(job=late, tiers=ints([1] * 5))))
    assert group.lookup_results[PLACE].found == (1,) * 5


def test_rows_that_want_a_block_of_the_smallest_engine_get_it() -> None:
    world = fresh(blocks=6)
    world.scheduler.state.reuse.tenants["public"] = Reused(1, 0)  # only needed blocks are copied
    world.ask("first", [5] * 6, 3)
    world.run()
    assert only(world).pool.dirty_blocks == 2
    world.ask("second", [6] * 6, 14)
    world.run()
    world.assert_answers("second")
    world.assert_idle()


def test_a_load_does_not_write_what_a_fork_still_reads() -> None:
    """The tail of a prompt is copied for another choice by the step after the prompt's last chunk. The
    executor that computed it may have left by then, and its block may be another's."""
    world = stored(Limits(overlap="single"))
    executor = only(world)
    world.ask("choices", [50] * 6, 12, n=2)
    while not executor.fork_copies:
        assert world.deliver_tier()
    ((source, _),) = executor.fork_copies
    leader = executor.running[0]
    assert leader.table[1] == source
    world.check_every = 0
    leader.stop_ids = frozenset(range(1_000))
    assert world.deliver()  # the leader ends, the plan with the copy is sent
    assert executor.forked_step == executor.step
    assert not executor.pool.refs[source]
    executor.pool._empty.remove(source)
    executor.pool._empty.append(source)  # the next to be given out
    world.ask("second", PROMPT, 2)
    while not world.copies["e1"]:
        assert world.deliver_tier()
    assert source in world.copies["e1"][0].copy.blocks
    assert world.copies["e1"][0].copy.after_step == executor.forked_step
    world.run()
    world.assert_answers("second")


def test_copy_whose_step_has_not_come_back_does_not_count() -> None:
    """That step may have failed."""
    world = fresh()
    world.ask("a", PROMPT, 8)
    world.ask("b", PROMPT[::-1], 8)
    while not (len(only(world).running) == 2 and not any(s.is_prefilling for s in only(world).running)):
        assert world.deliver_tier() or world.deliver("e1")
    executor, state = only(world), world.scheduler.state
    state.now_us = world.now_us
    store._store_ahead(state, executor, state.tiers.by_host["h"], 8)
    world._carry_out(state.commands.pop())
    assert world.deliver_tier()
    (pending,) = world.copies["e1"]
    assert pending.copy.after_step == executor.in_flight[-1].step
    assert world.deliver_copy()
    rows = len(executor.in_flight[0].rows)
    step = executor.in_flight[0].step
    failed = StepResult(exec_epoch=1, step=step, ids=ints([-1]) * rows, done=ints([0]) * rows, error="boom")
    world.handle(Arrived("executor.e1", failed))
    while world.deliver_tier():
        pass
    assert not world.tier.l1
    assert state.counters.stores_failed == 1


@pytest.mark.parametrize("copied_first", [True, False])
def test_blocks_written_by_a_failed_step_are_not_restored_from_a_tier(copied_first: bool) -> None:
    """Its sequence was paused while it ran. The last block had tokens from before, and the step that failed
    left garbage in all of it: a copy would be believed for as long as a tier keeps it."""
    world = fresh(Limits(overlap="run_ahead"), blocks=6)
    world.ask("first", PROMPT, 3)
    while world.deliver_tier():
        pass
    executor, state = only(world), world.scheduler.state
    world.engines["e1"].fails = True
    assert world.deliver()
    assert world.deliver()
    (sequence,), (flight,) = executor.running, executor.in_flight
    assert (len(sequence.tokens), flight.plan.starts[0]) == (23, 22)  # into the last block, after two tokens
    state.now_us = world.now_us
    preemption.preempt(state, executor, sequence, "for a test", [sequence])
    world.tick(200_000)
    if not copied_first:
        assert world.deliver()
    while world.deliver_tier() or world.deliver_copy():
        pass
    assert world.tier.l1, "nothing was copied while the step ran"
    world.run()
    world.assert_answers("first")


@pytest.mark.parametrize("late", [False, True])
def test_trace_of_a_failed_load_shows_the_failure(late: bool) -> None:
    world = stored()
    world.ask("second", PROMPT, 2)
    while not world.copies["e1"]:
        assert world.deliver_tier()
    world.now_us += load.LEASE_US if late else 0
    world.engines["e1"].copy_fails = not late
    world.run()
    closed = world.readers_of("second")[0].closed
    assert closed is not None
    (restore,) = [decision for decision in closed.decisions if decision.what == "restore"]
    assert dict(restore.numbers)["tokens"] == 0
    assert restore.why == ("the copy took longer than its lease" if late else "the copy ended with failed")


def test_a_restore_lasts_from_the_question_to_the_copy_in_the_trace() -> None:
    world = stored()
    world.ask("second", PROMPT, 2)
    while not world.copies["e1"]:
        assert world.deliver_tier()
    (job,) = world.scheduler.state.tiers.jobs.values()
    world.now_us += 7_000
    world.run()
    closed = world.readers_of("second")[0].closed
    assert closed is not None
    facts = RequestFacts(
        request="second", tenant="t", model="m", format="chat", inbox="i", received_wall_us=0,
        detokenizer="d", choices=(Choice(index=0, tokens=2, reason="length", close=closed),),
    )  # fmt: skip
    spans = request_spans(facts)
    (restore,) = (span for span in spans if span.name == "restore")
    (decision,) = (decision for decision in closed.decisions if decision.what == "restore")
    assert restore.end_us - restore.start_us == dict(decision.numbers)["took_us"] >= 7_000
    assert restore.attributes["tokens"] == sum(job.valid) > 0
    assert restore.parent is not None
    assert spans[restore.parent].name == "prefill"


def test_two_kinds_of_engines_on_a_host_are_looked_up_apart() -> None:
    """The keys of one are unrelated to those of the other."""
    world = stored()
    world.add_engine("e2", epoch=2, kind="g", block_tokens=2, blocks=64)
    lookups = world.tier.counts[KvLookup.__name__]
    world.ask("second", PROMPT, 2)
    assert world.tier.counts[KvLookup.__name__] == lookups + 2
    (group,) = world.scheduler.state.waiting
    assert set(group.lookup_results) == {PLACE, ("k1", "g")}
    world.run()
    assert {place: sum(answer.found) for place, answer in group.lookup_results.items()} == {
        PLACE: 5,
        ("k1", "g"): 0,
    }
    world.assert_answers("second")


def test_engine_that_stores_nothing_makes_no_lookup() -> None:
    world = World(now_us=1_000)
    world.add_engine(bytes_per_block=0)
    world.add_tier(FakeTier(capacity=64))
    world.ask("first", PROMPT, 2)
    assert world.plans
    assert not world.tier.counts


def test_later_of_two_tiers_on_a_host_counts() -> None:
    """As for the executors: at any message of the earlier one."""
    world = fresh()
    world.handle(OffloadReady("k2", 7, "h", 7, ("l1",)))
    world.handle(OffloadReady("k1", 1, "h", 1, ("l1",)))
    assert world.scheduler.state.tiers.by_host["h"].actor == "k2"
    world.handle(OffloadLost("k2"))
    world.handle(OffloadReady("k1", 1, "h", 1, ("l1",)))
    assert world.scheduler.state.tiers.by_host["h"].actor == "k1"


def test_tier_without_room_gets_no_repeated_stores_for_running_sequences() -> None:
    """What runs keeps its blocks: there is no hurry to try again."""
    world = fresh(blocks=24)
    world.ask("a", PROMPT, 20)
    world.ask("b", PROMPT[::-1], 20)
    while not (len(only(world).running) == 2 and not any(s.is_prefilling for s in only(world).running)):
        assert world.deliver_tier() or world.deliver("e1")
    executor = only(world)
    executor.headroom_pm = 1_000
    world.check_every = 0
    executor.pool.reserve(executor.pool.free_blocks - 2)  # others are promised the rest
    world.tier.no_room = True
    asked_us = world.now_us
    for _ in range(10):
        world.handle(Ticked())
        world.deliver_tier()
    assert world.now_us < asked_us + store.EAGER_US
    assert world.tier.counts["KvReserve"] == 1


def test_living_tier_that_was_given_up_gets_the_ended_jobs() -> None:
    """Else its ranges wait until the tier takes them for unwritten."""
    world = fresh()
    world.tier.frozen = True
    world.ask("first", PROMPT, 2)
    world.tick(lookups.WAIT_US)
    world.run()
    world.tick(200_000)
    assert [job.up for job in world.scheduler.state.tiers.jobs.values()] == [False]
    world.handle(OffloadLost("k1"))
    world.tier.thaw(world.now_us)
    while world.deliver_tier():
        pass
    world.handle(OffloadReady("k1", 1, "h", 1, ("l1",)))
    world.assert_idle()


def test_a_tail_is_of_the_last_pause() -> None:
    """One that ended with a whole block has none."""
    world = fresh()
    world.ask("first", PROMPT[:6], 9)
    while world.deliver_tier():
        pass
    (sequence,) = only(world).running
    sequence.tail = Tail(1, 2, bytes(32), sequence.keyed[0])
    while len(sequence.tokens) < 13:
        assert world.deliver()
    assert sequence.computed >= 12
    prefix_cache.register_tail(only(world), sequence)
    assert sequence.tail == NO_TAIL


@pytest.mark.parametrize("tier", ["tiered", "loadtest.policies:swap"])
def test_the_place_of_a_victim_is_seen_to_at_once(tier: str) -> None:
    """Where no step is in flight, nothing but a tick would bring another look."""
    world = World(Limits(overlap="single", policy=Policy(tier=tier)), now_us=1_000, checks=[none_forgotten])
    world.add_engine(blocks=12, slots=6)
    world.add_tier(FakeTier(capacity=64))
    for number in range(6):
        world.ask(f"r{number}", [number + 3] * 6, 18)
    world.run()
    assert world.scheduler.state.counters.preemptions > 0
    for number in range(6):
        world.assert_answers(f"r{number}")


def test_link_is_not_tried_at_the_cost_of_a_paused_sequence() -> None:
    world = fresh()
    executor, state = only(world), world.scheduler.state
    world.ask("first", PROMPT, 2)
    while not executor.running:
        assert world.deliver_tier()
    (sequence,) = executor.running
    costs = RecomputeCost.of(executor)
    look = store._Conditions(pressed=1, copy_us=0, preempted_us=700, recompute=costs)
    assert store._view(state, executor, look, sequence.seq, 1_000, 1).copy_us == 0
    paused(world)
    assert store._view(state, executor, look, sequence.seq, 1_000, 1).copy_us == 700
