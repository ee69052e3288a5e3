"""Which overlap mode pays: hand-computed rates, and when a mode is kept, dropped and tried again."""

from __future__ import annotations

import dataclasses

import pytest
from support.executor.paged_engine import STOP_ID, expected_tokens
from support.scheduler.known_costs import Known
from support.scheduler.world import World

from services.scheduler import overlap
from services.scheduler.overlap import (
    DWELL_STEPS,
    MIN_SEEN,
    PROBE_EVERY,
    PROBE_STEPS,
    OverlapLoad,
    choose_mode,
    depth,
    rate,
)
from services.scheduler.state.cost_model import CostModel, StepPace
from services.scheduler.state.state import Limits
from shared.step_model import H200_8B, SMOLLM2_CPU, StepModel, StepShape


def load(rows: int, hosted: int, context: int = 1_024, stages: int = 1, window: int = 2) -> OverlapLoad:
    return OverlapLoad(rows, hosted, rows * context, stages, window)


FLAT = StepModel(weights_us=1_000, token_ns=1, row_ns=10_000)  # 1,000 us and 10 us a row


def test_rates_equal_ones_by_hand() -> None:
    costs = Known(FLAT, loop_us=500, host_row_us=20)
    # 100 rows: T = 2,000, host 2,000 -> 100 rows in 2,000 + 500 + 2,000 us
    assert rate("single", load(100, 100, 0), costs) == 100 * 10**9 // 4_500
    # halves: 1,500 each; A's own way 1,500 + 500 + 1,000 = 3,000 = T_A + T_B
    assert rate("two_batch", load(100, 100, 0), costs) == 100 * 10**9 // 3_000
    assert rate("two_batch", load(100, 100, 0, stages=2), costs) == 100 * 10**9 // 3_000
    # device-fed, two steps ahead: max(2,000, 2,500 / 2)
    assert rate("run_ahead", load(100, 0, 0), costs) == 100 * 10**9 // 2_000


@pytest.mark.parametrize(
    ("rows", "hosted", "mode"),
    [(256, 256, "two_batch"), (64, 64, "single"), (256, 0, "run_ahead"), (64, 0, "run_ahead")],
)
def test_an_8b_on_an_h200_with_a_host_processor_of_30_us_a_row(rows: int, hosted: int, mode: str) -> None:
    assert choose_mode(load(rows, hosted), Known(H200_8B, 300, 30), "") == mode


def test_rows_that_all_wait_for_the_host_have_nothing_to_run_ahead_with() -> None:
    """Where run-ahead would take them by halves it would do as well as two_batch; but nothing parts them."""
    costs = Known(SMOLLM2_CPU, 2_000, 5_000)
    by_halves, two_batch = (rate(mode, load(16, 16, 160), costs) for mode in ("run_ahead", "two_batch"))
    assert by_halves == pytest.approx(two_batch, rel=1e-3)
    assert choose_mode(load(16, 16, 160), costs, "run_ahead") == "two_batch"


def test_two_stages_are_fed_by_two_batches() -> None:
    costs = Known(H200_8B, 300)
    assert choose_mode(load(256, 0, stages=2), costs, "single") == "two_batch"
    assert choose_mode(load(1, 0, stages=2), costs, "single") != "two_batch"


def test_rows_that_the_host_does_not_feed_are_never_parted() -> None:
    """A CPU was seen with up to 16 rows and with chunks. More rows look far longer than they are, and so they
    would for ever if they were computed in two halves."""
    costs = CostModel()
    costs.observe_loop(2_000)
    for _ in range(4):
        for rows in range(1, 17):
            costs.observe(StepShape(rows, rows, rows * 160, rows * 160), 10_000 + 700 * rows)
        costs.observe(StepShape(8, 136, 8 * 160, 8 * 160 + 128 * 64), 10_000 + 700 * 136)
    whole, half = (costs.predict_us(StepShape(rows, rows, rows * 160, rows * 160)) for rows in (32, 16))
    assert whole > 2 * half
    assert choose_mode(load(32, 0, 160), costs, "run_ahead") == "run_ahead"


def test_little_known_means_the_safe_mode() -> None:
    costs = CostModel()
    costs.seen = MIN_SEEN - 1
    assert choose_mode(load(256, 0), costs, "") == "run_ahead"
    assert choose_mode(load(256, 1), costs, "") == "single"


def test_a_mode_is_left_for_one_percent_at_least() -> None:
    step = StepModel(weights_us=10_000, token_ns=1)
    assert choose_mode(load(8, 0, 0), Known(step, 99), "single") == "single"
    assert choose_mode(load(8, 0, 0), Known(step, 101), "single") == "run_ahead"
    assert choose_mode(load(8, 0, 0), Known(step, 99), "") == "run_ahead"


def test_rows_that_end_unforeseen_are_computed_once_more_for_each_step_ahead() -> None:
    """One row in four is an answer's last, and that was unknown: of five rows one is for nothing."""
    costs = Known(FLAT, loop_us=500)
    cut = dataclasses.replace(load(100, 0, 0), early_end_share=0.25)
    assert rate("run_ahead", cut, costs) == 100 * 10**9 // 2_000 * 4 // 5
    assert rate("single", cut, costs) == rate("single", load(100, 0, 0), costs)


def test_chunks_beside_the_rows_are_part_of_a_step() -> None:
    """3,000 us of prompts each time that all rows advance: halves share them."""
    costs = Known(FLAT, loop_us=500)
    chunks = dataclasses.replace(load(100, 0, 0), chunk_us=3_000)
    assert rate("run_ahead", chunks, costs) == 100 * 10**9 // 5_000
    assert rate("single", chunks, costs) == 100 * 10**9 // 5_500
    assert rate("two_batch", chunks, costs) == 100 * 10**9 // 6_000


