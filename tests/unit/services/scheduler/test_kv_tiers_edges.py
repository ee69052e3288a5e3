"""What can go wrong between scheduler, executor and tiers, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.scheduler.kv_tiers import load, lookups, store
from services.scheduler.state.requests import Arrived, OffloadLost, OffloadReady
from services.scheduler.state.state import Executor
from services.scheduler.state.transfers import (
    ANSWER_US,
    BACKOFF_US,
    LONG_COPY_BYTES,
    LONG_COPY_US,
    MISSES,
    RETRY_US,
    TRY_BLOCKS,
    TransferLink,
)
from shared.messages import (
    Cancel,
    KvCopied,
    KvFound,
    KvGone,
    KvReady,
    KvReserved,
    KvStored,
    StepResult,
    ints,
    longs,
)
from shared.step_model import StepShape

PROMPT = list(range(3, 24))  # 21 tokens: five blocks of four, and one


def fresh(tier: FakeTier | None = None, blocks: int = 32) -> World:
    world = World(now_us=1_000)
    world.add_engine(blocks=blocks)
    world.add_tier(tier or FakeTier(capacity=64))
    return world


def only(world: World) -> Executor:
    (executor,) = world.scheduler.state.executors.values()
    return executor


def test_blocks_of_the_last_request_are_stored_once_it_is_quiet() -> None:
    world = fresh()
    world.ask("first", PROMPT, 2)
    world.ask("second", PROMPT[::-1], 2)
    world.run()
    assert not world.tier.l1, "the next turn may come at once"
    assert store.needs_ticks(world.scheduler.state)
    world.tick(store.IDLE_US)
    world.run()
    assert not store.needs_ticks(world.scheduler.state)
    assert len(world.tier.l1) == 10
    assert only(world).pool.dirty_blocks == 0


def stored(tier: FakeTier | None = None) -> World:
    """A world in which the prompt's blocks are in the tier, and nowhere else."""
    world = fresh(tier)
    world.ask("first", PROMPT, 2)
    world.run()
    world.tick(store.IDLE_US)
    world.run()
    assert len(world.tier.l1) >= 5
    only(world).pool.forget_cache()
    return world


def cached_tokens(world: World, request: str) -> int:
    closed = world.readers_of(request)[0].closed
    assert closed is not None
    return closed.usage.cached_tokens


def until_loading(world: World, request: str) -> None:
    """Its blocks are on their way up: KvCopy is out, not answered."""
    world.ask(request, PROMPT, 2)
    while not world.copies["e1"]:
        assert world.deliver_tier()


def test_stored_blocks_are_restored() -> None:
    world = stored()
    world.ask("second", PROMPT, 2)
    world.run()
    world.assert_answers("second")
    assert cached_tokens(world, "second") == 20
    assert world.scheduler.state.counters.l1_hit_blocks == 5


def test_blocks_that_lie_on_the_device_and_below_by_turns_are_all_used() -> None:
    world = fresh()
    world.ask("first", PROMPT, 2)
    world.run()
    world.tick(store.IDLE_US)
    world.run()
    pool, keys = only(world).pool, list(world.tier.l1)
    keys.sort(key=lambda key: pool.owner_of[pool.block_of[key]][1])
    for key in (keys[1], keys[3]):
        pool.forget(pool.block_of[key])
    for key in (keys[0], keys[2], keys[4]):
        world.tier.forget(key)
    world.ask("second", PROMPT, 2)
    world.run()
    world.assert_answers("second")
    assert cached_tokens(world, "second") == 20
    assert world.scheduler.state.counters.l1_hit_blocks == 2


def test_blocks_come_from_the_remote_tier_through_the_first() -> None:
    world = stored(FakeTier(capacity=64, l2_us=3_000))
    for key in list(world.tier.l1):
        world.tier.forget(key)
    world.ask("second", PROMPT, 2)
    world.run()
    world.assert_answers("second")
    assert cached_tokens(world, "second") == 20
    meter = world.scheduler.state.counters
    assert (meter.l1_hit_blocks, meter.l2_hit_blocks, meter.loads_failed) == (0, 5, 0)


def test_block_fetched_for_the_lookup_is_a_hit_of_the_remote_tier_also_when_it_is_there_by_then() -> None:
    world = stored(FakeTier(capacity=64, l2_us=10))
    for key in list(world.tier.l1)[:2]:  # the tail: the next to go
        world.tier.forget(key)
    world.tier.frozen = True
    world.ask("second", PROMPT, 2)
    world.tier.thaw(world.now_us)
    world.now_us += 50
    world.run()
    world.assert_answers("second")
    meter = world.scheduler.state.counters
    assert (meter.l1_hit_blocks, meter.l2_hit_blocks) == (3, 2)


