"""Measures how long the scheduler takes to decide, with 256 running and 200 or 2,000 waiting requests.

    python -m loadtest.decide [--steps 1000] [--repeats 5] [--clients 50] [--out OUT] [--profile]
    python -m loadtest.decide --drafts [--steps 500] [--repeats 9]

`decide` is the admission and planning after each event; `decide_step` is the same after the result of a step,
the only event with much to decide; `handle` is the whole event. Requests arrive and end all the time, so
that both numbers stay constant. The engine is a fake that answers each plan at once; its time and the
building of requests are not counted.

`--drafts` compares an engine without drafts with one that finds none, and with one whose drafts are too dear:
the best repeat of each event, and the bytes of a plan with its result.

The run is repeated with the same events. Times are wall times. The time of an event is the median of its
repeats, because other processes use the core, too; quantiles are over the events. `once_p99_us` is that of
the median single repeat, with all disturbances. The CPU clock of the thread is not used: reading it is a
system call, and the cache lines that it evicts cost the next decision 100 us. `loop_ms` is a loop of a
million additions: the speed of the machine in that minute.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loadtest.command_line import parser_of, report
from services.scheduler.core import Scheduler, decide
from services.scheduler.state.requests import Arrived, Event, PeerReady, Send
from services.scheduler.state.state import Limits
from shared.actor.process import settle_garbage_collector
from shared.codec import Envelope, encode
from shared.messages import Close, Ended, ExecHello, StepPlan, StepResult, Tokenized, ints

RUNNING, PROMPT_TOKENS, ANSWER_TOKENS, BLOCKS = 256, 512, 200, 65_536
WARM_STEPS = 200
DRAFTS = {"off": (0, 3_000), "none found": (8, 0), "too dear": (8, 3_000)}  # most of a row, us of a row
GROWS = ("p50_us", "mean_us", "p99_us")
STEP_US = 10_000


@dataclass
class Loaded:
    """A scheduler that is kept at its load: as one request ends, another comes in."""

    waiting: int
    clients: int
    drafts: str = ""  # of DRAFTS
    now_us: int = 0
    asked: int = 0
    spent: dict[str, list[int]] = field(default_factory=dict)  # by event, ns
    plans: deque[StepPlan] = field(default_factory=deque)
    closed: deque[Close] = field(default_factory=deque)
    wire_bytes: list[int] = field(default_factory=list)  # of each plan with its result

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(Limits(step_tokens=8_192, max_waiting=10_000, max_waiting_tokens=10**9))
        self.handle(PeerReady("detokenizer", "d", 1))
        most, self.row_us = DRAFTS.get(self.drafts, (0, 0))
        self.handle(Arrived("executor.e", replace(_hello(), max_drafts=most)))
        while self.asked < RUNNING + self.waiting:
            self.ask()
        self.spent.clear()

    def run(self, steps: int) -> None:
        """Answer so many plans."""
        for _ in range(steps):
            plan = self.plans.popleft()
            self.now_us += STEP_US
            result = _result(plan, self.now_us)
            if self.row_us:
                result = replace(result, forward_us=STEP_US + self.row_us * len(plan.slots))
            if self.drafts:
                self.wire_bytes.append(sum(len(encode(Envelope("e", 1, 1, each))) for each in (plan, result)))
            self.handle(Arrived("executor.e", result))
            while self.closed:
                close = self.closed.popleft()
                self.handle(
                    Arrived("detokenizer.d", Ended(seq=close.seq, index=close.final, reason="length"))
                )
                self.ask()

    def ask(self) -> None:
        """One more request."""
        self.asked += 1
        asked = Tokenized(
            request=f"r{self.asked}",
            attempt=1,
            tenant=f"t{self.asked % self.clients}",
            model="m",
            inbox="i",
            slo_class="batch",  # it may wait for ever
            timeout_us=10**12,
            max_tokens=ANSWER_TOKENS // 2 + self.asked * 7_919 % ANSWER_TOKENS,
            tokens=ints((self.asked * 31 + at) % 30_000 for at in range(PROMPT_TOKENS)),
        )
        self.handle(Arrived("tokenizer.t", asked))

    def handle(self, event: Event) -> None:
        """One event, timed."""
        state, scheduler = self.scheduler.state, self.scheduler
        before = time.perf_counter_ns()
        scheduler.apply(event, self.now_us)
        applied = time.perf_counter_ns()
        decide(state)
        decided = time.perf_counter_ns()
        commands = scheduler.take_commands()
        self._note("handle", time.perf_counter_ns() - before)
        self._note("decide", decided - applied)
        if isinstance(event, Arrived) and isinstance(event.message, StepResult):
            self._note("decide_step", decided - applied)
        for command in commands:
            self._carry_out(command)

    def _note(self, what: str, took_ns: int) -> None:
        self.spent.setdefault(what, []).append(took_ns)

    def _carry_out(self, command: Send) -> None:
        match command.message:
            case StepPlan() as plan:
                self.plans.append(plan)
            case Close() as close:
                self.closed.append(close)


def _hello() -> ExecHello:
    return ExecHello(
        executor="e", exec_epoch=1, host_id="h", model="m", fingerprint="f", vocab_digest="v", vocab=32_000,
        blocks=BLOCKS, block_tokens=16, slots=RUNNING, max_step_tokens=8_192, max_context=8_192,
    )  # fmt: skip


def _result(plan: StepPlan, now_us: int) -> StepResult:
    rows = len(plan.sample_slots)
    return StepResult(
        exec_epoch=1,
        step=plan.step,
        ids=ints((plan.step * 7 + slot) % 30_000 for slot in plan.sample_slots),
        done=ints([0]) * rows,
        start_wall_us=now_us - STEP_US,
        end_wall_us=now_us,
        forward_us=STEP_US - 100,
        sample_us=100,
    )


def measure(steps: int, clients: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Quantiles of one event in us, for each load. The loads take turns, and both see the machine alike."""
    spent: dict[int, list[dict[str, list[int]]]] = {200: [], 2_000: []}
    found: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        for waiting, runs in spent.items():
            load = Loaded(waiting, clients)
            _run(load, steps)
            runs.append(load.spent)
            found[str(waiting)] = _summary(load, runs)
    return found