@pytest.mark.parametrize(("stops", "cut"), [(False, 0), (True, 3)])
def test_an_end_by_max_tokens_is_foreseen(stops: bool, cut: int) -> None:
    """Answers of one token leave nothing for nothing, whereas a stop id does."""
    world = World(Limits(overlap="run_ahead"))
    world.add_engine(slots=4)
    (executor,) = world.scheduler.state.executors.values()
    found = 0
    for n in range(3):
        ends = (p for p in range(5, 900) if expected_tokens([p, n], 0, 1, True)[0] == STOP_ID)
        prompt = next(ends) if stops else 5
        before = executor.pace.early_ends
        world.ask(f"r{n}", [prompt, n], 30 if stops else 1, stops=stops)
        world.run()
        found += executor.pace.early_ends > before
    assert found == cut


def test_a_guard_compares_what_it_has_seen_lately() -> None:
    """A thousand slow steps, then a hundred quick ones: the speed is that of the quick ones."""
    pace = StepPace(mode="run_ahead")
    for step in range(1, 1_101):
        pace.note(step, 10, 1_000, step * 1_000 + min(step, 1_000) * 9_000, busy=True)
    assert pace.speed.us < 3 * pace.speed.took_us


@pytest.mark.parametrize(
    ("step_us", "loop_us", "window", "steps"),
    [
        (0, 500, 4, 2),
        (0, 0, 1, 1),
        (1_000, 0, 4, 2),
        (1_000, 1_000, 4, 2),
        (1_000, 1_001, 4, 3),
        (1_000, 9_000, 4, 4),
    ],
)
def test_the_least_window_without_a_gap(step_us: int, loop_us: int, window: int, steps: int) -> None:
    assert depth(step_us, loop_us, window) == steps


def modes(world: World, steps: int, monkeypatch: pytest.MonkeyPatch, wanted: dict[int, str]) -> list[str]:
    """The mode of each of so many steps; from a step of `wanted` on another one looks best."""
    (executor,) = world.scheduler.state.executors.values()
    found = []
    executor.step = 0
    for step in range(steps):
        executor.step = step
        best = wanted[max(at for at in wanted if at <= step)]
        monkeypatch.setattr(overlap, "choose_mode", lambda load, costs, present, best=best: best)
        found.append(overlap.mode_of(world.scheduler.state, executor)[0])
    return found


def test_a_mode_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.add_engine()
    found = modes(world, 3 * DWELL_STEPS, monkeypatch, {0: "run_ahead", 5: "two_batch"})
    assert found.index("two_batch") == DWELL_STEPS
    assert set(found[DWELL_STEPS:]) == {"two_batch"}


def test_a_mode_is_not_kept_for_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen for two rows, it is kept for four and not for five."""
    world = World()
    world.add_engine()
    (executor,) = world.scheduler.state.executors.values()
    for rows, best, found in (
        (2, "single", "single"),
        (4, "two_batch", "single"),
        (5, "two_batch", "two_batch"),
    ):
        monkeypatch.setattr(executor, "running", [None] * rows)
        monkeypatch.setattr(overlap, "_load", lambda state, executor: None)
        monkeypatch.setattr(overlap, "choose_mode", lambda load, costs, present, best=best: best)
        assert overlap.mode_of(world.scheduler.state, executor)[0] == found


@pytest.mark.parametrize(("probe_us", "banned"), [(9_700, True), (9_900, False)])
def test_a_mode_slower_than_single_is_dropped_for_a_time(
    monkeypatch: pytest.MonkeyPatch, probe_us: int, banned: bool
) -> None:
    """Ten steps of ten rows, 9,000 us on the device, took 10,000 us of it in the mode; in single less."""
    world = World()
    world.add_engine()
    (executor,) = world.scheduler.state.executors.values()
    executor.pace = StepPace(mode="run_ahead", rows=100, steps=10, us=10_000, took_us=9_000)
    monkeypatch.setattr(overlap, "choose_mode", lambda load, costs, present: "run_ahead")
    executor.step = PROBE_EVERY
    found = [overlap.mode_of(world.scheduler.state, executor)[0]]
    executor.pace = dataclasses.replace(executor.pace, rows=100, steps=10, us=probe_us, took_us=9_000)
    for step in (PROBE_STEPS - 1, PROBE_STEPS, PROBE_STEPS + PROBE_EVERY):
        executor.step = PROBE_EVERY + step
        found.append(overlap.mode_of(world.scheduler.state, executor)[0])
    assert found == ["single", "single", "single" if banned else "run_ahead", "run_ahead"]


def test_two_batch_with_one_micro_batch_empty_goes_on() -> None:
    world = World(Limits(overlap="two_batch"))
    world.add_engine()
    world.ask("alone", [5, 6], 9)
    world.run()
    world.assert_answers("alone")
    assert {plan.micro_batch for plan in world.plans} == {0}
    world.assert_idle()


def test_time_without_work_counts_as_no_slowness() -> None:
    """An answer is cancelled, the next request comes ten seconds later: the gap is in no mode's speed."""
    pace = StepPace(mode="run_ahead")
    pace.note(1, 1, 1_000, 10_000, busy=True)
    pace.note(2, 1, 1_000, 11_000, busy=True)
    pace.on_planned(10_011_000)
    pace.note(3, 1, 1_000, 10_012_500, busy=True)
    pace.on_planned(10_012_500)  # by the result itself, as in single
    pace.note(4, 1, 1_000, 10_014_500, busy=True)
    assert (pace.steps, pace.us, pace.took_us) == (2, 3_000, 2_000)