def test_a_copy_that_fails_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    world = stored()
    until_loading(world, "second")
    world.engines["e1"].copy_fails = True
    world.run()
    world.assert_answers("second")
    assert cached_tokens(world, "second") == 0
    assert world.scheduler.state.counters.loads_failed == 1
    world.assert_idle()


def test_a_copy_that_outlives_its_lease_is_not_believed() -> None:
    world = stored()
    until_loading(world, "second")
    world.now_us += load.LEASE_US
    world.run()
    world.assert_answers("second")
    assert cached_tokens(world, "second") == 0


def test_a_sequence_that_is_cancelled_meanwhile_leaves_its_blocks_to_the_copy() -> None:
    world = stored()
    until_loading(world, "second")
    world.handle(Arrived("client", Cancel(tenant="public", request="second")))
    pool = only(world).pool
    assert pool.copying_blocks == 5
    world.run()
    assert pool.copying_blocks == 0
    world.assert_idle()


def test_an_executor_without_the_arena_lets_the_tier_rest() -> None:
    world = stored()
    world.engines["e1"].arena = None
    world.ask("second", PROMPT, 2)
    world.run()
    world.assert_answers("second")
    state = world.scheduler.state
    assert state.tiers.of("h", world.now_us) is None
    assert state.tiers.of("h", world.now_us + BACKOFF_US) is not None
    assert state.counters.tier_backoffs == 1


def without_answers(token_us: int) -> World:
    """A tier that is silent, a prompt that waits for it, and a known price of its 21 tokens."""
    world = fresh()
    world.tier.frozen = True
    for tokens in range(1, 41):
        shape = StepShape(0, 0, 0, 0).with_chunk(0, tokens)
        only(world).cost_model.observe(shape, token_us * tokens)
    world.ask("first", PROMPT, 2)
    return world


