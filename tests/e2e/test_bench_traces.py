"""The public traces replayed over NATS: the server finds in its cache what the trace repeats, to the token.
At full length on the simulated engine.

The later of two requests that follow each other closely may reach the scheduler first: then it computes the
blocks, and the earlier request hits them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.running_up import StartUp, Up, running_up

from loadtest.fleet import MODEL
from services.launcher.cli import main as headrace

SIM = (
    "--sim step=200 --step-tokens 8192 --max-context 131072 --kv-blocks 200000 --max-waiting-tokens 10000000"
)
CASES = (
    "mooncake --num-prompts 40 --speed 20 --num-warmups 2",
    "azure --num-prompts 40 --minutes 1 --speed 10",
)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(tmp_path_factory.mktemp("traces"), *SIM.split()) as up:
        yield up


@pytest.mark.parametrize("case", CASES)
def test_hits_are_what_the_trace_repeats(
    case: str, up: Up, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    workload, *flags = case.split()
    server = ["--url", up.nats_url, "--model", MODEL]
    assert headrace(["bench", "run", *server, "--workload", workload, *flags, "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    figures: dict[str, Any] = run["figures"]
    assert figures["completed"] == int(flags[flags.index("--num-prompts") + 1])
    assert figures["cached_tokens"] == figures["repeated_tokens"] == sum(run["requests"]["repeated_tokens"])
    assert figures["requests_below_repeats"] == figures["requests_above_repeats"]
    assert (figures["repeated_tokens"] > 0) == (workload == "mooncake")
    report = f"Prompt tokens that the trace repeats:    {figures['repeated_tokens']}"
    assert report in capsys.readouterr().out


def test_tokens_by_tier_are_counted_beside_http(
    start_up: StartUp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of two blocks that all share and one of their own, one after the other."""
    up, out = start_up("--http", "127.0.0.1:0"), tmp_path / "run.json"
    server = ["--url", up.http_url, "--counts", up.nats_url]
    load = ["--workload", "shared-prefix", "--prefixes", "1", "--prefix-len", "32", "--output-len", "2"]
    command = ["bench", "run", *server, *load, "--input-len", "16", "--num-prompts", "5"]
    assert headrace([*command, "--max-concurrency", "1", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    (run,) = result["runs"]
    assert result["server"]["transport"] == "http"
    assert run["figures"]["cached_tokens"] == run["counted"]["prefix_hits"] == 4 * 32
    tiers = {name: run["counted"][name] for name in ("l1_hit_blocks", "l2_hit_blocks", "recomputed")}
    assert tiers == {"l1_hit_blocks": 0, "l2_hit_blocks": 0, "recomputed": 0}
    printed = capsys.readouterr().out
    assert "Blocks from L1:                          0" in printed
    assert headrace(["bench", "compare", str(out), str(out)]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("prefix_hits"))
    assert row.split() == ["prefix_hits", "128", "128", "1.000"]
