"""Tiers of the virtual world: copy lanes, fences of copies, and a kv_offload that is woken in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.scenarios.real_tier import RealTier
from loadtest.simulator.copies import Link
from loadtest.simulator.engine import Machine, VirtualEngine
from loadtest.simulator.fences import FenceBroken
from loadtest.simulator.hops import Hop
from loadtest.simulator.requests import Workload
from loadtest.simulator.tiers import TierSpec
from loadtest.simulator.world import FIRST_US, TIER_HOP_US, Setup, World
from services.scheduler.state.requests import Send
from shared.messages import (
    KvCommit,
    KvCopy,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvReserve,
    Message,
    SlotClose,
    SlotOpen,
    StepPlan,
    ints,
    longs,
)
from shared.step_model import StepModel

STEP_US, BLOCK = 10_000, 1_000
PAGE, LEASE_US = 4_096, 1_000_000
MODEL = StepModel(weights_us=STEP_US, token_ns=0)
KEYS = [bytes([number]) * 32 for number in range(10)]


def engine(hop_us: int = 0) -> VirtualEngine:
    link = Link(d2h_bytes_s=1_000_000, h2d_bytes_s=2_000_000, job_us=10)  # 1 ms and 0.5 ms a block
    machine = Machine(MODEL, blocks=8, block_tokens=4, slots=4, hop=Hop(hop_us), block_bytes=BLOCK, link=link)
    return VirtualEngine("e0", machine, 0, lambda seq: 100)


def prefill(step: int, slot: int, blocks: list[int], start: int = 0) -> StepPlan:
    return StepPlan(
        exec_epoch=1, step=step, mode="run_ahead", micro_batch=0, slots=ints([slot]), starts=ints([start]),
        counts=ints([2]), from_device=ints([0]), sample_rows=ints(), sample_slots=ints(),
        table_slots=ints([slot]), table_first=ints([0]), table_counts=ints([len(blocks)]),
        table_blocks=ints(blocks),
    )  # fmt: skip


def opened(slot: int) -> SlotOpen:
    return SlotOpen(
        slot=slot, generation=1, seq=slot + 1, prompt_tokens=2, max_length=40, tokens=ints([5, 5])
    )


def copy(job: int, to_arena: bool, *blocks: int, after_step: int = 0) -> KvCopy:
    return KvCopy(
        job=job, to_arena=to_arena, after_step=after_step, arena_generation=1, blocks=ints(blocks),
        offsets=longs(range(len(blocks))), block_bytes=BLOCK,
    )  # fmt: skip


def times(made: VirtualEngine, what: KvCopy, sent_us: int) -> tuple[int, int, int]:
    """(waited, took, at the scheduler)."""
    done, at_us = made.copy(what, sent_us)
    return done.wait_us, done.took_us, at_us


def test_copies_of_each_direction_run_in_the_order_of_arrival() -> None:
    made = engine(hop_us=100)
    assert times(made, copy(1, True, 0, 1), 0) == (0, 2_010, 2_210)
    assert times(made, copy(2, True, 2), 0) == (2_010, 1_010, 3_220)
    assert times(made, copy(3, False, 3), 0) == (0, 510, 710)
    assert times(made, copy(4, False, 4), 5_000) == (0, 510, 5_710)
    assert (made.copies.stored_bytes, made.copies.loaded_bytes, made.copies.jobs) == (3_000, 2_000, 4)


def test_a_store_comes_after_its_step() -> None:
    made = engine(hop_us=100)
    made.open(opened(0))
    made.run(prefill(1, 0, [3]), 0)
    made.run(replace(prefill(2, 0, [], start=2), table_first=ints([1])), 0)
    assert times(made, copy(1, True, 3, after_step=1), 0) == (STEP_US, 1_010, 100 + STEP_US + 1_010 + 100)
    assert times(made, copy(2, True, 3, after_step=2), 0) == (2 * STEP_US, 1_010, 200 + 2 * STEP_US + 1_010)


def test_a_result_is_not_held_up_by_a_copy_that_comes_later() -> None:
    made = engine()
    made.open(opened(0))
    assert times(made, copy(1, True, *range(4, 8)), 0)[2] == 4_010
    assert made.run(prefill(1, 0, [3]), 0)[1] == STEP_US
    assert times(made, copy(2, False, 2), 0)[2] == 510  # nor a copy by a result


@pytest.mark.parametrize(
    ("first", "then", "what"),
    [
        (copy(1, False, 3), prefill(1, 0, [3]), "takes block 3, which a copy"),
        (copy(1, False, 3), prefill(1, 0, [3, 4], start=4), "takes block 3, which a copy"),
        (copy(1, True, 3), prefill(1, 0, [3]), "takes block 3, which a copy"),
        (prefill(1, 0, [3]), copy(1, False, 3), "loads into block 3, which is still in use"),
        (copy(1, True, 3), copy(2, False, 3), "loads into block 3, which is still in use"),
        (copy(1, False, 3), copy(2, True, 3), "which a load still fills"),
        (copy(1, True, 3), copy(1, True, 4), "is copied twice"),
    ],
)
def test_a_block_of_a_copy_in_flight_is_not_given_out(first: Message, then: Message, what: str) -> None:
    made = engine()
    made.open(opened(0))

    def send(message: Message) -> None:
        if isinstance(message, KvCopy):
            made.copy(message, 0)
        else:
            assert isinstance(message, StepPlan)
            made.run(message, 0)

    send(first)
    with pytest.raises(FenceBroken, match=what):
        send(then)


def test_copy_slot_is_free_after_its_answer() -> None:
    made = engine()
    made.open(opened(0))
    made.copy(copy(1, True, 3), 0)
    made.copy(copy(2, True, 3), 0)  # two may read
    made.copied(1)
    made.copied(2)
    made.copy(copy(3, False, 3), 0)
    made.copied(3)
    made.run(prefill(1, 0, [3]), 0)
    made.close(SlotClose(slot=0, generation=1, last_step=1))
    with pytest.raises(FenceBroken, match="loads into block 3"):
        made.copy(copy(4, False, 3), 0)  # the step is not answered
    made.answered(1)


def keys(*numbers: int) -> bytes:
    return b"".join(KEYS[number] for number in numbers)


def prefetch(job: int, *numbers: int) -> KvPrefetch:
    return KvPrefetch(job=job, owner="e", keys=keys(*numbers), deadline_us=100_000, lease_us=LEASE_US)


def test_messages_go_to_the_tier_and_back_and_what_it_does_by_itself_is_woken_for() -> None:
    spec = TierSpec(4 * PAGE, l2_bytes_s=1_000 * PAGE, l2_delay_us=0)  # 1 ms a block
    machine = Machine(MODEL, block_bytes=PAGE)
    tier = RealTier(spec, PAGE)
    world = World(Setup((machine,), tier=lambda: tier), Workload(()))
    received: list[tuple[int, object]] = []
    world.scheduler.handle = lambda event, now_us: received.append((now_us, event)) or []  # type: ignore[method-assign,func-returns-value,return-value]  # a spy
    world.run()

    def deliver(*messages: Message) -> int:
        """When they were sent."""
        sent_us = world.now_us
        for message in messages:
            world._carry_out(Send("kv_offload.k0", message))
        world.run()
        return sent_us

    reserve = KvReserve(job=1, owner="executor.e0", keys=keys(0, 1), value_bytes=PAGE, lease_us=LEASE_US)
    deliver(reserve, KvCommit(job=1, written=ints([1, 1])))
    deliver(prefetch(2, 0, 1), KvRelease(jobs=ints([2])))  # a second use: they go to L2
    others = replace(reserve, job=3, keys=keys(2, 3, 4, 5), priority=1)
    deliver(others, KvRelease(jobs=ints([3])))
    sent_us = deliver(prefetch(4, 0, 1))
    ready = [
        (at, event.message) for at, event in received if isinstance(getattr(event, "message", 0), KvReady)
    ]  # type: ignore[attr-defined]  # it has one
    assert ready[-1][0] == sent_us + TIER_HOP_US + 2_000 + TIER_HOP_US
    assert [message.from_l2 for _, message in ready] == [0, 2]
    assert sent_us > FIRST_US
    moved = tier.moved
    assert (moved.stored_blocks, moved.evicted_blocks, moved.refused_blocks) == (2, 2, 0)
    assert (moved.l2_put_bytes, moved.l2_get_bytes, moved.messages) == (2 * PAGE, 2 * PAGE, 7)
