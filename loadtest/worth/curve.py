"""From how many tokens on is bringing KV back cheaper than computing it again? Two prompts of one length on a
device that holds one of them: each is computed once, and brought back from L1 once."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from loadtest.fleet import MODEL
from loadtest.real.report import Report
from loadtest.real.served import Body, served
from loadtest.sim import plots
from loadtest.worth.arms import BLOCK_TOKENS, Answer, Sizes, ask, environments

LENGTHS = (64, 128, 256, 512, 1_024, 2_048, 4_096, 8_000)
TURNS = 3  # the first computes, the others bring back
SPARE_BLOCKS = 3


async def run(lengths: Sequence[int], threads: int, command: str) -> Report:
    """The table of all lengths."""
    report = Report(
        "kv_break_even",
        "Bringing KV back from L1, or computing it again",
        f"SmolLM2-135M-Instruct in float32, {threads} threads. Two prompts of each length, the device holds "
        "one: each is computed once and brought back twice. Times from sending to the first text, medians.",
        command,
        ["tokens", "computed ms", "brought back ms", "cached tokens", "computed / brought back"],
    )
    runs = {}
    for tokens in lengths:
        cold, back = await _length(tokens, threads)
        runs[tokens] = {"cold": [asdict(a) for a in cold], "back": [asdict(a) for a in back]}
        cold_ms, back_ms = (statistics.median(a.ttft_ms for a in answers) for answers in (cold, back))
        cached = min(answer.cached_tokens for answer in back)
        report.add([tokens, f"{cold_ms:.1f}", f"{back_ms:.1f}", cached, f"{cold_ms / back_ms:.2f}"])
    report.data["runs"] = runs
    return report


def draw(report: Report, path: Path) -> None:
    """Both times by the length of the prompt."""
    series = {
        name: [(float(row[0]), float(row[column])) for row in report.rows]
        for name, column in (("computed again", 1), ("brought back from L1", 2))
    }
    plots.curves(report.title, series, ("tokens", "ms to the first text"), path)


async def _length(tokens: int, threads: int) -> tuple[list[Answer], list[Answer]]:
    pool = tokens + SPARE_BLOCKS * BLOCK_TOKENS
    sizes = Sizes(pool, 3 * tokens + 40 * BLOCK_TOKENS, 1, threads)
    async with served(environments(sizes, "")["L1"]) as fleet:
        rng = random.Random(tokens)
        prompts = [[rng.randrange(300, 40_000) for _ in range(tokens)] for _ in range(2)]
        answers = [
            await ask(fleet, _body(prompt, f"curve-{tokens}-{turn}-{number}"))
            for turn in range(TURNS)
            for number, prompt in enumerate(prompts)
        ]
    return answers[:2], answers[2:]


def _body(prompt: list[int], request: str) -> Body:
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True,
        "request_id": request,
    }  # fmt: skip
