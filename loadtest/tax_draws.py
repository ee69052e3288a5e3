"""The arms of the recompute tax as the real model is served, in the virtual world: many draws of the lengths.

python -m loadtest.tax_draws --draws 6 --out out

What the machine's drift hides when arms are served one after the other, and what one draw shows by chance, is
told here: the scheduler and kv_offload are the real ones, steps take what they took on two cores (below).
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

from loadtest.real.report import Report
from loadtest.recompute_tax import arms_of
from loadtest.sim.arms import limits_of
from loadtest.sim.real_tier import RealTier
from loadtest.sim.scenarios import CPU, ROOM
from loadtest.sim.scenarios import Arm as SimArm
from loadtest.simulator.report import figures, percentile
from loadtest.simulator.tiers import TierSpec
from loadtest.simulator.world import Setup, World
from loadtest.tax.measured import BLOCK_TOKENS, KV_TOKEN_BYTES, Size, size_of
from loadtest.tax.protocol import POOLS_PM, QUARTER, SEED, Arm, Point, points
from loadtest.tax.simulated import PATIENT, workload
from shared.step_model import StepModel, StepShape

REQUESTS, THREADS = 300, 2
TIERED = "tiered"
ALIKE = 0.999  # as the draws of one arm differ
HEAD = ["pool", "arm", "pauses", "tokens computed again", "GB moved", "steps", "latency p99, s", "of tiered"]
TEXT = (
    "300 requests at once as `recompute_tax --real --greedy` asks them, L1 a quarter of the victims; "
    "means of {draws} draws of the lengths, in brackets the least and the most. On a virtual clock with the "
    "real scheduler and the real core of kv_offload: figures of a machine's model, not measurements."
)


class _Steps(StepModel):
    """SmolLM2 in float32 on two cores: 1,636 steps of 26,261 tokens took 50.9 s, 1,667 of 23,854 50.8 s."""

    def step_us(self, shape: StepShape) -> int:
        """Of any shape."""
        return 25_200 + 370 * shape.tokens


def row_of(size: Size, draw: int, pool_pm: int, arm: Arm) -> dict[str, float]:
    """One run: pauses, tokens computed again, GB moved, steps, the 99th percentile of the latencies in s."""
    lengths = size.lengths.draw(draw)
    (point,) = (
        p for p in points(lengths, size.slots, BLOCK_TOKENS) if (p.pool_pm, p.l1) == (pool_pm, QUARTER)
    )
    world = _world(size, lengths, point, arm)
    world.run()
    found = figures(world)
    assert found["served"] == len(lengths), "a request was not served"
    latencies = sorted(record.e2e_us for record in world.readers.records)
    return {
        "pauses": found["preemptions"],
        "again": found["recomputed_tokens"],
        "moved_gb": found["moved_gb"],
        "steps": sum(engine.totals.steps for engine in world.engines.values()),
        "p99_s": percentile(latencies, 99) / 1e6,
    }


def _world(size: Size, lengths: list[tuple[int, int]], point: Point, arm: Arm) -> World:
    tokens = point.pool_blocks * BLOCK_TOKENS
    machine = replace(
        CPU, model=_Steps(weights_us=0, token_ns=0), blocks=point.pool_blocks, slots=size.slots,
        block_tokens=BLOCK_TOKENS, max_step_tokens=tokens, max_context=tokens,
        block_bytes=BLOCK_TOKENS * KV_TOKEN_BYTES,
    )  # fmt: skip
    tier = partial(RealTier, TierSpec(point.l1_blocks * machine.block_bytes), machine.block_bytes)
    limits = limits_of(SimArm(arm.name, arm.policy, slo=PATIENT, limits=ROOM))
    return World(Setup((machine,), limits, tier=tier if arm.tiers else None), workload(lengths))


def measure(pools: list[int], draws: int) -> Report:
    """All pools, all arms, all draws."""
    size, arms = size_of(REQUESTS, THREADS), arms_of(greedy=True)
    command = f"python -m loadtest.tax_draws --pools {' '.join(map(str, pools))} --draws {draws}"
    text = TEXT.format(draws=draws)
    report = Report("tax_draws", "Recompute tax: many draws", text, command, HEAD, kind="sim")
    report.data["runs"] = raw = dict[str, dict[str, list[dict[str, float]]]]()
    for pool_pm in pools:
        seeds = [SEED, *range(1, draws)]
        runs = {arm.name: [row_of(size, draw, pool_pm, arm) for draw in seeds] for arm in arms}
        raw[str(pool_pm)] = runs
        pool = f"{pool_pm / 10:g} %"
        for name, found in runs.items():
            means = {key: statistics.mean(run[key] for run in found) for key in found[0]}
            ratios = [a["p99_s"] / b["p99_s"] for a, b in zip(found, runs[TIERED], strict=True)]
            spread = f"{statistics.mean(ratios):.4f} ({min(ratios):.4f}–{max(ratios):.4f})"
            again, moved = f"{means['again']:.0f}", f"{means['moved_gb']:.3f}"
            cells = [f"{means['pauses']:.0f}", again, moved, f"{means['steps']:.0f}", f"{means['p99_s']:.2f}"]
            report.add([pool, name, *cells, spread])
            if name != TIERED:
                ratio = statistics.mean(ratios)
                report.checks.append((f"{pool}: p99 of {name} is {ratio:.4f} of tiered's", ratio >= ALIKE))
    return report


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pools", type=int, nargs="+", default=list(POOLS_PM), choices=POOLS_PM)
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--out", type=Path, help="folder for the page")
    args = parser.parse_args()
    report = measure(args.pools, args.draws)
    if args.out:
        report.write(args.out)
    print(report.markdown())


if __name__ == "__main__":
    main()
