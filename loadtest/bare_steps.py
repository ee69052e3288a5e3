"""The scheduler's core and the simulated engine in one process, joined by queues: no bus, no codec."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from services.executor.sim import SimBackend, SimOptions
from services.executor.step import DeviceThread
from services.scheduler.core import Scheduler
from services.scheduler.events import Arrived, PeerReady, Send
from services.scheduler.state import Limits
from shared.clock import SystemClock
from shared.messages import ExecHello, SlotClose, SlotOpen, StepPlan, StepResult, Tokenized, ints

if TYPE_CHECKING:
    from loadtest.step_overhead import Case

PROMPT_TOKENS = 32


def run_bare(case: Case) -> list[StepResult]:
    """Run `case.rows` requests of `case.steps` tokens and return the results of every step."""
    clock = SystemClock()
    arrivals: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    engine = SimBackend(SimOptions(step_us=case.step_us, model="m"))
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
    carry_out(scheduler.handle(Arrived("executor.e", _hello(engine)), clock.now_us()))
    for i in range(case.rows):
        carry_out(scheduler.handle(Arrived("tokenizer.t", _request(i, case.steps)), clock.now_us()))
    results = []
    while scheduler.state.executors["e"].in_flight:
        result = arrivals.get()
        results.append(result)
        carry_out(scheduler.handle(Arrived("executor.e", result), clock.now_us()))
    device.join(5)
    return results


def _hello(engine: SimBackend) -> ExecHello:
    info = engine.info
    return ExecHello(
        executor="e",
        exec_epoch=1,
        host_id="h",
        model=info.model,
        fingerprint=info.fingerprint,
        vocab_digest=info.vocab_digest,
        vocab=info.vocab,
        blocks=info.blocks,
        block_tokens=info.block_tokens,
        slots=info.slots,
        max_step_tokens=info.max_step_tokens,
        max_context=info.max_context,
    )


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
