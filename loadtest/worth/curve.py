"""From how many tokens on is bringing KV back cheaper than computing it again? Prompts of one length on a
device that holds one of them: each is computed once, and brought back from L1 twice."""

from __future__ import annotations

import asyncio
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

LENGTHS = (64, 128, 256, 512, 1_024, 2_048, 4_096, 8_000)  # the model's context is 8,192
TURNS = 3  # the first computes, the others bring back
SHORT_TOKENS, SHORT_PROMPTS, LONG_PROMPTS = 1_024, 6, 2
SPARE_BLOCKS = 3


async def run(lengths: Sequence[int], threads: int, command: str) -> Report:
    """The table of all lengths, or of those that ended before Ctrl-C."""
    report = Report(
        "kv_break_even",
        "Bringing KV back from L1, or computing it again",
        f"SmolLM2-135M-Instruct in float32, {threads} threads, up to its context of 8,192 tokens. The device "
        f"holds one prompt of each length: {SHORT_PROMPTS} of them up to {SHORT_TOKENS:,} tokens and "
        f"{LONG_PROMPTS} longer ones are computed once and brought back twice. Times from sending to the "
        "first text, medians. Where *cached tokens* is 0 nothing was brought: a prompt that lacks three "
        "blocks waits for no tier.",
        command,
        [
            "tokens",
            "computed ms",
            "brought back ms",
            "cached tokens",
            "were brought",
            "computed / brought back",
        ],
    )
    runs = report.data["runs"] = {}
    try:
        for tokens in lengths:
            cold, back = await _length(tokens, threads)
            runs[tokens] = {"cold": [asdict(a) for a in cold], "back": [asdict(a) for a in back]}
            cold_ms, back_ms = (statistics.median(a.ttft_ms for a in answers) for answers in (cold, back))
            cached = statistics.median_low(answer.cached_tokens for answer in back)
            came = f"{sum(answer.cached_tokens > tokens // 2 for answer in back)} of {len(back)}"
            row = [tokens, f"{cold_ms:.1f}", f"{back_ms:.1f}", cached, came, f"{cold_ms / back_ms:.2f}"]
            report.add(row)
    except asyncio.CancelledError:
        report.text += " **Stopped early.**"
    _judge(report)
    return report


def draw(report: Report, path: Path) -> None:
    """Both times by the length of the prompt."""
    series = {
        name: [(float(row[0]), float(row[column])) for row in report.rows]
        for name, column in (("computed again", 1), ("brought back from L1", 2))
    }
    if report.rows:
        plots.curves(report.title, series, ("tokens", "ms to the first text"), path)


def _judge(report: Report) -> None:
    """The shortest length from which on all were quicker when brought."""
    quicker = [int(row[0]) for row in report.rows if row[3] and float(row[2]) < float(row[1])]
    other = [int(row[0]) for row in report.rows if int(row[0]) not in quicker]
    beyond = [tokens for tokens in quicker if tokens > max(other, default=0)]
    report.data["quicker_from_tokens"] = min(beyond, default=None)
    if beyond:
        report.text += f" Quicker when brought from {min(beyond):,} tokens on."


async def _length(tokens: int, threads: int) -> tuple[list[Answer], list[Answer]]:
    short = tokens <= SHORT_TOKENS
    count = SHORT_PROMPTS if short else LONG_PROMPTS
    pool = tokens + SPARE_BLOCKS * BLOCK_TOKENS
    sizes = Sizes(pool, (count + 2) * (tokens + BLOCK_TOKENS) + 40 * BLOCK_TOKENS, 1, threads)
    async with served(environments(sizes, "")["L1"]) as fleet:
        rng = random.Random(tokens)
        prompts = [[rng.randrange(300, 40_000) for _ in range(tokens)] for _ in range(count)]
        if short:  # the first of a shape compiles its kernels; long ones are made of chunks
            await ask(fleet, _body([200, *prompts[0][1:]], f"curve-{tokens}-warm"))
        answers = [
            await ask(fleet, _body(prompt, f"curve-{tokens}-{turn}-{number}"))
            for turn in range(TURNS)
            for number, prompt in enumerate(prompts)
        ]
    return answers[:count], answers[count:]


def _body(prompt: list[int], request: str) -> Body:
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True,
        "request_id": request,
    }  # fmt: skip
