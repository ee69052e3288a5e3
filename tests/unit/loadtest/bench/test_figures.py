"""The arithmetic of the load client: from stamps to the figures of `vllm bench serve`, exactly."""

from __future__ import annotations

import pytest

from loadtest.bench.block import block
from loadtest.bench.figures import figures, keeps, most_at_once, read_goals, spread
from loadtest.bench.record import Record
from shared.errors import BadRequest

MS = 1_000


def record(intended_ms: int, sent_ms: int, chunks_ms: list[int], usage: tuple[int, int] | None) -> Record:
    made = Record("", intended_ms * MS, sent_ms * MS)
    for at in chunks_ms:
        made.took("x", at * MS)
    made.usage, made.cached_tokens = usage, usage[0] // 10 if usage else None
    made.end((chunks_ms[-1] + 5) * MS)
    return made


def failed(at_ms: int, error: str) -> Record:
    made = Record("", at_ms * MS, at_ms * MS, error=error)
    made.end((at_ms + 1) * MS)
    return made


RECORDS = [
    record(1_000, 1_000, [1_100, 1_120, 1_160], (100, 3)),
    record(1_050, 1_080, [1_250, 1_350], (200, 5)),  # sent late; 5 tokens in two pieces
    record(1_100, 1_100, [1_500], (50, 1)),
    failed(1_200, "429 overloaded"),
    record(1_995, 1_995, [2_000, 2_995], None),  # whose server counts nothing
]


def test_table_equals_one_by_hand() -> None:
    made = figures(RECORDS, 1_000 * MS, {"ttft": 200, "tpot": 30})
    expected = {
        "completed": 4,
        "failed": 1,
        "duration": 2.0,
        "total_input_tokens": 350,
        "total_output_tokens": 3 + 5 + 1 + 2,
        "request_throughput": 2.0,
        "request_goodput": 2 / 2.0,  # the first two, the one with TPOT 30, the other with TTFT 200
        "output_throughput": 5.5,
        "total_token_throughput": 180.5,
        "cached_tokens": 10 + 20 + 5,
        "uncounted_requests": 1,
        "max_concurrent_requests": 3,
        # the first second of answers, from the first sending on: 3, 5 and 1 tokens
        "max_output_tokens_per_s": 9.0,
        "mean_ttft_ms": (100 + 200 + 400 + 5) / 4,
        "median_ttft_ms": 150.0,
        "mean_tpot_ms": (30 + 25 + 995) / 3,  # of one token there is none
        "median_tpot_ms": 30.0,
        "median_itl_ms": 70.0,  # of 20, 40, 100, 995
        "mean_itl_ms": 1_155 / 4,
        "mean_e2el_ms": (160 + 300 + 400 + 1_000) / 4,
        "max_e2el_ms": 1_000.0,
        "mean_stall_ms": (40 + 100 + 995) / 3,
        "max_late_ms": 30.0,
        "mean_late_ms": 30 / 5,  # the failed one, too, was sent
    }
    assert {name: made[name] for name in expected} == pytest.approx(expected)
    assert made["errors"] == {"429 overloaded": 1}


def test_percentiles_are_linear_as_numpy_has_them() -> None:
    assert spread([i * MS for i in range(1, 101)]) == {
        "mean": 50.5,
        "median": 50.5,
        "std": pytest.approx(28.86607),
        "p90": pytest.approx(90.1),
        "p95": pytest.approx(95.05),
        "p99": pytest.approx(99.01),
        "max": 100.0,
    }
    assert set(spread([]).values()) == {None}


@pytest.mark.parametrize(
    ("goals", "kept"),
    [
        ({"ttft": 200.0}, True),
        ({"ttft": 199.9}, False),
        ({"tpot": 25.0}, True),
        ({"tpot": 24.9}, False),
        ({"e2el": 300.0}, True),
        ({"ttft": 500.0, "e2el": 299.9}, False),
    ],
)
def test_a_goal_is_kept_up_to_its_value(goals: dict[str, float], kept: bool) -> None:
    assert keeps(RECORDS[1], goals) is kept


def test_a_single_token_keeps_every_goal_per_token() -> None:
    assert keeps(RECORDS[2], {"tpot": 0.0})


def test_an_end_goes_before_a_beginning_at_the_same_moment() -> None:
    following = [record(0, 0, [10], (1, 1)), record(10, 10, [20], (1, 1)), record(15, 15, [30], (1, 1))]
    assert most_at_once(following) == 2
    assert most_at_once([]) == 0


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    silent = Record("", 0, 0)
    silent.counted(4, 1, None)
    silent.end(7 * MS)
    assert (silent.ttft_us, silent.e2el_us, silent.output_tokens, silent.tpot_us) == (7 * MS, 7 * MS, 1, None)


def test_figures_of_no_sample_are_absent() -> None:
    made = figures([failed(0, "x")], 0, {})
    assert (made["request_goodput"], made["cached_tokens"], made["mean_ttft_ms"]) == (None, None, None)
    assert made["output_throughput"] == 0


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:soon", "itl:5", "tpot:-1", "tpot:nan"])
def test_goals_that_cannot_be_read(pair: str) -> None:
    with pytest.raises(BadRequest, match="--goodput takes"):
        read_goals([pair])


def test_goals_are_read() -> None:
    assert read_goals(["ttft:500", "tpot:50.5", "e2el:9000"]) == {"ttft": 500, "tpot": 50.5, "e2el": 9000}


def test_the_block_has_the_lines_of_vllm() -> None:
    made = figures(RECORDS, 1_000 * MS, {"ttft": 200})
    point = {"request_rate": 4.0, "max_concurrency": None, "burstiness": 1.0}
    lines = block({"point": point, "figures": made, "counted": {"recompute_overhead_pct": 1.5}}).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1:3] == [f"{'Successful requests:':<40} {4:<10}", f"{'Failed requests:':<40} {1:<10}"]
    assert f"{'Request rate configured (RPS):':<40} {'4.00':<10}" in lines
    assert not [line for line in lines if line.startswith("Maximum request concurrency")]
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "---------------Inter-token Latency----------------" in lines
    assert "----------------End-to-end Latency----------------" in lines
    assert f"{'Median TTFT (ms):':<40} {'150.00':<10}" in lines
    assert f"{'Recompute overhead (%):':<40} {'1.50':<10}" in lines
    assert lines[-2:] == ["1 x 429 overloaded", "=" * 50]
    full = block({"point": point, "figures": {**made, "client_cpu_pct": 81.0}}).splitlines()
    assert full[-2] == "warning: the client was nearly full: its own work is in these latencies"


def test_hits_beside_what_a_workload_repeats() -> None:
    made = []
    for repeated, cached in ((0, 0), (32, 32), (48, 16), (16, 32), (64, None)):
        made.append(Record("", 0, repeated_tokens=repeated))
        made[-1].took("x", MS)
        made[-1].counted(100, 1, cached)
        made[-1].end(2 * MS)
    found = figures(made, 0, {})
    assert (found["cached_tokens"], found["repeated_tokens"]) == (80, 96)
    assert (found["requests_below_repeats"], found["requests_above_repeats"]) == (1, 1)
    printed = block({"point": {}, "figures": found})
    assert "Prompt tokens that the trace repeats:    96" in printed
    assert "repeated_tokens" not in figures(RECORDS, 0, {})
