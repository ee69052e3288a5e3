"""Results of the load client as files: written and read, compared, drawn; and the flags that make them."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench import document, flags, plot
from loadtest.bench.command import main
from loadtest.bench.compare import compare, differences, rows
from loadtest.bench.figures import figures
from loadtest.bench.machine import commit
from loadtest.bench.page import page
from loadtest.bench.progress import Progress
from loadtest.bench.record import Record
from loadtest.bench.run import Point, columns
from loadtest.bench.server_side import between
from services.launcher.cli import main as headrace
from shared.errors import BadRequest

MS = 1_000


def made(label: str, times: int = 1) -> document.Result:
    """Two requests of three tokens in a closed loop and at a rate; `times` as slow."""
    result = document.document(label, {"workload": "random", "seed": 0}, {"transport": "http"})
    for point in (
        {"request_rate": None, "max_concurrency": 2},
        {"request_rate": 4.0, "max_concurrency": None},
    ):
        records = []
        for number in range(2):
            record = Record("short", 0, number * MS)
            for at in (100, 200, 400):
                record.took("x", at * times * MS)
            record.counted(10, 3, 5)
            record.end(500 * times * MS)
            records.append(record)
        bad = Record("short", 0, 0, ended_us=MS, error="429 wait")
        run = {"figures": figures([*records, bad], 0, {}), "counted": None}
        result["runs"].append({"point": point, **run, "requests": columns([*records, bad], 0)})
    return result


def test_a_result_is_what_was_written(tmp_path: Path) -> None:
    result, path = made("one"), tmp_path / "one.json"
    document.write(result, path)
    assert document.read(path) == result == json.loads(path.read_text())
    compressed = tmp_path / "result.json.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert document.read(compressed) == result
    assert {"commit", "date", "machine", "versions", "configuration", "server"} <= result.keys()
    assert result["versions"]["numpy"]
    assert result["machine"]["cores"] >= 1


def test_files_that_are_no_results(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, why in (
        ("[", "is not JSON"),
        ("{}", "is no result of `headrace bench run"),
        ("[]", "no result"),
    ):
        path.write_text(text)
        with pytest.raises(BadRequest, match=why):
            document.read(path)
    with pytest.raises(BadRequest, match="cannot be read: No such file"):
        document.read(tmp_path / "none.json")


def test_ratios_compare_two_results() -> None:
    table = {name: rest for name, *rest in rows(made("a")["runs"][0], made("b", 2)["runs"][0])}
    assert table["median_ttft_ms"] == [100.0, 200.0, 2.0]
    assert table["output_throughput"] == pytest.approx([12.0, 6.0, 0.5])
    assert table["completed"] == [2, 2, 1.0]
    assert "request_goodput" not in table


def test_comparison_names_what_makes_it_unfair() -> None:
    one, other = made("a"), made("b")
    assert differences(one, other) == []
    other["configuration"]["seed"] = 1
    other["machine"] = {**other["machine"], "cpu": "another", "load_average": [9, 9, 9]}
    other["runs"][1]["point"] = {"request_rate": 8.0, "max_concurrency": None}
    found = differences(one, other)
    assert found[0] == "seed differs: 0 and 1"
    assert found[1].startswith("machine differs: cpu ")
    assert found[2:] == ["the points of the sweeps differ"]
    text = compare(one, other)
    assert text.splitlines()[0] == "warning: seed differs: 0 and 1"
    assert "concurrency 2 (run 1)" in text
    other["runs"].pop()
    with pytest.raises(BadRequest, match="a has 2 runs, b 1: compare results of the same sweep"):
        compare(one, other)


def test_plot_has_the_samples_of_the_run() -> None:
    result = made("a")
    run = result["runs"][0]
    assert plot.samples_ms(run, "ttft") == [100, 100]
    assert plot.samples_ms(run, "itl") == [100, 100, 200, 200]
    assert plot.samples_ms(run, "e2el") == [400, 400]
    assert plot.in_flight(run) == [(0.0, 1.0), (0.0, 2.0), (0.001, 1.0), (0.001, 2.0), (0.5, 1.0), (0.5, 0.0)]
    assert plot.tokens_by_second(made("b", 4)["runs"][0]) == [(0.0, 4.0), (1.0, 2.0)]
    assert plot.curve(result, "p99_ttft_ms") == [(12.0, 100.0), (12.0, 100.0)]


def test_commands_read_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, times in (("a", 1), ("b", 2)):
        document.write(made(name, times), tmp_path / f"{name}.json")
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert headrace(["bench", "compare", *files]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines()[:12] if x.startswith("output_throughput"))
    assert line.split() == ["output_throughput", "12.000", "6.000", "0.500"]
    assert main(["plot", *files, "--out", str(tmp_path / "plots")]) == 0
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {
        "report.html",
        "cdf.png",
        "curve.png",
        *(f"timeline_{n}_{i}.png" for n in ("1_a", "2_b") for i in (1, 2)),
    }
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (tmp_path / "plots").glob("*.png"))
    assert main(["compare", files[0], str(tmp_path)]) == 1
    assert "cannot be read: Is a directory" in capsys.readouterr().err


def test_the_page_has_everything_in_it(tmp_path: Path) -> None:
    picture = tmp_path / "cdf.png"
    picture.write_bytes(b"png")
    text = page([made("<a>"), made("b")], [picture])
    assert "<h1>&lt;a&gt; and b</h1>" in text
    assert 'src="data:image/png;base64,cG5n"' in text
    assert text.count("Serving Benchmark Result") == 4
    assert "concurrency 2 (run 1)" in text  # the comparison
    assert not re.search(r"https?:|<script|<link", text)


def given(*words: str) -> argparse.Namespace:
    return flags.parser().parse_args(["run", *words])


def test_a_sweep_over_all_pairs() -> None:
    assert flags.points(given("--request-rate", "1,2.5", "--max-concurrency", "4,8")) == [
        Point(1, 4), Point(1, 8), Point(2.5, 4), Point(2.5, 8)
    ]  # fmt: skip
    assert [point.name for point in flags.points(given())] == ["all at once"]
    assert [p.name for p in flags.points(given("--request-rate", "2", "--max-concurrency", "4"))] == [
        "2 req/s, concurrency 4"
    ]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--request-rate", "fast"), "--request-rate takes a number"),
        (("--request-rate", "0"), "are above 0"),
        (("--request-rate", "nan"), "--request-rate takes numbers"),
        (("--burstiness", "0"), "are above 0"),
        (("--max-concurrency", "-1"), "are above 0"),
        (("--token-ids", "9:3"), "--token-ids takes FIRST:LAST"),
        (("--per-client", "-1"), "--per-client is 1 or more"),
        (("--num-prompts", "0"), "--num-prompts and --block-tokens are 1 or more"),
        (("--block-tokens", "0"), "--num-prompts and --block-tokens are 1 or more"),
        (("--counts", "http://a"), "--counts takes the nats-server"),
        (("--extra-body", "{"), "--extra-body is not JSON"),
        (("--extra-body", "[]"), "--extra-body takes a JSON object"),
    ],
)
def test_flags_that_make_no_sense(words: tuple[str, ...], why: str) -> None:
    parsed = given(*words)
    with pytest.raises(BadRequest, match=why):
        _ = (flags.points(parsed), flags.asked(parsed), flags.options(parsed))


def test_the_configuration_is_the_load_and_not_the_place() -> None:
    place = ("--url", "http://a", "--counts", "nats://u:p@b:4222")
    one = flags.configuration(given(*place, "--json", "a.json", "--key", "secret"))
    assert one == flags.configuration(given("--url", "nats://u:p@b:4222", "--label", "b"))
    assert one != flags.configuration(given("--seed", "1"))
    assert flags.configuration(given("--trace", "/data/azure.csv"))["trace"] == "azure.csv"
    assert flags.shown_url("nats://u:p@b:4222") == "nats://b:4222"
    json.dumps(one)


def test_a_goodput_that_is_wrong_ends_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", "unix:/none", "--goodput", "itl:5"]) == 1
    assert "--goodput takes ttft, tpot, e2el" in capsys.readouterr().err


def test_counters_between_two_statuses_are_their_difference() -> None:
    names = ("generated", "prefilled", "prefix_hits", "preemptions", "recomputed")
    before, after = dict.fromkeys(names, 10), dict.fromkeys(names, 10)
    after |= {"prefilled": 210, "recomputed": 15}
    counted: dict[str, Any] | None = between(before, after)
    assert counted is not None
    assert (counted["prefilled"], counted["recomputed"], counted["recompute_overhead_pct"]) == (200, 5, 2.5)
    assert between(None, after) is None


def test_the_line_of_a_run_that_goes_on() -> None:
    progress = Progress("8 req/s", 4, io.StringIO())
    record = Record("", 0, usage=(5, 30), ended_us=1)
    progress.ended(record)
    assert progress.line(2.0) == "8 req/s █████··············· 1/4  0.5 req/s, 15 tok/s  2 s"
    progress.ended(Record("", 0, error="x"))
    assert "2/4, 1 failed" in progress.line(2.0)


def test_the_commit_of_a_source_tree() -> None:
    found = commit()
    assert found is None or (12 <= len(found) <= 13 and int(found.rstrip("+"), 16) >= 0)