def measure_drafts(steps: int, clients: int, repeats: int) -> dict[str, dict[str, float]]:
    """The mean, median and p99 of an event and the mean bytes of a step, each also relative to no drafts."""
    spent: dict[str, list[list[int]]] = {name: [] for name in DRAFTS}
    figures: dict[str, dict[str, float]] = {name: {} for name in DRAFTS}
    for _ in range(repeats):
        for name, runs in spent.items():
            load = Loaded(200, clients, name)
            _run(load, steps)
            runs.append(load.spent["decide_step"])
            figures[name]["wire_bytes"] = round(statistics.mean(load.wire_bytes[-steps:]), 1)
    for name, runs in spent.items():
        took_us = [min(times) / 1_000 for times in zip(*runs, strict=True)]
        quantiles = statistics.mean(took_us), statistics.median(took_us), _p99(took_us)
        figures[name] |= dict(zip(("mean_us", "p50_us", "p99_us"), quantiles, strict=True))
        for what in ("wire_bytes", "mean_us", "p50_us", "p99_us"):
            figures[name][f"times_{what}"] = round(figures[name][what] / figures["off"][what], 3)
    return figures


def _run(load: Loaded, steps: int) -> None:
    load.run(WARM_STEPS)
    load.spent.clear()
    gc.unfreeze()  # what a repeat before left
    settle_garbage_collector()  # as in the scheduler's process
    load.run(steps)


def _summary(load: Loaded, runs: list[dict[str, list[int]]]) -> dict[str, Any]:
    state = load.scheduler.state
    found: dict[str, Any] = {what: _quantiles([run[what] for run in runs]) for what in load.spent}
    found["running"] = sum(len(e.running) for e in state.executors.values())
    found["waiting"] = len(state.waiting)
    return found


def _quantiles(repeats: list[list[int]]) -> dict[str, float]:
    """Quantiles of the events' medians; the repeats have the same events, in the same order."""
    took_us = sorted(statistics.median(times) / 1_000 for times in zip(*repeats, strict=True))
    values = {
        "p50_us": statistics.median(took_us),
        "p99_us": _p99(took_us),
        "mean_us": statistics.mean(took_us),
        "once_p99_us": statistics.median(_p99(times) / 1_000 for times in repeats),
    }
    return {name: round(value, 1) for name, value in values.items()} | {"events": len(took_us)}


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _loop_ms() -> float:
    started = time.perf_counter()
    total = 0
    for i in range(1_000_000):
        total += i
    return round((time.perf_counter() - started) * 1_000, 1)


def main() -> None:
    """Measure, or profile."""
    parser = parser_of("decide", __doc__)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--drafts", action="store_true")
    given = parser.parse_args()
    if given.drafts:
        report(measure_drafts(given.steps, given.clients, given.repeats), given.out)
        return
    if given.profile:
        load, profile = Loaded(2_000, given.clients), cProfile.Profile()
        profile.runcall(load.run, given.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    found = measure(given.steps, given.clients, given.repeats)
    growth = {
        what: {name: round(found["2000"][what][name] / found["200"][what][name], 3) for name in GROWS}
        for what in ("decide", "decide_step", "handle")
    }
    about = {
        "loop_ms": _loop_ms(),
        **{name: getattr(given, name) for name in ("steps", "repeats", "clients")},
    }
    report({"waiting": found, "growth_200_to_2000": growth, **about}, given.out)


if __name__ == "__main__":
    main()
