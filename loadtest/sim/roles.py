"""Prefill and decode apart, on four virtual H200 with an 8B model: documents beside chats, and phases.

    python -m loadtest.sim.roles [--seconds 30] [--seeds 5] [--documents 1 2] [--workers 4]
    python -m loadtest.sim.roles --phases [--seconds 60] [--out roles.json]

`alone`: the chats without the other prompts. `colocated`: each executor does both. `prefill_N`: N executors
only prefill, the others decode. `adaptive`: by the rule of services/scheduler/fleet/roles.py. Figures are of
requests that arrive after WARM_S. Chats are of class interactive, others of class standard.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.sim.real_tier import RealTier
from loadtest.sim.scenarios import H200, OURS
from loadtest.sim.synthetic import SECOND_US
from loadtest.simulator.readers import Readers
from loadtest.simulator.report import percentile
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.tiers import TierSpec
from loadtest.simulator.world import FIRST_US, Setup, World
from services.scheduler.state import policies
from services.scheduler.state.state import Limits
from shared.messages import Tokens

EXECUTORS = 4
WARM_S = 45  # the rule needs two periods, and step costs that are learned
L1 = TierSpec(l1_bytes=256 << 30)
FIXED = ("colocated", "prefill_1", "prefill_2", "prefill_3")
ARMS = (*FIXED, "adaptive")
GOOD_TTFT_US, GOOD_TPOT_US = 2_000_000, 12_000


@dataclass(frozen=True)
class Kind:
    """Poisson arrivals of one kind of request."""

    name: str
    rate: float  # a second
    prompt: tuple[int, int]  # tokens, from and to
    output: tuple[int, int]
    slo_class: str = "interactive"

    def requests(self, seed: int, begin_s: float, end_s: float) -> Iterator[SimRequest]:
        """Those that arrive in this time."""
        rng, at_s = random.Random(f"{seed} {self.name} {begin_s}"), begin_s
        while (at_s := at_s + rng.expovariate(self.rate)) < end_s:
            output = rng.randrange(*self.output)
            yield SimRequest(
                request=f"{self.name}{at_s:.6f}",
                arrival_us=int(at_s * SECOND_US),
                prompt=plain_prompt(rng.getrandbits(31), rng.randrange(*self.prompt)),
                output_tokens=output,
                max_tokens=output,
                slo_class=self.slo_class,
            )


@dataclass
class KindReaders(Readers):
    """The gaps between tokens by class."""

    by_class: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def tokens(self, tokens: Tokens, now_us: int) -> None:
        """The tokens of a step."""
        for seq in tokens.seqs:
            record = self.open[seq]
            if record.last_us and record.arrival_us >= FIRST_US + WARM_S * SECOND_US:
                self.by_class[record.asked.slo_class].append(now_us - record.last_us)
        super().tokens(tokens, now_us)


def run(arm: str, requests: Sequence[SimRequest], seed: int) -> World:
    """All requests, to their ends."""
    name = f"{OURS}{arm}" if arm.startswith("prefill_") else arm
    limits = Limits(policy=policies.parse(f"roles={name}"))
    setup = Setup((H200,) * EXECUTORS, limits, seed, tier=lambda: RealTier(L1, H200.block_bytes))
    workload = Workload(tuple(sorted(requests, key=lambda asked: asked.arrival_us)))
    world = World(setup, workload)
    world.readers = KindReaders()
    world.run()
    return world


def figures(world: World, begin_s: float = WARM_S, end_s: float = 1e9) -> dict[str, float]:
    """The figures of the requests that arrived in this time."""
    span = range(FIRST_US + int(begin_s * SECOND_US), FIRST_US + int(end_s * SECOND_US))
    records = [r for r in world.readers.records if r.arrival_us in span]
    served = [r for r in records if r.served]
    assert isinstance(world.readers, KindReaders)
    found: dict[str, float] = {}
    for name in ("interactive", "standard"):
        gaps = sorted(world.readers.by_class[name])
        ttft = sorted(r.ttft_us for r in served if r.asked.slo_class == name)
        found[f"{name}_itl_ms_p50"] = percentile(gaps, 50) / 1e3
        found[f"{name}_itl_ms_p99"] = percentile(gaps, 99) / 1e3
        found[f"{name}_ttft_ms_mean"] = round(sum(ttft) / max(len(ttft), 1) / 1e3, 1)
        found[f"{name}_ttft_ms_p99"] = percentile(ttft, 99) / 1e3
    good = [r for r in served if r.ttft_us <= GOOD_TTFT_US and r.tpot_us <= GOOD_TPOT_US]
    first, last = min(r.arrival_us for r in records), max(r.ended_us for r in records)
    tokens = sum(r.tokens + r.prompt_tokens for r in served)
    counters = world.scheduler.state.counters
    return found | {
        "requests": len(records),
        "unserved": len(records) - len(served),
        "tokens_s": round(tokens / (last - first) * 1e6),
        "good_pct": round(100 * len(good) / len(records), 2),
        "moves": counters.moves,
        "role_changes": counters.role_changes,
        "restored_pct": round(100 * counters.restored_tokens / max(counters.prefill_tokens, 1), 1),
    }


def chats(rate: float) -> Kind:
    """Questions of 50 to 400 tokens with answers of 200 to 600."""
    return Kind("c", rate, (50, 400), (200, 600))


def documents(rate: float) -> Kind:
    """Prompts of 8k tokens with short answers."""
    return Kind("d", rate, (8_000, 8_400), (8, 40), "standard")


PHASES = ((20.0, 3.0), (60.0, 0.5), (20.0, 3.0))  # chats and documents a second: P2


def beside(kinds: Sequence[Kind]) -> Callable[[int, float], list[SimRequest]]:
    """All kinds at once."""
    return lambda seed, seconds: [r for kind in kinds for r in kind.requests(seed, 0.0, WARM_S + seconds)]


def phased(seed: int, seconds: float) -> list[SimRequest]:
    """The phases, each of this length."""
    found: list[SimRequest] = []
    for at, (chat_rate, document_rate) in enumerate(PHASES):
        for kind in (chats(chat_rate), documents(document_rate)):
            found += kind.requests(seed, at * seconds, (at + 1) * seconds)
    return found


def phases(arm: str, seed: int, seconds: float) -> dict[str, float]:
    """Good requests of each phase, in percent, and the changes of roles."""
    world = run(arm, phased(seed, seconds), seed)
    parts = [figures(world, at * seconds, (at + 1) * seconds) for at in range(len(PHASES))]
    return {
        **{f"good_pct_{at}": part["good_pct"] for at, part in enumerate(parts)},
        **{f"tokens_s_{at}": part["tokens_s"] for at, part in enumerate(parts)},
        "role_changes": world.scheduler.state.counters.role_changes,
    }


def measured(
    name: str, rate: float | None, arm: str, seed: int, seconds: float, chats_s: float
) -> dict[str, Any]:
    """One run: `rate` documents a second beside the chats, or the phases if it is None."""
    if rate is None:
        return {"arm": arm, "seed": seed, **phases(arm, seed, seconds)}
    made = beside([chats(chats_s), *([documents(rate)] if rate else [])])
    return {"case": name, "arm": arm, "seed": seed, **figures(run(arm, made(seed, seconds), seed))}


def spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median, least and most of each figure over the seeds, for each case and arm."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row.get("case", "phases"), row["arm"]].append(row)
    return [
        {"case": case, "arm": arm, "seeds": len(found)}
        | {
            name: [statistics.median(values), min(values), max(values)]
            for name in found[0]
            if name not in ("case", "arm", "seed") and (values := [row[name] for row in found])
        }
        for (case, arm), found in groups.items()
    ]


def main() -> None:
    """Print a line for each run and the spread over the seeds, write the document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--chats", type=float, default=40)
    parser.add_argument("--documents", type=float, nargs="*", default=[1, 2])
    parser.add_argument("--arms", nargs="*", default=ARMS)
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each in a process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases: list[tuple[str, float | None]] = [("phases", None)]
    if not options.phases:
        cases = [("alone", 0), *((f"{rate:g} documents/s", rate) for rate in options.documents)]
    wanted = [
        (name, rate, arm, seed, options.seconds, options.chats)
        for seed in range(options.seeds)
        for name, rate in cases
        for arm in options.arms
    ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers) as workers:
        for row in workers.map(measured, *zip(*wanted, strict=True)):
            rows.append(row)
            print(json.dumps(row), flush=True)
    for line in spread(rows) if options.seeds > 1 else ():
        print(json.dumps(line), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
