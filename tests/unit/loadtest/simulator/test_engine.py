"""The virtual engine alone: stages, the host lane, and the fences that it watches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.simulator.engine import Machine, VirtualEngine
from loadtest.simulator.fences import FenceBroken
from loadtest.simulator.hops import Hop
from loadtest.simulator.requests import PROCESSORS, STOP_ID, TEXT_ID
from shared.messages import SlotClose, SlotOpen, StepPlan, ints
from shared.step_model import StepModel

MODEL = StepModel(weights_us=10_000, token_ns=0, host_row_ns=2_000_000)


def engine(stages: int = 1, hop_us: int = 0, output: int = 100) -> VirtualEngine:
    machine = Machine(MODEL, blocks=8, block_tokens=4, slots=4, stages=stages, hop=Hop(hop_us))
    return VirtualEngine("e0", machine, 0, lambda seq: output)


def opened(slot: int, seq: int = 0, processors: tuple[str, ...] = (), generated: int = 0) -> SlotOpen:
    return SlotOpen(
        slot=slot,
        generation=1,
        seq=seq or slot + 1,
        prompt_tokens=2,
        max_length=40,
        stop_ids=ints([STOP_ID]),
        tokens=ints([5] * (2 + generated)),
        processors=processors,
    )


def decode(step: int, *slots: int, start: int = 2) -> StepPlan:
    return StepPlan(
        exec_epoch=1,
        step=step,
        mode="run_ahead",
        micro_batch=0,
        slots=ints(slots),
        starts=ints([start] * len(slots)),
        counts=ints([1] * len(slots)),
        from_device=ints([1] * len(slots)),
        sample_rows=ints(range(len(slots))),
        sample_slots=ints(slots),
    )


def prefill(step: int, slot: int, count: int, blocks: list[int]) -> StepPlan:
    return replace(
        decode(step, slot, start=0),
        counts=ints([count]),
        from_device=ints([0]),
        table_slots=ints([slot]),
        table_first=ints([0]),
        table_counts=ints([len(blocks)]),
        table_blocks=ints(blocks),
    )


def stamps(made: VirtualEngine, plan: StepPlan, sent_us: int) -> tuple[int, int, int]:
    """(begin, end on the device, at the scheduler)."""
    _, at_us = made.run(plan, sent_us)
    return made.log[-3], made.log[-2], at_us


def test_steps_queue_on_the_device() -> None:
    made = engine(hop_us=1_000)
    made.open(opened(0))
    assert stamps(made, decode(1, 0), 0) == (1_000, 11_000, 12_000)
    result, at_us = made.run(decode(2, 0), 0)
    assert (result.start_wall_us, result.queued_us, result.wait_us, at_us) == (11_000, 10_000, 0, 22_000)
    result, _ = made.run(decode(3, 0), 25_000)
    assert (result.start_wall_us, result.queued_us, result.wait_us) == (26_000, 0, 5_000)
    assert made.totals.idle_us == 1_000 + 5_000


def test_two_stages_work_on_two_batches_at_once() -> None:
    made = engine(stages=2)
    for slot in (0, 1):
        made.open(opened(slot))
    assert stamps(made, decode(1, 0), 0) == (0, 10_000, 10_000)
    assert stamps(made, decode(2, 1), 0) == (5_000, 15_000, 15_000)  # stage 1 is free after 5 ms
    assert stamps(made, decode(3, 0), 0) == (10_000, 20_000, 20_000)  # waits for its own sample
    assert made.totals.busy_us == 30_000
    assert made.totals.idle_us == 5_000  # stage 2, until the first step reached it


def test_the_host_works_while_the_device_runs_on() -> None:
    made = engine()
    for slot in (0, 1):
        made.open(opened(slot, processors=PROCESSORS))
    result, at_us = made.run(decode(1, 0), 0)
    assert (result.end_wall_us, result.host_us, at_us) == (12_000, 2_000, 12_000)
    assert stamps(made, decode(2, 1), 0) == (10_000, 20_000, 22_000)
    assert made.totals.host_us == 4_000


def test_the_host_thread_takes_one_step_after_the_other() -> None:
    made = engine()
    made.machine = replace(made.machine, model=replace(MODEL, host_row_ns=15_000_000))
    for slot in (0, 1, 2):
        made.open(opened(slot, processors=PROCESSORS if slot < 2 else ()))
    assert stamps(made, decode(1, 0), 0) == (0, 10_000, 25_000)
    assert stamps(made, decode(2, 1), 0) == (10_000, 20_000, 40_000)
    assert stamps(made, decode(3, 2), 0) == (20_000, 30_000, 40_000)  # results leave in order


def test_a_host_fed_row_must_wait_for_its_host() -> None:
    made = engine()
    made.open(opened(0, processors=PROCESSORS))
    made.run(decode(1, 0), 0)
    with pytest.raises(FenceBroken, match="before the host has answered"):
        made.run(decode(2, 0), 11_999)


def test_a_slot_ends_with_its_stop_id_once() -> None:
    made = engine(output=2)
    made.open(opened(0))
    results = [made.run(decode(step, 0), 0)[0] for step in (1, 2, 3)]
    assert [(r.ids[0], r.done[0]) for r in results] == [(TEXT_ID, 0), (STOP_ID, 1), (-1, 2)]
    assert made.totals.wasted_rows == 1


def test_recomputed_tokens_are_counted() -> None:
    made = engine()
    made.open(opened(0, seq=9))
    made.run(prefill(1, 0, 2, [0]), 0)
    made.run(decode(2, 0), 0)
    made.run(decode(3, 0, start=3), 0)  # 3 tokens sampled: KV of 4 tokens is there
    made.close(SlotClose(slot=0, generation=1, last_step=3))
    made.open(opened(1, seq=9, generated=3))
    made.run(prefill(4, 1, 5, [1, 2]), 0)
    assert (made.totals.resumed, made.totals.prefill_tokens, made.totals.recomputed_tokens) == (1, 7, 4)
    assert made.totals.recompute_us == 0  # one token more is new, and any step takes as long


def test_recompute_cost_is_the_time_that_the_step_would_be_shorter() -> None:
    made = engine()
    made.machine = replace(made.machine, model=StepModel(weights_us=0, token_ns=1_000_000))
    made.open(opened(0, seq=9))
    made.run(prefill(1, 0, 2, [0]), 0)
    made.close(SlotClose(slot=0, generation=1, last_step=1))
    made.open(opened(1, seq=9, generated=3))
    made.run(prefill(2, 1, 5, [1, 2]), 0)
    assert (made.totals.busy_us, made.totals.recompute_us) == (7_000, 2_000)


def test_a_block_in_a_step_in_flight_is_not_given_out() -> None:
    made = engine()
    made.open(opened(0))
    made.run(prefill(1, 0, 2, [3]), 0)
    made.close(SlotClose(slot=0, generation=1, last_step=1))
    made.open(opened(1))
    with pytest.raises(FenceBroken, match="writes block 3, which is still in use"):
        made.run(prefill(2, 1, 2, [3]), 0)


def test_slot_is_free_after_the_result() -> None:
    made = engine()
    made.open(opened(0))
    made.run(prefill(1, 0, 2, [3]), 0)
    made.close(SlotClose(slot=0, generation=1, last_step=1))
    made.answered(1)
    made.open(opened(0))
    made.run(prefill(2, 0, 2, [3]), 0)
    assert made.totals.steps == 2


def test_a_block_of_another_table_may_be_read_and_not_written() -> None:
    made = engine()
    made.open(opened(0))
    made.run(prefill(1, 0, 6, [3, 4]), 0)
    made.open(opened(1))
    after_prefix = replace(prefill(2, 1, 2, [3, 5]), starts=ints([4]))
    made.run(after_prefix, 0)  # block 3 is a shared prefix
    made.open(opened(2))
    with pytest.raises(FenceBroken, match="writes block 4"):
        made.run(replace(prefill(3, 2, 2, [3, 4]), starts=ints([4])), 0)


def test_a_slot_in_flight_is_not_opened_again() -> None:
    made = engine()
    made.open(opened(0))
    made.run(prefill(1, 0, 2, [3]), 0)
    made.close(SlotClose(slot=0, generation=1, last_step=1))
    with pytest.raises(FenceBroken, match="slot 0 is opened while"):
        made.open(opened(0))


def test_a_table_has_no_holes() -> None:
    made = engine()
    made.open(opened(0))
    with pytest.raises(FenceBroken, match="hole"):
        made.run(replace(prefill(1, 0, 2, [3]), table_first=ints([1])), 0)
