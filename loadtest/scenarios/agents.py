"""Agents that pause for tools: what the life of their KV across pauses costs, by policy.

    python -m loadtest.scenarios.agents --rows 1 2 --arms default off free_hbm --seeds 1 2 [--json FILE]

Rows are loads and machines, arms are policies; each line is one run of one seed. Seeds differ by more than
arms do: compare within a seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from loadtest.scenarios.definitions import H200, PATIENT, ROOM, Arm
from loadtest.scenarios.real_tier import RealTier
from loadtest.scenarios.run import limits_of
from loadtest.simulator.agents import AgentWorld, Load, LogNormal, figures_of
from loadtest.simulator.copies import Link
from loadtest.simulator.engine import Machine
from loadtest.simulator.report import Figures
from loadtest.simulator.tiers import TierSpec
from loadtest.simulator.world import Setup

FREE = 40  # times the blocks, with free_hbm


@dataclass(frozen=True)
class Row:
    """A load on a machine, with an L1 of so many tokens below."""

    what: str
    machine: Machine
    l1_tokens: int
    load: Load


def _machine(tokens: int, times: int = 1) -> Machine:
    """The H200 with an 8B model and so many tokens of HBM; with `times` 4, a model of 32B."""
    model = H200.model
    if times > 1:
        model = replace(
            model,
            weights_us=model.weights_us * times,
            token_ns=model.token_ns * times,
            row_ns=model.row_ns * times,
            kv_token_ps=model.kv_token_ps * 2,
            pair_ps=model.pair_ps * times,
        )
    return replace(
        H200,
        model=model,
        blocks=tokens // 16,
        block_bytes=H200.block_bytes * (2 if times > 1 else 1),
        max_context=262_144,
    )


def _long(tokens: int) -> Load:
    """Contexts from so many tokens on."""
    first = LogNormal(tokens - 6_000, 0.05, tokens - 16_000, tokens)
    return Load(9, 6, first=first, compact_at=tokens + 42_000)


L, H = _machine(80_000), _machine(190_000, 4)
MANY = Load(28, 24, chats_s=0.5)
FEW = Load(14, 12, chats_s=1.0)
ROW_1, ROW_6 = (
    Row("H, mix, a chat each 2 s", H, 720_000, MANY),
    Row("L, mix, a chat a second", L, 480_000, FEW),
)
ROWS = {
    "1": ROW_1,
    "2": replace(ROW_1, what="H, mix, 3 chats a second", load=replace(MANY, chats_s=3.0)),
    "3": replace(ROW_1, what="H, fast, a chat each 2 s", load=replace(MANY, pauses="fast")),
    "4": replace(ROW_1, what="row 1, L1 of 300,000 tokens", l1_tokens=300_000),
    "5": replace(
        ROW_1, what="row 1, link of 12 GB/s", machine=replace(H, link=Link(12_000_000_000, 12_000_000_000))
    ),
    "6": ROW_6,
    "6_light": replace(ROW_6, what="row 6, half the programs", load=replace(FEW, programs=8, at_once=6)),
    "7": Row("L, 6 programs from 80,000 tokens on, HBM 240,000", _machine(240_000), 720_000, _long(80_000)),
    "7_120": Row(
        "L, 6 programs from 120,000 tokens on, HBM 360,000", _machine(360_000), 1_080_000, _long(120_000)
    ),
    "8": Row("row 6, a compaction each third turn", L, 480_000, replace(FEW, compact_every=3)),
    "9": replace(ROW_6, what="row 6 and a tenant that never returns", load=replace(FEW, liars_s=0.5)),
    "9_lies": replace(ROW_6, what="row 9 with every hint", load=replace(FEW, liars_s=0.5, liars_hint=True)),
}
POLICIES = {"default": "", "off": "sessions=off", "learned": "sessions=learned"}


def run(row: Row, arm: str, seed: int) -> Figures:
    """One run. `arm`: a name of POLICIES, free_hbm, no_tier, or the text of a policy."""
    machine = replace(row.machine, blocks=row.machine.blocks * FREE) if arm == "free_hbm" else row.machine
    policy = POLICIES.get(arm, arm if "=" in arm else "")
    limits = limits_of(Arm(arm, policy, slo=PATIENT, limits=ROOM))
    spec = TierSpec(row.l1_tokens // 16 * machine.block_bytes)
    tier = None if arm in ("no_tier", "free_hbm") else partial(RealTier, spec, machine.block_bytes)
    began = time.process_time()
    world = AgentWorld(Setup((machine,), limits, seed, tier=tier), row.load)
    world.run()
    return figures_of(world) | {"cpu_s": round(time.process_time() - began, 1)}


def line(name: str, arm: str, seed: int, f: Figures) -> str:
    """A line of the table."""
    return (
        f"| {name} | {arm} | {seed} | {f['program_s_mean']:.0f}, {f['program_s_p95']:.0f} "
        f"| {f['ttft_ms_mean']:,.0f}, {f['ttft_ms_p50']:,.0f}, {f['ttft_ms_p95']:,.0f} "
        f"| {f['recomputed'] / 1e3:,.0f} of {f['needed'] / 1e3:,.0f} | {f['chats_ttft_s_p95']:.1f} "
        f"| {f['down_gb']:,.0f}, {f['up_gb']:,.0f} | {f['dropped_blocks']:,} | {f['preemptions']} |"
    )


HEAD = (
    "| row | arm | seed | program mean, p95 s | TTFT of continuations, mean, p50, p95 ms "
    "| recomputed, needed, 1,000 tokens | chats: TTFT p95 s | GB down, up | dropped blocks | preemptions |\n"
    + "|---" * 10
    + "|"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run rows x arms x seeds and print the table; with --json add one JSON line for each run to a file."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.scenarios.agents", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=["6"], choices=ROWS)
    parser.add_argument(
        "--arms", nargs="+", default=["default"], help="default, off, learned, free_hbm, no_tier or a policy"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--ids", action="store_true", help="clients name their sessions")
    parser.add_argument("--label", default="", help="a name for the arm `default` in the output")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    print(HEAD, flush=True)
    for name in given.rows:
        row = replace(ROWS[name], load=replace(ROWS[name].load, ids=given.ids))
        for seed in given.seeds:
            for arm in given.arms:
                figures, label = run(row, arm, seed), given.label if given.label and arm == "default" else arm
                print(line(name, label, seed, figures), flush=True)
                if given.json is not None:
                    with given.json.open("a") as out:
                        out.write(json.dumps({"row": name, "arm": label, "seed": seed, **figures}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
