"""The scheduler's core and the simulated engine in one process, joined by queues: no bus, no codec.

The baseline of `loadtest.step_overhead`.
"""

from __future__ import annotations

import queue

from loadtest.case import PROMPT_TOKENS, Case
from services.executor.actor import hello_of
from services.executor.device_thread import DeviceThread
from services.executor.sim.engine import SimBackend, SimOptions
from services.scheduler.core import Scheduler
from services.scheduler.state.requests import Arrived, PeerReady, Send
from services.scheduler.state.state import Limits
from shared.clock import SystemClock
from shared.messages import SlotClose, SlotOpen, StepPlan, StepResult, Tokenized, ints


def run_bare(case: Case) -> list[StepResult]:
    """Run `case.rows` requests of `case.steps` tokens and return the results of every step."""
    clock = SystemClock()
    arrivals: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    engine = SimBackend(SimOptions(timing=f"step={case.step_us}", model="m"))
    device = DeviceThread(lambda: engine, clock, arrivals.put)
    built: queue.SimpleQueue[object] = queue.SimpleQueue()
    device.start(built.put)
    built.get()
    scheduler = Scheduler(Limits(window=case.window, step_tokens=8192))

    def carry_out(commands: list[Send]) -> None:
        for command in commands:
            if isinstance(command.message, SlotOpen | SlotClose | StepPlan):
                device.put(command.message)

    carry_out(scheduler.handle(PeerReady("detokenizer", "d", 1), clock.now_us()))
    carry_out(scheduler.handle(Arrived("executor.e", hello_of(engine.info, "e", 1, "h")), clock.now_us()))
    for i in range(case.rows):
        carry_out(scheduler.handle(Arrived("tokenizer.t", _request(i, case.steps)), clock.now_us()))
    results = []
    while scheduler.state.executors["e"].in_flight:
        result = arrivals.get()
        results.append(result)
        carry_out(scheduler.handle(Arrived("executor.e", result), clock.now_us()))
    device.join(5)
    return results


def _request(number: int, tokens: int) -> Tokenized:
    return Tokenized(
        request=f"r{number}",
        attempt=1,
        tenant="public",
        model="m",
        inbox=f"inbox.{number}",
        timeout_us=600_000_000,
        max_tokens=tokens,
        seed=number,
        tokens=ints([number + 300] * PROMPT_TOKENS),
    )
