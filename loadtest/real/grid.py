"""Points of the overlap grid over a real nats-server, with a longer way to the executor: `auto` against what
it chooses from, and against the ideal of run-ahead (T + L) / max(T, (T + L) / 2), T the step, L the loop.

T and L are measured in `single`: the median step, and the period less it. Every answer ends by a stop id, so
that what run-ahead wastes is there to be counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial

from loadtest.real.delay import DelayedWay
from loadtest.real.endings import stop_ids
from loadtest.real.report import Report
from loadtest.real.served import Served, decode_bodies, env_of, side_by_side
from loadtest.real.steady import Steady, mode_shares, spread, steady

MODES = ("single", "run_ahead", "auto")
WINDOW = 2
PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Point:
    """`hop_us` is added each way between the executor and the nats-server."""

    rows: int
    step_us: int
    hop_us: int


@dataclass(slots=True)
class Found:
    """What was seen at a point, by mode."""

    rounds: dict[str, list[Steady]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    wasted_pct: float = 0.0  # of auto's rows

    def speed(self, mode: str) -> float:
        """Tokens a second, median."""
        return statistics.median(one.tok_s for one in self.rounds[mode])

    def ratios(self, mode: str, to: Iterable[str]) -> list[float]:
        """Of each round, to the best of `to` in it."""
        others = zip(*([one.tok_s for one in self.rounds[name]] for name in to), strict=True)
        return [one.tok_s / max(best) for one, best in zip(self.rounds[mode], others, strict=True)]


POINTS = (
    Point(1, 1_000, 0), Point(1, 5_000, 2_000), Point(32, 5_000, 0), Point(32, 5_000, 2_000),
    Point(256, 15_000, 2_000),
)  # fmt: skip
HEAD = [
    "rows", "hop ms", "T ms", "L ms", "ideal", "single tok/s", "auto / single", "auto / best", "auto / ideal",
    "auto took", "idle % single", "idle % auto", "wasted rows % auto",
]  # fmt: skip


async def run(points: Iterable[Point], rounds: int, tokens: int, command: str) -> Report:
    """The table of these points."""
    report = Report(
        "grid",
        "Overlap grid over NATS",
        "Simulated engine (a step sleeps its time) behind five processes and a nats-server; a proxy adds the "
        f"hop each way. Answers of {tokens} tokens end by a stop id. Medians of {rounds} rounds, the modes "
        "in turn; ratios are of each round, median (least…most).",
        command,
        HEAD,
    )
    for point in points:
        _add(report, point, await measure(point, rounds, tokens), tokens)
    return report


async def measure(point: Point, rounds: int, tokens: int) -> Found:
    """All modes at a point, in turn."""
    base = env_of(
        backend="sim", sim=f"step={point.step_us}", window=WINDOW, step_tokens=8_192, max_context=4_096
    )
    found, ways = Found(), list[DelayedWay]()
    envs = {mode: base | env_of(overlap=mode) for mode in MODES}
    async with side_by_side(envs, partial(_way, point.hop_us, ways)) as fleets:
        for turn in range(rounds + 1):
            for mode, served in fleets.items():
                one = await _round(served, point, f"g{turn}", tokens)
                if turn:  # the first tells `auto` the costs
                    found.rounds[mode].append(one)
        counted = await fleets["auto"].measured()
        found.wasted_pct = 100 * counted["steps"]["wasted_rows"] / counted["tokens"]["generated"]
    for way in ways:
        way.close()
    return found


def _way(hop_us: int, ways: list[DelayedWay], server_url: str) -> str:
    if not hop_us:
        return server_url
    ways.append(DelayedWay(server_url, hop_us))
    return ways[-1].url


async def _round(served: Served, point: Point, name: str, tokens: int) -> Steady:
    bodies = decode_bodies(name, point.rows, 4 * tokens, PROMPT_TOKENS)
    for body, stop in zip(bodies, stop_ids(bodies, tokens), strict=True):
        body["stop_token_ids"] = [stop]
    await served.all(bodies)
    return await steady(served, f"{name}-0")


def _add(report: Report, point: Point, found: Found, tokens: int) -> None:
    single = found.rounds["single"]
    step_ms = statistics.median(one.step_ms for one in single)
    loop_ms = statistics.median(one.period_ms for one in single) - step_ms
    ideal = (step_ms + loop_ms) / max(step_ms, (step_ms + loop_ms) / WINDOW)
    gain, of_best = found.ratios("auto", ["single"]), found.ratios("auto", ["single", "run_ahead"])
    of_ideal = [one / ideal for one in gain]
    idle = {mode: statistics.median(one.idle_pct for one in of) for mode, of in found.rounds.items()}
    report.add(
        [point.rows, point.hop_us / 1e3, round(step_ms, 2), round(loop_ms, 2), round(ideal, 3),
         round(found.speed("single"), 1), spread(gain, 3), spread(of_best, 3), spread(of_ideal, 3),
         mode_shares(found.rounds["auto"]), round(idle["single"], 2), round(idle["auto"], 2),
         round(found.wasted_pct, 3)]
    )  # fmt: skip
    where = f"{point.rows} rows, T {step_ms:.1f} ms, L {loop_ms:.1f} ms: "
    middle = statistics.median
    report.checks += [
        (f"{where}auto {middle(gain):.3f} ≥ 0.98 × single", middle(gain) >= 0.98),
        (f"{where}auto {middle(of_best):.3f} ≥ 0.97 × the best", middle(of_best) >= 0.97),
        (f"{where}auto {middle(of_ideal):.3f} ≥ 0.95 × the ideal", middle(of_ideal) >= 0.95),
    ]
    if loop_ms < 0.8 * step_ms:
        report.checks.append((f"{where}idle {idle['auto']:.2f} % < 2 %", idle["auto"] < 2))
    most = 100 * (WINDOW - 1) / tokens + 0.1
    report.checks.append((f"{where}wasted {found.wasted_pct:.3f} ≤ {most:.3f} %", found.wasted_pct <= most))
    rounds = {mode: [asdict(one) for one in of] for mode, of in found.rounds.items()}
    report.data.setdefault("points", []).append({**asdict(point), "rounds": rounds})
