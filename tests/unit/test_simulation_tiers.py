"""Tiers of the virtual world alone: copy lanes, fences of copies, the plain tier's answers and times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.events import Send
from services.scheduler.simulation.copies import Link
from services.scheduler.simulation.engine import Machine, VirtualEngine
from services.scheduler.simulation.fences import FenceBroken
from services.scheduler.simulation.hops import Hop
from services.scheduler.simulation.plain_index import PUT_WAIT_US, TierSpec
from services.scheduler.simulation.plain_tier import PlainTier
from services.scheduler.simulation.requests import Workload
from services.scheduler.simulation.world import FIRST_US, TIER_HOP_US, Setup, World
from shared.messages import (
    KvCommit,
    KvCopy,
    KvFound,
    KvGone,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvReserve,
    KvReserved,
    KvStored,
    Message,
    SlotClose,
    SlotOpen,
    StepPlan,
    ints,
    longs,
)
from shared.step_model import StepModel

STEP_US, BLOCK = 10_000, 1_000
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


def test_a_lane_each_way_first_come_first_served() -> None:
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


def test_after_its_answer_it_is() -> None:
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


def ask(tier: PlainTier, message: Message, now_us: int = 0) -> list[Message]:
    return [answer for _, _, answer in tier.handle("scheduler.s", message, now_us)]


def keys(*numbers: int) -> bytes:
    return b"".join(KEYS[number] for number in numbers)


def reserve(job: int, *numbers: int) -> KvReserve:
    return KvReserve(job=job, owner="executor.e0", keys=keys(*numbers), value_bytes=BLOCK, lease_us=1)


def prefetch(job: int, *numbers: int, deadline_us: int = 100_000) -> KvPrefetch:
    return KvPrefetch(job=job, owner="e", keys=keys(*numbers), deadline_us=deadline_us, lease_us=1)


def store(tier: PlainTier, job: int, *numbers: int, now_us: int = 0) -> list[Message]:
    """Reserve, and commit what has room. All that came back but KvReserved."""
    reserved, *rest = ask(tier, reserve(job, *numbers), now_us)
    assert isinstance(reserved, KvReserved)
    return rest + ask(tier, KvCommit(job=job, written=ints(int(o >= 0) for o in reserved.offsets)), now_us)


def found(tier: PlainTier, *numbers: int, now_us: int = 0) -> list[int]:
    [answer] = ask(tier, KvLookup(job=9, keys=keys(*numbers), prefix=False), now_us)
    assert isinstance(answer, KvFound)
    return list(answer.tiers)


def test_the_tail_of_a_chain_is_evicted_first() -> None:
    tier = PlainTier(TierSpec(4 * BLOCK))
    store(tier, 1, 0, 1, 2, 3)
    gone, stored = store(tier, 2, 4)
    assert (gone, stored) == (KvGone(keys=KEYS[3]), KvStored(job=2, tiers=ints([1])))
    assert found(tier, 0, 1, 2, 3, 4) == [1, 1, 1, 0, 1]
    assert (tier.moved.stored_blocks, tier.moved.evicted_blocks) == (5, 1)


def test_what_is_leased_stays_and_what_is_there_is_not_written_again() -> None:
    tier = PlainTier(TierSpec(2 * BLOCK))
    store(tier, 1, 0, 1)
    [ready] = ask(tier, prefetch(2, 0, 1))
    assert isinstance(ready, KvReady)
    assert (ready.status, ready.from_l2, len(set(ready.offsets)), min(ready.offsets) > 0) == (
        "ok",
        0,
        2,
        True,
    )
    [reserved] = ask(tier, reserve(3, 1, 2))
    assert isinstance(reserved, KvReserved)
    assert (list(reserved.offsets), reserved.status) == ([-2, -1], "no_room")
    assert ask(tier, KvCommit(job=3, written=ints([0, 0]))) == [KvStored(job=3, tiers=ints([1, 0]))]
    assert ask(tier, KvRelease(jobs=ints([2]))) == []
    assert store(tier, 4, 2)[1:] == [KvStored(job=4, tiers=ints([1]))]
    assert (tier.leases, tier.index.free_bytes, tier.moved.refused_blocks) == (0, 0, 1)


def test_a_reservation_given_up_is_room_again() -> None:
    tier = PlainTier(TierSpec(2 * BLOCK))
    ask(tier, reserve(1, 0, 1))
    ask(tier, KvRelease(jobs=ints([1])))
    assert (tier.leases, tier.index.free_bytes, found(tier, 0)) == (0, 2 * BLOCK, [0])


def test_l2_takes_its_time_each_way() -> None:
    tier = PlainTier(TierSpec(2 * BLOCK, l2_bytes_s=1_000_000, l2_delay_us=50))  # 1 ms a block
    store(tier, 1, 0, 1)  # in L2 at 1 and 2 ms
    store(tier, 2, 2, 3, now_us=1_000)  # evicts the tail: 1 before its put is through
    assert found(tier, 0, 1, 2, 3, now_us=1_000) == [2, 0, 1, 1]
    assert ask(tier, prefetch(3, 0, 1), 10_000) == []
    assert tier.due_us == 11_050
    [(_, _, ready)] = tier.advance(11_050)
    assert isinstance(ready, KvReady)
    assert (list(ready.offsets)[1], ready.took_us, ready.from_l2, ready.status) == (-1, 1_050, 1, "missing")
    assert found(tier, 0, 3, now_us=11_050) == [1, 2]
    assert (tier.moved.l2_put_bytes, tier.moved.l2_get_bytes) == (4 * BLOCK, BLOCK)


def test_a_prefetch_is_answered_at_its_deadline() -> None:
    tier = PlainTier(TierSpec(4 * BLOCK, l2_bytes_s=1_000_000, l2_delay_us=0))
    store(tier, 1, 0, 1)
    store(tier, 2, 2, 3, 4, 5, now_us=5_000)
    assert ask(tier, prefetch(3, 0, 1, deadline_us=1_500), 20_000) == []
    assert [answer for _, _, answer in tier.advance(21_000)] == []
    [(_, _, ready)] = tier.advance(21_500)
    assert isinstance(ready, KvReady)
    assert [offset >= 0 for offset in ready.offsets] == [True, False]
    tier.advance(22_000)
    assert found(tier, 0, 1, now_us=22_000) == [1, 1]
    assert tier.due_us is None


def test_a_queue_to_l2_has_an_end() -> None:
    tier = PlainTier(TierSpec(9 * BLOCK, l2_bytes_s=2_000))  # half a second a block
    store(tier, 1, *range(6))
    assert tier.moved.l2_put_bytes == 3 * BLOCK
    assert PUT_WAIT_US == 1_000_000


def test_messages_go_to_the_tier_and_back() -> None:
    machine = Machine(MODEL, block_bytes=BLOCK)
    spec = TierSpec(2 * BLOCK, l2_bytes_s=1_000_000, l2_delay_us=0)
    world = World(Setup((machine,), tier=lambda: PlainTier(spec)), Workload(()))
    heard: list[tuple[int, object]] = []
    world.scheduler.handle = lambda event, now_us: heard.append((now_us, event)) or []  # type: ignore[method-assign,func-returns-value,return-value]  # a spy
    world.run()
    for message in (reserve(1, 0, 1), KvCommit(job=1, written=ints([1, 1])), reserve(2, 2, 3)):
        world._carry_out(Send("kv_offload.k0", message))
        world.run()
        world.now_us += 5_000
    world._carry_out(Send("kv_offload.k0", KvRelease(jobs=ints([2]))))
    world._carry_out(Send("kv_offload.k0", prefetch(3, 0, 1)))
    sent_us = world.now_us
    world.run()
    ready = [(at, event.message) for at, event in heard if isinstance(getattr(event, "message", 0), KvReady)]  # type: ignore[attr-defined]  # it has one
    assert ready[0][0] == sent_us + TIER_HOP_US + 2_000 + TIER_HOP_US
    assert ready[0][1].from_l2 == 2
    assert sent_us > FIRST_US
