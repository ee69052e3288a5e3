"""The protocol in the virtual world: 300 requests on the default model and two cores.

Recomputing costs as much as the first computation only if a step is bound by compute, as all steps are here.
Beside a decode batch of an 8B on an H200, which is bound by memory, it takes a tenth of that.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from loadtest.recompute_overhead.protocol import Arm, Lengths, Outcome, Point
from loadtest.sim.arms import limits_of
from loadtest.sim.real_tier import RealTier
from loadtest.sim.scenarios import CPU, ROOM
from loadtest.sim.scenarios import Arm as SimArm
from loadtest.simulator.report import figures, percentile
from loadtest.simulator.requests import HOUR_US, SimRequest, Workload, plain_prompt
from loadtest.simulator.tiers import TierSpec
from loadtest.simulator.world import Setup, World

SLOTS = 32
BLOCK_TOKENS = CPU.block_tokens
LENGTHS = Lengths(300, prompt=(32, 256), answer=(64, 1_536))
PATIENT = "standard=0/100/0"  # all come at once: nobody is refused for that, and nobody ages


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
        useful_tokens=sum(prompt + answer for prompt, answer in lengths),
        recomputed_tokens=int(row["recomputed_tokens"]),
        preemptions=int(row["preemptions"]),
        moved_bytes=int(row["moved_gb"] * 1e9),
        tok_s=row["output_tok_s"],
        latency_s=(percentile(latencies, 50) / 1e6, percentile(latencies, 99) / 1e6),
        makespan_s=row["makespan_s"],
        device_s=row["busy_s"],
        device_overhead_pct=100 * row["recompute_s"] / (row["busy_s"] - row["recompute_s"]),
    )


def workload(lengths: list[tuple[int, int]]) -> Workload:
    """All at once. Nobody knows an answer's length before it ends."""
    most = max(answer for _, answer in lengths)
    return Workload(
        tuple(
            SimRequest(
                f"r{number}", 0, plain_prompt(number, prompt), answer, most + 1, timeout_us=24 * HOUR_US
            )
            for number, (prompt, answer) in enumerate(lengths, 1)
        )
    )
