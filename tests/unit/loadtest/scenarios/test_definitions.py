"""What the scheduler promises of its policies, on the virtual machine: each of them against a baseline."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from loadtest.scenarios import grid
from loadtest.scenarios.definitions import SCENARIOS, Options
from loadtest.scenarios.run import run_arm
from loadtest.simulator.requests import Workload
from services.scheduler.state.requests import DEFAULT_CLASSES, parse

MODES = (*grid.MODES, "auto")


# The requests of a run: of B so many that `reserve` is worse; of the others fewer.
FEW = {"B": 450, "D": 200, "E": 200, "F": 200}


@cache
def arm_of(scenario: str, name: str, most: int = 0) -> dict[str, float]:
    """A run of one seed, with `most` of its requests; 0: as in FEW, or all. `recompute` is the same in B, D
    and E, which differ in the tiers that it lacks."""
    most = most or FEW.get(scenario, 0)
    if (name, scenario) in (("recompute", "D"), ("recompute", "E")):
        return arm_of("B", name, most)
    made, arms = replace(SCENARIOS[scenario], seeds=1), {arm.name: arm for arm in SCENARIOS[scenario].arms}
    if most:
        whole = made.workload
        made = replace(made, workload=lambda options: Workload(whole(options).requests[:most]))
    if scenario == "fairness":
        made = replace(made, until_us=15_000_000)
    return run_arm(made, arms[name], Options(minutes=1))


@pytest.mark.parametrize("point", [(1, 256, 0), (16, 1_024, 200), (64, 256, 5_000), (64, 4_096, 1_000)])
def test_no_mode_that_auto_takes_is_a_loss(point: grid.Point) -> None:
    row = grid.point_row(point, MODES)
    assert row["of_single"]["auto"] >= 0.98
    assert row["of_best"]["auto"] >= 0.97
    assert row["steps_pct"]["auto"]["run_ahead"] > 90
    assert row["of_single"]["run_ahead"] >= 0.95 * row["ideal"]
    if 2 * row["hop_us"] < 0.8 * row["step_us"]:
        assert row["idle_pct"]["auto"] < 2
    assert row["wasted_rows_pct"]["auto"] <= 100 / row["answer_tokens"] + 0.1


def test_a_batch_does_not_delay_a_burst() -> None:
    """The bound of one request: the step that runs, and its own; more if it comes just before the end."""
    one, two = arm_of("beside_batch", "window 1"), arm_of("beside_batch", "window 2")
    assert max(one["burst_p99_ratio"], two["burst_p99_ratio"]) < 1.05
    assert one["one_p99_ratio"] < 2.05
    assert two["one_p99_ratio"] < 2.25
    assert two["tok_s_beside"] > 1.04 * one["tok_s_beside"]


def test_two_batches_hide_the_host_at_256_rows() -> None:
    single = arm_of("host_256", "single")["steady_tok_s"]
    assert arm_of("host_256", "two_batch")["steady_tok_s"] >= 1.2 * single
    assert arm_of("host_256", "auto")["steady_tok_s"] >= 1.2 * single


def test_auto_takes_single_at_64_rows() -> None:
    auto, two_batch = arm_of("host_64", "auto"), arm_of("host_64", "two_batch")
    assert auto["single_pct"] > 90
    assert two_batch["steady_tok_s"] < auto["steady_tok_s"]


def test_two_batches_fill_two_stages() -> None:
    single = arm_of("stages_256", "single")["steady_tok_s"]
    assert arm_of("stages_256", "two_batch")["steady_tok_s"] >= 1.5 * single
    assert arm_of("stages_256", "auto")["steady_tok_s"] >= 1.5 * single


def test_device_fed_rows_run_ahead() -> None:
    auto, two_batch = arm_of("device_256", "auto"), arm_of("device_256", "two_batch")
    assert auto["run_ahead_pct"] > 90
    assert two_batch["steady_tok_s"] < auto["steady_tok_s"]


def test_a_chunk_budget_keeps_the_time_between_tokens() -> None:
    bound_ms = parse(DEFAULT_CLASSES)[0].tbt_us / 1_000
    assert arm_of("long_prompt", "mixed")["itl_ms_p99"] <= 1.1 * bound_ms
    assert arm_of("long_prompt", "mixed, steps of up to 8192")["itl_ms_p99"] <= 1.1 * bound_ms
    assert arm_of("long_prompt", "whole prompts")["itl_ms_p99"] > 1.1 * bound_ms


def test_two_backlogged_clients_are_served_alike() -> None:
    vtc, fcfs = arm_of("fairness", "vtc"), arm_of("fairness", "fcfs")
    assert vtc["gap_most"] <= vtc["gap_bound"] < fcfs["gap_most"]


def test_continuous_batching_beats_static() -> None:
    static, mixed = arm_of("azure", "static"), arm_of("azure", "mixed")
    assert mixed["served"] == static["served"]
    assert mixed["ttft_ms_p50"] * 10 < static["ttft_ms_p50"]
    assert mixed["in_slo_pct"] > static["in_slo_pct"]


def test_memory_on_demand_serves_more_within_the_bounds() -> None:
    reserve, on_demand = arm_of("B", "reserve"), arm_of("B", "recompute")
    assert on_demand["in_slo_pct"] > 1.2 * reserve["in_slo_pct"]
    assert on_demand["failed"] == reserve["failed"] == 0


def test_swap_makes_no_difference_where_memory_is_enough() -> None:
    reserve, on_demand = arm_of("F", "reserve"), arm_of("F", "recompute")
    assert reserve["preemptions"] == on_demand["preemptions"] == 0
    assert on_demand["output_tok_s"] == pytest.approx(reserve["output_tok_s"], rel=0.01)


def test_a_restore_takes_the_place_of_computing_again() -> None:
    """C: batch jobs that want twice the memory, and interactive requests that take it from them. The p99 of
    300 first tokens is that of three requests, and a tie: of nine seeds 3.76 and 3.73 s, of this one 3.51 and
    3.58."""
    again, tiered = arm_of("C", "recompute"), arm_of("C", "tiered")
    assert again["recomputed_pct"] > 10
    assert tiered["recomputed_pct"] <= 1
    assert tiered["done_s_batch"] <= 0.97 * again["done_s_batch"]
    assert tiered["ttft_ms_interactive_p99"] <= 1.05 * again["ttft_ms_interactive_p99"]
    assert tiered["served"] == again["served"]


def test_against_recompute_as_in_vllm_a_quarter_of_the_time_is_saved() -> None:
    """C again. Without room for growth the latest job is computed again and again while others decode."""
    again, tiered = arm_of("C", "recompute, vLLM"), arm_of("C", "tiered")
    assert tiered["makespan_s"] <= 0.75 * again["makespan_s"]
    assert tiered["ttft_ms_interactive_p99"] <= again["ttft_ms_interactive_p99"]
    assert tiered["served"] == again["served"] == tiered["requests"]
    assert again["recomputed_pct"] > 40


@pytest.mark.parametrize("scenario", ["D", "E"])
def test_a_small_l1_or_a_slow_link_costs_nothing(scenario: str) -> None:
    again, tiered = arm_of(scenario, "recompute"), arm_of(scenario, "tiered")
    assert tiered["in_slo_pct"] >= again["in_slo_pct"]
    assert tiered["moved_gb"] <= arm_of(scenario, "swap")["moved_gb"]


def test_tiers_cost_nothing_where_memory_is_enough() -> None:
    again, tiered = arm_of("F", "recompute"), arm_of("F", "tiered")
    assert tiered["makespan_s"] == pytest.approx(again["makespan_s"], rel=0.01)
    assert tiered["ttft_ms_p99"] == pytest.approx(again["ttft_ms_p99"], rel=0.01)
    assert tiered["preemptions"] == again["preemptions"] == 0
