"""The virtual world against times computed by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from loadtest.simulator.engine import Machine
from loadtest.simulator.hops import Hop, Way
from loadtest.simulator.report import Bounds, figures, percentile
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.world import READER_HOP_US, Setup, World, WorldStopped
from services.scheduler.state.state import Limits
from shared.messages import ExecReset
from shared.step_model import H200_8B, StepModel

FLAT = StepModel(weights_us=5_000, token_ns=0)  # any step takes 5 ms
MS = 1_000


def request(number: int, output: int, **more: int) -> SimRequest:
    values = {"arrival_us": 0, "max_tokens": 64, **more}
    return SimRequest(f"r{number}", prompt=plain_prompt(number, 32), output_tokens=output, **values)  # type: ignore[arg-type]  # test shorthand


def run(window: int, *requests: SimRequest, clients: int = 0, **machine: object) -> World:
    values = {"model": FLAT, "hop": Hop(1 * MS), **machine}
    world = World(
        Setup((Machine(**values),), Limits(window=window)),  # type: ignore[arg-type]  # test shorthand
        Workload(requests, clients),
    )
    world.run()
    return world


def test_one_request_with_one_step_in_flight() -> None:
    world = run(1, request(1, output=3))
    [record] = world.readers.records
    assert (record.tokens, record.reason, record.prompt_tokens) == (3, "stop", 32)
    assert record.ttft_us == 7 * MS  # there, the step, back
    assert world.readers.gaps_us.tolist() == [7 * MS, 7 * MS]
    assert (record.tpot_us, record.stall_us, record.e2e_us) == (7 * MS, 7 * MS, 21 * MS)
    totals = world.engines["e0"].totals
    assert (totals.steps, totals.wasted_rows, totals.busy_us) == (3, 0, 15 * MS)
    assert totals.idle_us == 3 * 2 * MS - 1 * MS  # before the first step one hop alone


def test_a_second_step_in_flight_hides_the_hops() -> None:
    world = run(2, request(1, output=3))
    [record] = world.readers.records
    assert record.ttft_us == 7 * MS
    assert world.readers.gaps_us.tolist() == [5 * MS, 5 * MS]
    totals = world.engines["e0"].totals
    assert (totals.steps, totals.wasted_rows, totals.prefill_tokens) == (4, 1, 32)


def test_max_tokens_ends_without_a_wasted_row() -> None:
    world = run(2, request(1, output=64, max_tokens=4))
    [record] = world.readers.records
    assert (record.tokens, record.reason) == (4, "length")
    assert world.engines["e0"].totals.wasted_rows == 0


def test_choices_have_a_record_each() -> None:
    world = run(2, request(1, output=3, n=3))
    assert [(record.tokens, record.reason) for record in world.readers.records] == [(3, "stop")] * 3
    assert world.scheduler.is_idle


def test_a_client_of_a_closed_loop_sends_the_next_when_the_last_has_ended() -> None:
    world = run(1, *[request(number, output=2) for number in range(1, 7)], clients=1)
    starts = [record.arrival_us for record in world.readers.records]
    assert [b - a for a, b in pairwise(starts)] == [14 * MS + READER_HOP_US] * 5


def test_no_more_requests_are_live_than_there_are_clients() -> None:
    records = run(2, *[request(number, output=2) for number in range(1, 20)], clients=3).readers.records
    assert len(records) == 19
    for record in records:
        live = [r for r in records if r.arrival_us <= record.arrival_us < r.ended_us]
        assert len(live) == 3


def test_slots_limit_what_runs_and_the_rest_waits() -> None:
    world = run(1, request(1, output=2), request(2, output=2), slots=1)
    first, second = world.readers.records
    assert (first.ttft_us, second.ttft_us) == (7 * MS, 21 * MS)


def test_request_that_can_never_fit_is_rejected() -> None:
    world = run(1, request(1, output=2), request(2, output=2, max_tokens=10_000), max_context=1_000)
    row = figures(world)
    assert (row["requests"], row["served"], row["rejected"]) == (2, 1, 1)
    assert [record.code for record in world.readers.records if not record.served] == [400]


def test_a_late_request_is_ended_by_a_tick() -> None:
    world = run(1, request(1, output=60, timeout_us=100 * MS))
    [record] = world.readers.records
    assert (record.reason, record.code, record.served) == ("error", 408, False)
    assert record.tokens in (14, 28)  # ticks come every 100 ms beside steps of 7 ms


def test_bounds_decide_what_is_good() -> None:
    world = run(1, request(1, output=3))
    assert figures(world, Bounds(7 * MS, 7 * MS, 7 * MS))["in_slo_pct"] == 100
    for bounds in (Bounds(ttft_us=6_999), Bounds(tpot_us=6_999), Bounds(stall_us=6_999)):
        assert figures(world, bounds)["in_slo_pct"] == 0


def test_world_gives_the_same_table_for_a_seed() -> None:
    def table(seed: int) -> dict[str, float]:
        rng = random.Random(7)
        requests = tuple(
            request(i, output=rng.randrange(1, 60), arrival_us=i * rng.randrange(3 * MS))
            for i in range(1, 60)
        )
        machine = Machine(H200_8B, blocks=64, hop=Hop(300, 200, stall_pm=20, stall_us=10 * MS))
        world = World(Setup((machine, machine), Limits(window=2), seed), Workload(requests))
        world.run()
        return figures(world)

    assert table(1) == table(1) != table(2)
    assert table(1)["served"] == 59


def test_a_reset_of_a_virtual_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Setup((Machine(FLAT),)), Workload((request(1, output=3),)))
    real = world.scheduler.handle

    def handle(event: object, now_us: int) -> object:
        world.scheduler.state.send("executor.e0", ExecReset(exec_epoch=1, why="a test"))
        return real(event, now_us)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(world.scheduler, "handle", handle)
    with pytest.raises(WorldStopped, match="resets a virtual engine: a test"):
        world.run()


def test_a_way_keeps_the_order() -> None:
    way = Way(Hop(100, jitter_us=50, stall_pm=500, stall_us=10_000), random.Random(1))
    arrivals = [way.arrival_us(sent) for sent in range(0, 20_000, 100)]
    assert arrivals == sorted(arrivals)
    assert min(at - sent for at, sent in zip(arrivals, range(0, 20_000, 100), strict=True)) >= 100
    assert max(at - sent for at, sent in zip(arrivals, range(0, 20_000, 100), strict=True)) <= 10_150


def test_percentiles_are_by_nearest_rank() -> None:
    values = [15, 20, 35, 40, 50]
    assert [percentile(values, p) for p in (5, 30, 40, 50, 100)] == [15, 20, 20, 35, 50]
    assert percentile([], 50) == 0
