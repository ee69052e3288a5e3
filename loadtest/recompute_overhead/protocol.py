"""The protocol: requests of mixed lengths all at once, and KV pools of 38, 19 and 9.5 % of the working set.

The working set is what `slots` requests of mean length hold at their end. The overhead is prompt tokens that
were computed again, over tokens with KV that had to be computed once (prompts and answers). The overhead of
device time is the time that this added to steps, over the rest of their time. L1 `holds the victims` if pool
and L1 together hold the working set.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shared.kv_blocks import blocks_for

SEED = 12_345
POOLS_PM = (380, 190, 95)  # of the working set
L1_SPARE = 1.25  # kv_offload keeps a tenth for preemption; and a partial block is a whole one
OURS = "loadtest.policies:"
FULL, QUARTER = "holds the victims", "a quarter of that"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to deal with short memory. `tiers`: it uses L1."""

    name: str
    policy: str
    tiers: bool = False


ARMS = (
    Arm("recompute, latest", f"tier={OURS}recompute,victim=latest"),
    Arm("recompute, least computed", f"tier={OURS}recompute,victim={OURS}least_computed"),
    Arm("swap", f"tier={OURS}swap", tiers=True),
    Arm("tiered", "tier=tiered", tiers=True),
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts and answers, tokens: uniform between two bounds."""

    requests: int
    prompt: tuple[int, int]
    answer: tuple[int, int]

    def draw(self, seed: int = SEED) -> list[tuple[int, int]]:
        """(prompt, answer) of each request."""
        rng = random.Random(seed)
        return [(rng.randint(*self.prompt), rng.randint(*self.answer)) for _ in range(self.requests)]


@dataclass(frozen=True, slots=True)
class Point:
    """A pool and an L1, in blocks; 0: there is none."""

    pool_pm: int
    pool_blocks: int
    l1: str  # FULL or QUARTER
    l1_blocks: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to."""

    useful_tokens: int
    recomputed_tokens: int
    preemptions: int
    moved_bytes: int
    tok_s: float
    latency_s: tuple[float, float]  # p50, p99
    makespan_s: float
    device_s: float = 0.0  # of all steps
    device_overhead_pct: float | None = None
    counted: dict[str, float] = field(default_factory=dict)  # by the scheduler, of its tiers

    @property
    def overhead_pct(self) -> float:
        """Tokens computed again, of those that had to be."""
        return 100 * self.recomputed_tokens / self.useful_tokens


def points(lengths: Sequence[tuple[int, int]], slots: int, block_tokens: int) -> list[Point]:
    """Every pool with both sizes of L1."""
    mean_blocks = sum(blocks_for(p + a, block_tokens) for p, a in lengths) / len(lengths)
    working_set = slots * mean_blocks
    largest = max(blocks_for(p + a, block_tokens) for p, a in lengths)
    made = []
    for pool_pm in POOLS_PM:
        pool = max(int(working_set * pool_pm / 1000), largest + 1)
        victims = int((working_set - pool) * L1_SPARE)
        made.append(Point(pool_pm, pool, FULL, victims))
        made.append(Point(pool_pm, pool, QUARTER, victims // 4))
    return made


def arms_of(*, greedy: bool) -> list[Arm]:
    """The arms; `greedy`: with admission that leaves nothing for growth."""
    return [
        replace(arm, policy=arm.policy + ",reservation=loadtest.policies:greedy" * greedy) for arm in ARMS
    ]


HEAD = ["pool", "L1", "arm", "preemptions", "recomputed tokens", "overhead %", "device s",
        "device overhead %", "GB moved", "tok/s", "latency p50 s", "latency p99 s", "all done s"]  # fmt: skip


def row_of(point: Point, arm: Arm, outcome: Outcome) -> list[object]:
    """The table row of a run."""
    device = outcome.device_overhead_pct
    return [
        f"{point.pool_pm / 10:g} % ({point.pool_blocks} blocks)",
        f"{point.l1} ({point.l1_blocks})" if arm.tiers else "none",
        arm.name,
        outcome.preemptions,
        outcome.recomputed_tokens,
        f"{outcome.overhead_pct:.2f}",
        f"{outcome.device_s:.1f}",
        "" if device is None else f"{device:.2f}",
        f"{outcome.moved_bytes / 1e9:.3f}",
        f"{outcome.tok_s:.1f}",
        *(f"{value:.2f}" for value in outcome.latency_s),
        f"{outcome.makespan_s:.1f}",
    ]


Runs = dict[tuple[int, str, str], Outcome]  # by pool, L1 (empty: none), arm


def checks(runs: Runs, noise: float = 1.0) -> list[tuple[str, bool]]:
    """What is asked of `tiered`, at the pools where all has been run that it is compared with. Latencies are
    alike that differ by less than `noise`."""
    made = []
    latest, least, swap, tiered = (arm.name for arm in ARMS)
    for pool in dict.fromkeys(pool for pool, _, _ in runs):
        at = f"pool {pool / 10:g} %"
        if (full := runs.get((pool, FULL, tiered))) is not None:
            made.append((f"{at}, L1 {FULL}: overhead {full.overhead_pct:.2f} ≤ 1 %", full.overhead_pct <= 1))
        keys = (pool, "", latest), (pool, "", least), (pool, QUARTER, swap), (pool, QUARTER, tiered)
        found = [runs[key] for key in keys if key in runs]
        if len(found) == len(keys):
            made += _of_a_quarter(f"{at}, L1 a quarter", found, noise)
    return made


def _of_a_quarter(at: str, found: Sequence[Outcome], noise: float) -> list[tuple[str, bool]]:
    latest, least, swap, mine = found
    moved, other = mine.moved_bytes / 1e9, swap.moved_bytes / 1e9
    best_other = min(latest.overhead_pct, least.overhead_pct)
    best, late = min(run.latency_s[1] for run in (latest, least, swap)), mine.latency_s[1]
    times = "" if noise == 1 else f"{noise:g} × "
    return [
        (f"{at}: {moved:.3f} < {other:.3f} GB of swap", mine.moved_bytes < swap.moved_bytes),
        (f"{at}: overhead {mine.overhead_pct:.2f} < {best_other:.2f} %", mine.overhead_pct < best_other),
        (f"{at}: p99 latency {late:.2f} ≤ {times}{best:.2f} s of the best other", late <= noise * best),
    ]