@pytest.mark.parametrize(("token_us", "wait_us"), [(500, 20_000), (4_000, 84_000), (20_000, 200_000)])
def test_an_answer_is_waited_for_by_what_it_may_save(token_us: int, wait_us: int) -> None:
    """As long as its 21 tokens would take, between two bounds."""
    world = without_answers(token_us)
    world.tick(wait_us * 9 // 10)
    assert not world.plans
    world.tick(wait_us // 5)
    assert world.plans


def test_lookup_made_before_the_turn_is_waited_for_as_long() -> None:
    world = without_answers(4_000)
    (group,) = world.scheduler.state.waiting
    group.lookup_since_us += 15_000
    world.tick(lookups.WAIT_US + 1_000)
    assert not world.plans, "its turn has just begun"
    world.tick(84_000)
    assert world.plans


def test_no_block_is_given_up_for_a_slow_link_while_its_first_copy_measures_the_rate() -> None:
    world = fresh()
    executor, state = only(world), world.scheduler.state
    world.ask("first", PROMPT, 2)
    world.run()
    (tier,) = state.tiers.by_host.values()
    block = next(executor.pool.dirty)
    job = lookups.start_job(state, executor, tier, [block], [bytes(32)])
    lookups.count_queued(executor, job, 1 << 20)
    assert store._copy_us(state, executor) == 0
    state.now_us += LONG_COPY_US - 1
    assert store._copy_us(state, executor) == 0
    state.now_us += 1
    assert store._copy_us(state, executor) > 0, "it is slow itself"
    executor.down.observe(LONG_COPY_BYTES, 1_000_000, state.now_us)
    assert store._copy_us(state, executor) > 0, "the rate is known"


def test_silence_costs_an_admission_its_wait_and_then_nothing() -> None:
    world = fresh()
    world.tier.frozen = True
    world.ask("r0", [3] * 21, 2)
    assert not world.plans
    world.tick(lookups.WAIT_US)
    assert world.plans
    for number in range(1, MISSES + 1):
        world.tick(ANSWER_US)
        world.run()
        world.ask(f"r{number}", [number + 3] * 21, 2)
    world.tick(ANSWER_US)
    world.run()
    sent = len(world.tier.kept)
    world.ask("later", [77] * 9, 2)
    assert len(world.tier.kept) == sent, "a tier that rests is asked"
    world.run()
    world.assert_answers("later")


def test_many_that_are_silent_at_one_time_are_one_miss() -> None:
    world = fresh()
    world.tier.frozen = True
    for number in range(MISSES):
        world.ask(f"r{number}", [number + 3] * 21, 2)
    world.tick(ANSWER_US)
    assert not world.scheduler.state.tiers.lookups
    assert not world.scheduler.state.counters.tier_backoffs
    assert [tier.misses for tier in world.scheduler.state.tiers.by_host.values()] == [1]


def test_no_group_waits_for_a_dead_tier() -> None:
    world = stored()
    world.ask("second", PROMPT, 2)
    world.lose_tier()
    world.run()
    world.assert_answers("second")
    assert cached_tokens(world, "second") == 0
    assert not world.scheduler.state.tiers.jobs


def test_another_generation_holds_nothing() -> None:
    world = stored()
    assert only(world).pool.write_back
    world.restart_tier()
    assert not only(world).pool.clean
    world.ask("second", PROMPT, 2)
    world.run()
    assert cached_tokens(world, "second") == 0


def test_news_of_the_same_generation_change_nothing() -> None:
    world = stored()
    world.ask("second", PROMPT, 2)
    jobs, generation = dict(world.scheduler.state.tiers.jobs), world.tier.arena.generation
    world.handle(OffloadReady("k1", generation, "h", generation, ("l1", "l2")))
    assert world.scheduler.state.tiers.jobs == jobs
    world.handle(OffloadLost("another tier"))
    world.run()
    assert cached_tokens(world, "second") == 20


def test_blocks_that_leave_the_tiers_are_not_copied_there_again() -> None:
    world = fresh()
    world.ask("first", PROMPT, 2)
    world.run()
    world.tick(store.IDLE_US)
    world.run()
    pool, keys = only(world).pool, list(world.tier.l1)
    assert len(pool.clean) == 5
    world.handle(Arrived("kv_offload.k1", KvGone(keys=b"".join(keys))))
    assert not pool.clean
    assert pool.dirty_blocks == 0
    assert not world.scheduler.state.tiers.jobs


STRAYS: list[Callable[[int], object]] = [
    lambda job: KvFound(job=job, tiers=ints([1])),
    lambda job: KvReserved(job=job, arena_generation=1, offsets=longs([0])),
    lambda job: KvReady(job=job, arena_generation=1, offsets=longs([0]), valid_tokens=ints([4])),
    lambda job: KvStored(job=job, tiers=ints([1])),
    lambda job: KvCopied(job=job, status="ok"),
]


@pytest.mark.parametrize("stray", STRAYS, ids=lambda make: type(make(1)).__name__)
@pytest.mark.parametrize("source", ["kv_offload.k1", "kv_offload.other", "executor.e1"])
def test_answers_without_a_waiting_group_change_nothing(stray: Callable[[int], object], source: str) -> None:
    world = stored()
    world.handle(Arrived(source, stray(999)))  # type: ignore[arg-type]  # any message
    world.ask("second", PROMPT, 2)
    world.run()
    assert cached_tokens(world, "second") == 20
    world.assert_idle()


def test_a_step_that_fails_voids_what_is_copied_after_it() -> None:
    world = fresh()
    world.ask("a", PROMPT, 8)
    world.ask("b", PROMPT[::-1], 8)
    for _ in range(20):
        if len(only(world).running) == 2 and all(not s.is_prefilling for s in only(world).running):
            break
        assert world.deliver_tier() or world.deliver("e1")
    executor, state = only(world), world.scheduler.state
    state.now_us = world.now_us
    store._store_ahead(state, executor, state.tiers.by_host["h"], 8)
    (job,) = [job for job in state.tiers.jobs.values() if not job.up]
    assert job.after_step == executor.step > 0
    failed = StepResult(
        exec_epoch=1,
        step=executor.in_flight[0].step,
        ids=ints([-1] * len(executor.in_flight[0].rows)),
        done=ints([0] * len(executor.in_flight[0].rows)),
        error="boom",
    )
    world.handle(Arrived("executor.e1", failed))
    assert job.void
    assert not world.tier.l1


def test_load_is_declined_where_computing_is_faster() -> None:
    world = stored()
    executor = only(world)
    for _ in range(40):
        executor.up.observe(256, 10_000_000)  # 10 s a block
    world.took_us = 200
    for number in range(20):
        world.ask(f"warm{number}", [100 + number] * 5, 3)
        world.run()
    world.ask("second", PROMPT, 2)
    world.run()
    assert world.scheduler.state.counters.loads_declined == 1
    closed = world.readers_of("second")[0].closed
    assert closed is not None
    assert "would take longer" in next(d.why for d in closed.decisions if d.what == "recompute")


@pytest.mark.parametrize(("before", "declined"), [([], 1), ([99] * 60, 0)])
def test_load_competes_with_computing_after_the_prompts_before_it(before: list[int], declined: int) -> None:
    """The load takes 40 ms, its 20 tokens 20 ms: computing is faster, but not after 60 others."""
    world = stored()
    executor = only(world)
    for tokens in range(1, 41):
        shape = StepShape(0, 0, 0, 0).with_chunk(0, tokens)
        executor.cost_model.observe(shape, 1_000 * tokens)
        executor.up.observe(256, 8_000)  # a block
    if before:
        world.ask("before", before, 2)
    world.ask("second", PROMPT, 2)
    while world.deliver_tier():
        pass
    assert world.scheduler.state.counters.loads_declined == declined
    assert bool(world.copies["e1"]) == (not declined)
    world.run()
    assert cached_tokens(world, "second") == (0 if declined else 20)


def slowed() -> World:
    """Loading looks slow: the messages of the last load took 300 ms. The prompt's 20 tokens take 20 ms."""
    world = stored()
    executor = only(world)
    for tokens in range(1, 41):
        executor.cost_model.observe(StepShape(0, 0, 0, 0).with_chunk(0, tokens), 1_000 * tokens)
        executor.up.observe(256, 100, world.now_us)
    executor.up.observe_trip(300_000)
    return world


def again(world: World, request: str) -> int:
    """How many tokens of the prompt are loaded for another request."""
    only(world).pool.forget_cache()
    world.ask(request, PROMPT, 2)
    world.run()
    return cached_tokens(world, request)


def test_an_estimate_from_a_busy_moment_does_not_end_loading() -> None:
    world = slowed()
    assert again(world, "at once") == 0
    world.tick(RETRY_US)
    assert again(world, "later") == 4 * TRY_BLOCKS
    assert again(world, "then") == 20, "the messages of the load before took no time"
    assert world.scheduler.state.counters.loads_declined == 2


def test_a_link_that_is_slow_indeed_is_tried_now_and_then() -> None:
    """By one request at a time, with a few blocks."""
    world = slowed()
    world.tick(RETRY_US)
    for request in ("tried", "beside"):
        world.ask(request, PROMPT, 2)
    while not world.copies["e1"]:
        assert world.deliver_tier()
    world.tick(300_000)
    world.run()
    counters = world.scheduler.state.counters
    assert (counters.loads_declined, counters.loads, counters.l1_hit_blocks) == (2, 1, TRY_BLOCKS)
    assert again(world, "at once") == 0
    world.tick(RETRY_US)
    assert again(world, "later") == 4 * TRY_BLOCKS


def test_a_link_is_not_tried_again_at_once_after_a_try_that_failed() -> None:
    """A try that failed has measured nothing, and each one delays its request."""
    world = slowed()
    world.tick(RETRY_US)
    only(world).pool.forget_cache()
    until_loading(world, "tried")
    (pending,) = world.copies["e1"]
    pending.done = KvCopied(job=pending.copy.job, status="stale")
    world.run()
    assert again(world, "at once") == 0
    counters = world.scheduler.state.counters
    assert (counters.loads_declined, counters.loads_failed, counters.loads) == (2, 1, 0)
    world.tick(RETRY_US)
    assert again(world, "later") == 4 * TRY_BLOCKS


@pytest.mark.parametrize("slow", ["up", "down"])
def test_a_few_slow_copies_of_one_direction_do_not_end_loading(slow: str) -> None:
    """Two short copies do not show a rate: the first ones of an executor are slower than all after them."""
    world = slowed()
    only(world).up, only(world).down = TransferLink(), TransferLink()
    for _ in range(2):
        only(world).up.observe(256, 50_000 if slow == "up" else 100, world.now_us)
        only(world).down.observe(256, 50_000 if slow == "down" else 100, world.now_us)
        only(world).up.saw_long_copy = only(world).down.saw_long_copy = False
    assert again(world, "at once") == 20


def test_next_group_repeats_its_lookup_before_its_turn() -> None:
    """It has waited long for room: at its turn it would wait for an answer, and hold up the groups after
    it."""
    world = fresh(blocks=8)
    world.ask("runs", PROMPT, 10)
    world.ask("next", PROMPT[::-1], 10)
    while world.deliver_tier():
        pass
    (group,) = world.scheduler.state.waiting
    (answer,) = group.lookup_results.values()
    assert answer.at_us >= 0
    world.now_us += lookups.STALE_US // 2
    world.deliver()
    assert list(group.lookup_results.values()) == [answer], "not old yet"
    world.now_us += 1
    world.deliver()
    (newer,) = group.lookup_results.values()
    assert (newer.sent_us, group.lookup_since_us) == (world.now_us, 0)
    world.run()
    world.assert_answers("next")
