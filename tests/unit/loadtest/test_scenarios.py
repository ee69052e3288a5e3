"""The simulator bench: what its workloads are, and that its tables can be made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.scenarios import grid
from loadtest.scenarios.__main__ import main
from loadtest.scenarios.definitions import SCENARIOS, Options
from loadtest.scenarios.extras import fairness
from loadtest.scenarios.synthetic import batch
from loadtest.scenarios.traces import AZURE_SAMPLE, MOONCAKE_SAMPLE, Cut, azure, mooncake
from loadtest.simulator.engine import Machine
from loadtest.simulator.readers import Record
from loadtest.simulator.report import steady
from loadtest.simulator.requests import SimRequest, Workload
from loadtest.simulator.world import FIRST_US, Setup, World
from shared.messages import ints
from shared.step_model import StepModel


def prompt_of(asked: SimRequest) -> list[int]:
    return list(asked.prompt() if callable(asked.prompt) else asked.prompt)


def test_azure_sample_is_read() -> None:
    workload = azure(AZURE_SAMPLE, Cut())
    assert len(workload.requests) == 2867
    first, second = workload.requests[:2]
    assert (first.arrival_us, len(prompt_of(first)), first.output_tokens) == (0, 374, 44)
    assert (second.arrival_us, len(prompt_of(second)), second.output_tokens) == (4_314_579, 396, 109)
    assert workload.requests[-1].arrival_us < 600_000_000
    assert prompt_of(first)[0] != prompt_of(second)[0]  # no prefix is shared


def test_a_cut_is_shorter_and_faster() -> None:
    whole = azure(AZURE_SAMPLE, Cut(minutes=2))
    fast = azure(AZURE_SAMPLE, Cut(minutes=2, speed=4.0, classes=("interactive", "batch")))
    assert 100 < len(whole.requests) == len(fast.requests) < 2867
    assert fast.requests[1].arrival_us == 4_314_579 // 4
    assert {asked.slo_class for asked in fast.requests[::2]} == {"batch"}


def test_the_mooncake_sample_shares_blocks_of_512_tokens() -> None:
    workload = mooncake(MOONCAKE_SAMPLE, Cut())
    assert len(workload.requests) == 150
    one, other = (prompt_of(asked) for asked in workload.requests[:2])
    assert (len(one), len(other)) == (6_758, 7_322)
    assert one[:512] == other[:512] == [0] * 512
    assert (one[512], other[512], one[-1]) == (1, 14, 13)


def test_a_steady_batch_is_measured_between_first_and_last_tokens() -> None:
    machine = Machine(StepModel(weights_us=10_000, token_ns=0), hop=SCENARIOS["host_64"].machine.hop)
    world = World(Setup((machine,)), batch(4, 16, 50))
    world.run()
    row = steady(world)
    assert row["steady_tok_s"] == pytest.approx(400, rel=0.03)  # 4 rows every 10 ms
    assert row["steady_idle_pct"] == 0


def test_the_service_of_two_clients() -> None:
    setup = Setup((Machine(StepModel(weights_us=1_000, token_ns=0), blocks=10),), until_us=3_000_000)
    world = World(setup, Workload(()))
    for tenant, first_us, last_us in (("a", 1_000_000, 2_000_000), ("b", 2_000_000, 3_000_000)):
        asked = SimRequest(tenant, 0, ints([1] * 100), 11, 11, tenant=tenant)
        record = Record(asked, FIRST_US, FIRST_US + first_us, FIRST_US + last_us, tokens=11)
        record.prompt_tokens = 100
        world.readers.records.append(record)
    made = fairness(world)
    # at 2 s less a sample: a has 100 + 2 * (1 + 9), b nothing; at 2 s b has its input, too
    assert (made["served_a"], made["served_b"], made["gap_most"]) == (122, 122, 120)
    assert made["gap_bound"] == 2 * max(100, 2 * 160)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_seed_gives_the_same_requests_in_order(name: str) -> None:
    options = Options(seed=3)
    one, other = (SCENARIOS[name].workload(options).requests for _ in range(2))
    assert [prompt_of(asked)[:1] for asked in one] == [prompt_of(asked)[:1] for asked in other]
    assert [(a.request, a.arrival_us, a.output_tokens) for a in one] == [
        (a.request, a.arrival_us, a.output_tokens) for a in other
    ]
    assert [a.arrival_us for a in one] == sorted(a.arrival_us for a in one)
    assert len({a.request for a in one}) == len(one)


def test_the_grid_has_more_than_40_points() -> None:
    assert len(grid.ROWS) * len(grid.CONTEXTS) * len(grid.HOPS_US) >= 40


def test_run_ahead_at_one_point_of_the_grid() -> None:
    row = grid.point_row((16, 256, 1_000), ("single", "run_ahead"))
    assert row["of_single"]["single"] == 1
    assert row["of_single"]["run_ahead"] == pytest.approx(row["ideal"], rel=0.02)
    assert row["idle_pct"]["run_ahead"] < 2 < row["idle_pct"]["single"]


def test_the_command_writes_the_same_table_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "other"):
        args = ["azure", "--arms", "mixed", "--minutes", "0.2", "--json", str(tmp_path / f"{name}.json")]
        assert main(args) == 0
    one, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "other"))
    assert one["rows"] == other["rows"]
    assert one["rows"][0]["figures"]["served"] == len(azure(AZURE_SAMPLE, Cut(minutes=0.2)).requests)
    assert "tmp" not in one["command"]  # folders of a machine stay private
    text = (tmp_path / "one.md").read_text()
    assert "| mixed |" in text
    assert text in capsys.readouterr().out
