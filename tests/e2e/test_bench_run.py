"""`headrace bench run` as people run it, against a known server in a process of its own.

How near its times are depends on the machine; that they enclose the server's does not. Exact figures:
tests/contract/test_bench_truth.py, on a virtual clock.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.bench.known import MODEL, Latency
from support.bench.truth import known_server, truth_of

from loadtest.bench.document import read
from services.launcher.cli import main as headrace
from services.launcher.nats_server import NatsServer
from services.launcher.session import RunState

LATENCY = Latency(first_us=20_000, gap_us=5_000)


@pytest.mark.parametrize("kind", ["http", "nats", "note"])
def test_sweep_measures_each_rate(
    kind: str, tmp_path: Path, nats_server: NatsServer, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    url = f"unix:{tmp_path}/known.sock" if kind == "http" else nats_server.url
    where = {"http": ("--url", url), "nats": ("--nats-url", url), "note": ("--fleet", "other")}[kind]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # with the note of a fleet
    note = RunState(pid=os.getpid(), fleet="other", nats_url=url, monitoring_url="", models=[MODEL])
    note.write(tmp_path / "headrace" / "other.json")
    served, out = tmp_path / "served.json", tmp_path / "run.json"
    command = [
        "bench", "run", *where, "--model", MODEL, "--num-prompts", "20", "--num-warmups", "2",
        "--input-len", "7", "--output-len", "5", "--request-rate", "100,inf", "--max-concurrency", "4",
        "--goodput", "ttft:60000", "--json", str(out),
    ]  # fmt: skip
    with known_server(url, LATENCY, served):
        assert headrace(command) == 0
    result, printed = read(out), capsys.readouterr().out
    assert printed.count("============ Serving Benchmark Result ============") == 2
    assert result["server"]["transport"] == ("http" if kind == "http" else "nats")
    open_loop, closed_loop = (run["figures"] for run in result["runs"])
    stamps = json.loads(served.read_text())
    assert [len(stamps), *(len(each["pieces_us"]) for each in stamps[2:])] == [42, *[5] * 40]
    for figures, part in ((open_loop, stamps[2:22]), (closed_loop, stamps[22:])):
        assert (figures["completed"], figures["failed"], figures["uncounted_requests"]) == (20, 0, 0)
        assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (140, 100)
        assert figures["cached_tokens"] == 20 * 3
        assert figures["max_concurrent_requests"] <= 4
        assert figures["request_goodput"] == figures["request_throughput"]
        truth = truth_of(part, {"ttft": 6e4, "tpot": 6e4})
        assert figures["mean_ttft_ms"] >= truth["mean_ttft_ms"]
        assert figures["output_throughput"] <= truth["output_throughput"]
    assert closed_loop["max_concurrent_requests"] == 4
    assert [run["point"]["request_rate"] for run in result["runs"]] == [100.0, None]


def test_a_server_that_refuses_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"unix:{tmp_path}/known.sock"
    refused = '{"max_tokens": "no number"}'
    with known_server(url, LATENCY, tmp_path / "served.json"):
        words = ["--url", url, "--num-prompts", "3", "--extra-body", refused]
        assert headrace(["bench", "run", *words, "--num-warmups", "1"]) == 1
        assert "every request of the warm-up failed" in capsys.readouterr().err
        assert headrace(["bench", "run", *words]) == 1
    assert "3 x the connection ended before the answer did" in capsys.readouterr().out
