"""Measures the CPU that the scheduler's core takes for a step, by the number of executors: `thread_time`
around `Scheduler.handle` in the virtual world, without NATS and codec.

    python -m loadtest.scenarios.scheduler_cpu --out scheduler_cpu.json

Each executor has 64 rows and steps of 10 ms, the clients send in a closed loop. The arms run in turn,
`--rounds` times: a figure is the median of its rounds, and a ratio is the median of the rounds' ratios.
`of_one` compares with one executor. More executors have more rows, which miss the processor's caches more
often: `of_apart` compares with as many schedulers of one executor each, in one process, which have as many
rows in memory.
"""

from __future__ import annotations

import gc
import platform
import random
import statistics
from dataclasses import asdict, dataclass
from time import thread_time_ns

from loadtest.command_line import parser_of, report
from loadtest.fleet import machine
from loadtest.simulator.engine import Machine
from loadtest.simulator.hops import Hop
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.world import Setup, World
from services.scheduler.state.requests import Arrived, Event, Send
from shared.actor.process import settle_garbage_collector
from shared.messages import StepResult, Tokenized
from shared.step_model import StepModel

ROWS, STEP_US = 64, 10_000
EXECUTORS = (1, 2, 4, 8, 16)
KINDS = ("result", "arrival", "other")  # of events

Arm = tuple[int, int]  # schedulers, and the executors of each
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """What each client asks for. `spread` draws each answer's length between half and one and a half times
    `answer`: else all rows of an executor end in one step."""

    name: str
    prompt: int
    answer: int
    waves: int  # requests of each client, on average
    spread: bool = False
    clients_pm: int = 1_000  # per mille of the rows


LOADS = (
    Load("short", 32, 200, 4),
    Load("long_prompts", 2_048, 100, 3),
    Load("spread", 32, 200, 4, spread=True),
    Load("half", 32, 200, 4, spread=True, clients_pm=500),
)


class Timed:
    """Takes the time of each call of `handle`, by the kind of its event."""

    def __init__(self, world: World) -> None:
        self._handle = world.scheduler.handle
        self.ns = dict.fromkeys(KINDS, 0)
        self.calls = dict(self.ns)
        world.scheduler.handle = self.handle  # type: ignore[method-assign]  # a tap

    def handle(self, event: Event, now_us: int) -> list[Send]:
        """As Scheduler.handle."""
        begun = thread_time_ns()
        commands = self._handle(event, now_us)
        took = thread_time_ns() - begun
        kind = "other"
        if isinstance(event, Arrived):
            kind = {Tokenized: "arrival", StepResult: "result"}.get(type(event.message), "other")
        self.ns[kind] += took
        self.calls[kind] += 1
        return commands


def workload(load: Load, executors: int) -> Workload:
    """The same requests for each number of executors, but for their number."""
    dice, made = random.Random(1), []
    for number in range(1, load.waves * ROWS * executors + 1):
        answer = dice.randint(load.answer // 2, 3 * load.answer // 2) if load.spread else load.answer
        made.append(SimRequest(f"r{number}", 0, plain_prompt(number, load.prompt), answer, answer))
    return Workload(tuple(made), clients=ROWS * executors * load.clients_pm // 1_000)


def world_of(load: Load, executors: int) -> World:
    """A world with this load on so many executors."""
    machine = Machine(StepModel(weights_us=STEP_US, token_ns=0), slots=ROWS, hop=Hop(500, 200))
    return World(Setup((machine,) * executors), workload(load, executors))


def measured(load: Load, arm: Arm) -> Figures:
    """CPU of the core a step and a token, and of one event of each kind."""
    schedulers, executors = arm
    worlds = [world_of(load, executors) for _ in range(schedulers)]
    timed = [Timed(world) for world in worlds]
    settle_garbage_collector()
    _run(worlds)
    gc.unfreeze()
    totals = [engine.totals for world in worlds for engine in world.engines.values()]
    records = [record for world in worlds for record in world.readers.records]
    assert all(record.served for record in records), "a request was refused"
    ns = {kind: sum(each.ns[kind] for each in timed) for kind in KINDS}
    calls = {kind: sum(each.calls[kind] for each in timed) for kind in KINDS}
    steps = sum(t.steps for t in totals)
    return {
        "ms_a_step": round(sum(ns.values()) / steps / 1e6, 4),
        "us_a_token": round(sum(ns.values()) / sum(record.tokens for record in records) / 1e3, 2),
        **{f"us_{kind}": round(ns[kind] / calls[kind] / 1e3, 1) for kind in KINDS},
        "rows_a_step": round(sum(t.rows for t in totals) / steps, 1),
        "events_a_step": round(sum(calls.values()) / steps, 2),
        "steps": steps,
    }


def _run(worlds: list[World]) -> None:
    """Run the worlds in turn, an event of each."""
    for world in worlds:
        world.begin()
    while worlds:
        worlds = [world for world in worlds if world.next_event()]


def table(rounds: list[dict[Arm, Figures]]) -> list[Figures]:
    """Medians by the number of executors, and ratios."""
    rows = []
    for arm in (arm for arm in rounds[0] if arm[0] == 1):
        row: Figures = {"executors": arm[1]}
        for name, other in (("of_one", (1, 1)), ("of_apart", (arm[1], 1))):
            if other in rounds[0]:
                ratios = [each[arm]["ms_a_step"] / each[other]["ms_a_step"] for each in rounds]
                row[name] = round(statistics.median(ratios), 3)
        of = [each[arm] for each in rounds]
        rows.append(row | {name: statistics.median(figures[name] for figures in of) for name in of[0]})
    return rows


def main() -> None:
    """Measure the loads in turn and print a table of each."""
    parser = parser_of("scenarios.scheduler_cpu", __doc__)
    parser.add_argument("--executors", type=int, nargs="+", default=EXECUTORS)
    parser.add_argument("--loads", nargs="+", default=[load.name for load in LOADS])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    cases = []
    for load in (load for load in LOADS if load.name in given.loads):
        arms = [(1, n) for n in given.executors] + [(max(given.executors), 1)]
        rounds = [{arm: measured(load, arm) for arm in dict.fromkeys(arms)} for _ in range(given.rounds)]
        rows = table(rounds)
        cases.append({**asdict(load), "rows": rows})
        for row in rows:
            print(load.name, row, flush=True)
    about = {**machine(), "python": platform.python_version(), "rounds": given.rounds}
    report({**about, "cases": cases}, given.out, shown=about)


if __name__ == "__main__":
    main()
