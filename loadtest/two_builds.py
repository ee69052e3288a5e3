"""Measures two builds of the product in turn, each as a fleet under the same load: tokens a second.

    git worktree add /tmp/before REVISION
    python -m loadtest.two_builds --before /tmp/before --rounds 15 --out OUT -- --dtype f32
    python -m loadtest.two_builds --before /tmp/before --step-us 5000 --concurrency 32

Both fleets run all the time, and one is idle while the other is measured. The order changes with each
round; the first round only warms up. A ratio is that of one round: seconds of this build over seconds of the
build before, for the same tokens. `rounds_90` holds the middle 90 % of the rounds; `median_90` holds 90 % of
the medians of rounds that are drawn again with repetition. With `--step-us` the engine is simulated: the
time of a token is then a step's period. Flags after `--` go to both `headrace up`. The client is of this
build.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, machine, running_up

ROOT = Path(__file__).resolve().parents[1]
DRAWS = 2_000


def tokens_per_s(url: str, clients: int, requests: int, prompt: int, answer: int) -> float:
    """Output tokens a second of a closed loop. Raises SystemExit if a request failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [sys.executable, "-m", "loadtest.bench", "run", "--url", url, "--model", MODEL,
             "--max-concurrency", str(clients), "--num-prompts", str(requests), "--num-warmups", str(clients),
             "--input-len", str(prompt), "--output-len", str(answer), "--json", file.name],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        figures = json.loads(Path(file.name).read_text())["runs"][0]["figures"]
    if figures["failed"]:
        raise SystemExit(f"{figures['failed']} requests of {url} failed")
    return float(figures["output_throughput"])


def summary(before: list[float], after: list[float]) -> dict[str, Any]:
    """The seconds for a token of `after` over those of `before`, by round."""
    ratios = [old / new for old, new in zip(before, after, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    order = sorted(ratios)
    return {
        "rounds": len(ratios),
        "before_tokens_per_s": round(statistics.median(before), 2),
        "after_tokens_per_s": round(statistics.median(after), 2),
        "ratio": round(statistics.median(ratios), 4),
        "rounds_90": [round(order[int(len(order) * q)], 4) for q in (0.05, 0.95)],
        "median_90": [round(medians[int(DRAWS * q)], 4) for q in (0.05, 0.95)],
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def main() -> None:
    """The command line."""
    parser = parser_of("two_builds", __doc__, up=True)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other build")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=2, help="of a round, for each client")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--answer", type=int, default=64, help="tokens")
    parser.add_argument("--step-us", type=int, help="simulate the engine: the time of its step")
    given = parser.parse_args()
    flags = [*given.up]
    if given.step_us is not None:
        flags += ["--backend", "sim", "--sim", f"step={given.step_us},token=0"]
    trees = {"before": given.before.resolve(), "after": ROOT}
    builds = tuple(trees)
    levels = [int(level) for level in given.concurrency.split(",")]
    found: dict[int, dict[str, list[float]]] = {level: {build: [] for build in builds} for level in levels}
    with ExitStack() as stack:
        urls = {
            build: stack.enter_context(running_up(flags, {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}))[1]
            for build, tree in trees.items()
        }
        for turn in range(given.rounds + 1):
            for level in levels:
                for build in builds if turn % 2 else builds[::-1]:
                    requests = given.requests * level
                    rate = tokens_per_s(urls[build], level, requests, given.prompt, given.answer)
                    if turn:
                        found[level][build].append(rate)
            print(f"round {turn} of {given.rounds}", file=sys.stderr, flush=True)
            if turn:  # a run that is cut short leaves its rounds
                by_level = {str(level): summary(*rates.values()) for level, rates in found.items()}
                report({"machine": machine(), "flags": flags, "by_concurrency": by_level}, given.out)


if __name__ == "__main__":
    main()
