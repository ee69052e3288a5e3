"""How long the scheduler's core takes for one event: 256 running, 200 or 2,000 waiting.

    python -m loadtest.decide [--steps 2000] [--clients 50] [--json OUT] [--profile]

Requests come in and end all the time, so that both numbers hold. The engine is a fake that answers each plan
at once with the ids of a hash; its time and the building of requests are not counted. Times are CPU times of
the thread (what another process takes is not the scheduler's), wall times beside them. The arms are measured
in turns, round by round.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from services.scheduler.core import Scheduler
from services.scheduler.events import Arrived, Event, PeerReady, Send
from services.scheduler.state import Limits
from shared.messages import Close, Ended, ExecHello, StepPlan, StepResult, Tokenized, ints

RUNNING, PROMPT_TOKENS, ANSWER_TOKENS, BLOCKS = 256, 512, 200, 65_536
ROUNDS = 5
STEP_US = 10_000


@dataclass
class Loaded:
    """A scheduler that is kept at its load: as one request ends, another comes in."""

    waiting: int
    clients: int
    now_us: int = 0
    asked: int = 0
    spent_ns: list[int] = field(default_factory=list)  # CPU time of each event
    wall_ns: list[int] = field(default_factory=list)
    plans: deque[StepPlan] = field(default_factory=deque)
    closed: deque[Close] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(Limits(step_tokens=8_192, max_waiting=10_000, max_waiting_tokens=10**9))
        self.handle(PeerReady("detokenizer", "d", 1))
        self.handle(Arrived("executor.e", _hello()))
        while self.asked < RUNNING + self.waiting:
            self.ask()
        self.forget()

    def forget(self) -> None:
        """Measure anew."""
        self.spent_ns.clear()
        self.wall_ns.clear()

    def run(self, steps: int) -> None:
        """Answer so many plans."""
        for _ in range(steps):
            plan = self.plans.popleft()
            self.now_us += STEP_US
            self.handle(Arrived("executor.e", _result(plan, self.now_us)))
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
        started, began = time.perf_counter_ns(), time.thread_time_ns()
        commands = self.scheduler.handle(event, self.now_us)
        self.spent_ns.append(time.thread_time_ns() - began)
        self.wall_ns.append(time.perf_counter_ns() - started)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Send) -> None:
        match command.message:
            case StepPlan() as plan:
                self.plans.append(plan)
            case Close() as close:
                self.closed.append(close)


def _hello() -> ExecHello:
    return ExecHello(
        executor="e",
        exec_epoch=1,
        host_id="h",
        model="m",
        fingerprint="f",
        vocab_digest="v",
        vocab=32_000,
        blocks=BLOCKS,
        block_tokens=16,
        slots=RUNNING,
        max_step_tokens=8_192,
        max_context=8_192,
    )


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


def measure(steps: int, clients: int) -> dict[str, dict[str, float]]:
    """Quantiles of one event in us, and the median of rounds, for each load."""
    loads = {waiting: Loaded(waiting, clients) for waiting in (200, 2_000)}
    for load in loads.values():
        load.run(200)
        load.forget()
    medians: dict[int, list[float]] = {waiting: [] for waiting in loads}
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        for waiting, load in loads.items():
            before = len(load.spent_ns)
            load.run(steps // ROUNDS)
            medians[waiting].append(statistics.median(load.spent_ns[before:]) / 1_000)
    return {str(waiting): _summary(load, medians[waiting]) for waiting, load in loads.items()}


def _summary(load: Loaded, medians: list[float]) -> dict[str, float]:
    spent_us = sorted(ns / 1_000 for ns in load.spent_ns)
    wall_us = sorted(ns / 1_000 for ns in load.wall_ns)
    state = load.scheduler.state
    p99 = int(len(spent_us) * 0.99)
    return {
        "p50_us": round(statistics.median(spent_us), 1),
        "p99_us": round(spent_us[p99], 1),
        "max_us": round(spent_us[-1], 1),
        "mean_us": round(statistics.mean(spent_us), 1),
        "wall_p50_us": round(statistics.median(wall_us), 1),
        "wall_p99_us": round(wall_us[p99], 1),
        "median_of_rounds_us": round(statistics.median(medians), 1),
        "events": len(spent_us),
        "running": sum(len(e.running) for e in state.executors.values()),
        "waiting": len(state.waiting),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.profile:
        load, profile = Loaded(2_000, options.clients), cProfile.Profile()
        profile.runcall(load.run, options.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    found = measure(options.steps, options.clients)
    growth = {name: round(found["2000"][name] / found["200"][name], 3) for name in ("mean_us", "p99_us")}
    report = {
        "waiting": found,
        "growth_200_to_2000": growth,
        "steps": options.steps,
        "clients": options.clients,
    }
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
