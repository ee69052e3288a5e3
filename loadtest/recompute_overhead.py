"""The cost of preemption in tokens computed twice: the protocol of vllm-project/vllm#54644, simulated.

    python -m loadtest.recompute_overhead --greedy --out recompute_overhead.json

Requests of mixed lengths come all at once, to KV pools of 38, 19 and 9.5 % of the working set: what `slots`
requests of mean length hold at their end. The overhead is prompt tokens that are computed again, by tokens
with KV that have to be computed once (prompts and answers). The overhead of device time is the time that this
adds to steps, by the rest of their time. L1 `holds the victims` if pool and L1 together hold the working set.

The machine is the default model on two cores, where every step is bound by compute, so recomputing costs as
much as the first computation. Beside a decode batch of an 8B on an H200, which is bound by memory, it costs a
tenth of that: `python -m loadtest.gpu.serve --parts overhead` measures it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from loadtest.command_line import parser_of, report
from loadtest.scenarios.definitions import CPU, ROOM
from loadtest.scenarios.definitions import Arm as SimArm
from loadtest.scenarios.real_tier import RealTier
from loadtest.scenarios.run import limits_of
from loadtest.simulator.report import figures, percentile
from loadtest.simulator.requests import HOUR_US, SimRequest, Workload, plain_prompt
from loadtest.simulator.tiers import TierSpec
from loadtest.simulator.world import Setup, World
from shared.kv_blocks import blocks_for

SEED = 12_345
POOLS_PM = (380, 190, 95)  # of the working set
L1_SPARE = 1.25  # kv_offload keeps a tenth for preemption; and a partial block is a whole one
OURS = "loadtest.policies:"
FULL, QUARTER = "holds the victims", "a quarter of that"
SLOTS = 32
BLOCK_TOKENS = CPU.block_tokens
PATIENT = "standard=0/100/0"  # all come at once: none is refused for that, and none ages


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
    """The lengths of prompts and answers, tokens: uniform between two bounds."""

    requests: int
    prompt: tuple[int, int]
    answer: tuple[int, int]

    def draw(self, seed: int = SEED) -> list[tuple[int, int]]:
        """(prompt, answer) of each request."""
        rng = random.Random(seed)
        return [(rng.randint(*self.prompt), rng.randint(*self.answer)) for _ in range(self.requests)]


LENGTHS = Lengths(300, prompt=(32, 256), answer=(64, 1_536))


@dataclass(frozen=True, slots=True)
class Point:
    """A pool and an L1, in blocks."""

    pool_pm: int
    pool_blocks: int
    l1: str  # FULL or QUARTER
    l1_blocks: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one run."""

    overhead_pct: float  # tokens computed again, of those that had to be computed
    device_overhead_pct: float
    preemptions: int
    moved_gb: float
    tok_s: float
    latency_p50_s: float
    latency_p99_s: float
    makespan_s: float
    device_s: float  # of all steps


def points(lengths: Sequence[tuple[int, int]], slots: int, block_tokens: int) -> list[Point]:
    """Every pool with both sizes of L1."""
    blocks = [blocks_for(prompt + answer, block_tokens) for prompt, answer in lengths]
    working_set = slots * sum(blocks) / len(blocks)
    made = []
    for pool_pm in POOLS_PM:
        pool = max(int(working_set * pool_pm / 1000), max(blocks) + 1)
        victims = int((working_set - pool) * L1_SPARE)
        made += [Point(pool_pm, pool, FULL, victims), Point(pool_pm, pool, QUARTER, victims // 4)]
    return made


def arms_of(*, greedy: bool) -> list[Arm]:
    """The arms; `greedy`: with admission that leaves nothing for growth, as in vLLM V1."""
    return [replace(arm, policy=arm.policy + f",reservation={OURS}greedy" * greedy) for arm in ARMS]


def outcome(lengths: list[tuple[int, int]], point: Point, arm: Arm) -> Outcome:
    """One run."""
    machine = replace(CPU, blocks=point.pool_blocks, slots=SLOTS)
    tier = partial(RealTier, TierSpec(point.l1_blocks * machine.block_bytes), machine.block_bytes)
    limits = limits_of(SimArm(arm.name, arm.policy, slo=PATIENT, limits=ROOM))
    world = World(Setup((machine,), limits, tier=tier if arm.tiers else None), workload(lengths))
    world.run()
    row = figures(world)
    assert row["served"] == len(lengths), "a request was not served"
    latencies = sorted(record.e2e_us for record in world.readers.records)
    return Outcome(
        overhead_pct=100 * row["recomputed_tokens"] / sum(prompt + answer for prompt, answer in lengths),
        device_overhead_pct=100 * row["recompute_s"] / (row["busy_s"] - row["recompute_s"]),
        preemptions=int(row["preemptions"]),
        moved_gb=row["moved_gb"],
        tok_s=row["output_tok_s"],
        latency_p50_s=percentile(latencies, 50) / 1e6,
        latency_p99_s=percentile(latencies, 99) / 1e6,
        makespan_s=row["makespan_s"],
        device_s=row["busy_s"],
    )


def workload(lengths: list[tuple[int, int]]) -> Workload:
    """All at once. The scheduler does not know an answer's length before its end."""
    most = max(answer for _, answer in lengths)
    return Workload(
        tuple(
            SimRequest(f"r{i}", 0, plain_prompt(i, prompt), answer, most + 1, timeout_us=24 * HOUR_US)
            for i, (prompt, answer) in enumerate(lengths, 1)
        )
    )


def main() -> None:
    """All pools, arms without tiers once for each."""
    parser = parser_of("recompute_overhead", __doc__)
    parser.add_argument("--requests", type=int, default=LENGTHS.requests)
    parser.add_argument("--greedy", action="store_true", help="admission leaves nothing free for growth")
    given = parser.parse_args()
    lengths = replace(LENGTHS, requests=given.requests).draw()
    rows = []
    for point in points(lengths, SLOTS, BLOCK_TOKENS):
        for arm in arms_of(greedy=given.greedy):
            if arm.tiers or point.l1 == FULL:
                found = asdict(outcome(lengths, point, arm))
                rows.append(
                    {**asdict(point), "l1": point.l1 if arm.tiers else "none", "arm": arm.name} | found
                )
                print({name: round(v, 3) if isinstance(v, float) else v for name, v in rows[-1].items()})
    report({"greedy": given.greedy, "runs": rows}, given.out, shown={"runs": len(rows)})


if __name__ == "__main__":
    main()
