"""What a log recorded: the requests, the time of each token, the duration of each step.

The log is replayed, and the reader that measures simulations reads its commands. So the recorded run and the
simulated ones are measured at the same point, by the scheduler's clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from loadtest.simulator.readers import Readers
from loadtest.simulator.replay.rerun import core_of
from loadtest.simulator.requests import SimRequest
from services.scheduler.core import Scheduler
from services.scheduler.reports import event_log
from services.scheduler.reports.event_log import LogError
from services.scheduler.state.requests import Arrived, Event, PolicySet, Send
from services.scheduler.state.state import Limits
from shared.messages import (
    Close,
    ExecHello,
    Open,
    Rejected,
    SlotOpen,
    StepPlan,
    StepResult,
    Tokenized,
    Tokens,
    ints,
)
from shared.step_model import StepShape, shape_of


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that has run."""

    shape: StepShape
    took_us: int  # forward and sampling
    loop_us: int  # the rest of the time from its plan to its result, but for waiting for another step
    host_rows: int
    host_us: int


@dataclass(slots=True)
class _Planned:
    shape: StepShape
    at_us: int
    host_rows: int


@dataclass(slots=True)
class Past:
    """One executor."""

    hello: ExecHello
    steps: list[Ran] = field(default_factory=list)
    _planned: dict[int, _Planned] = field(default_factory=dict)
    _host_fed: dict[int, bool] = field(default_factory=dict)  # by slot

    def sent(self, message: object, now_us: int) -> None:
        """The scheduler has sent it something."""
        if isinstance(message, SlotOpen):
            self._host_fed[message.slot] = bool(message.processors)
        elif isinstance(message, StepPlan):
            host_rows = sum(self._host_fed.get(slot, False) for slot in message.sample_slots)
            self._planned[message.step] = _Planned(shape_of(message), now_us, host_rows)

    def answered(self, result: StepResult, now_us: int) -> None:
        """It has answered a plan."""
        planned = self._planned.pop(result.step, None)
        lived_us = result.end_wall_us - result.start_wall_us
        if planned is None or result.error or lived_us <= 0:
            return
        loop_us = max(now_us - planned.at_us - result.queued_us - lived_us, 0)
        took_us = result.forward_us + result.sample_us
        self.steps.append(Ran(planned.shape, took_us, loop_us, planned.host_rows, result.host_us))


@dataclass(slots=True)
class History:
    """A log, read."""

    core: Scheduler  # as it was at the end
    began_us: int
    limits: Limits  # as they were at the beginning
    policies: list[tuple[int, str]] = field(default_factory=list)  # changes: when, to what
    readers: Readers = field(default_factory=Readers)
    asked: dict[tuple[str, str], SimRequest] = field(default_factory=dict)
    executors: dict[str, Past] = field(default_factory=dict)
    left_out: int = 0  # requests that ran already when the log began
    recomputed_before: int = 0  # counted by the meter until then

    def add(self, record: event_log.LoggedEvent) -> None:
        """One event more."""
        message = record.event.message if isinstance(record.event, Arrived) else None
        if isinstance(message, Tokenized):
            self._asked(message, record.now_us)
        self._executor(record.event, record.now_us)
        for command in self.core.handle(record.event, record.now_us):
            self._command(command, record.now_us)
        if isinstance(record.event, PolicySet):
            policy = str(self.core.state.limits.policy)
            self.policies.append((record.now_us - self.began_us, policy))
        self.core.state.step_log.unsent.clear()

    def _asked(self, message: Tokenized, now_us: int) -> None:
        key = (message.tenant, message.request)
        if message.generated or key in self.asked or key in self.core.state.requests:
            return  # it began at another scheduler, or is a resend
        self.asked[key] = SimRequest(
            request=f"{message.tenant}/{message.request}",
            arrival_us=now_us - self.began_us,
            prompt=message.tokens,
            output_tokens=0,  # not known yet
            max_tokens=message.max_tokens,
            slo_class=message.slo_class,
            tenant=message.tenant,
            host_fed=bool(message.processors),
            n=message.n,
            timeout_us=message.timeout_us,
        )

    def _executor(self, event: Event, now_us: int) -> None:
        if not isinstance(event, Arrived):
            return
        if isinstance(event.message, ExecHello):
            self.executors[event.source] = Past(event.message)
        elif isinstance(event.message, StepResult) and event.source in self.executors:
            self.executors[event.source].answered(event.message, now_us)

    def _command(self, command: Send, now_us: int) -> None:
        readers, message = self.readers, command.message
        if command.to in self.executors:
            self.executors[command.to].sent(message, now_us)
        match message:
            case Open():
                asked = self.asked.get((message.tenant, message.request))
                if asked is not None:
                    readers.opened(message, asked, self.began_us + asked.arrival_us)
            case Tokens():
                readers.tokens(_known(message, readers), now_us)
            case Close():
                readers.closed(message, now_us)
            case Rejected():
                asked = self.asked.get((message.tenant, message.request))
                if asked is not None:
                    readers.rejected(message, asked, self.began_us + asked.arrival_us, now_us)


def read_history(records: Iterable[event_log.Record]) -> History:
    """Do a log again and watch. Raises LogError when there is nothing in it."""
    history: History | None = None
    core: Scheduler | None = None
    for record in records:
        if isinstance(record, event_log.Snapshot) and core is None:
            core = core_of(record.data)
        elif isinstance(record, event_log.LoggedEvent) and core is not None:
            history = history or _begun(core, record.now_us)
            history.add(record)
    if history is None or not history.asked:
        raise LogError("the log has no snapshot or no request after it: record while some are served")
    return history


def _begun(core: Scheduler, now_us: int) -> History:
    state = core.state
    history = History(core, now_us, state.limits, left_out=len(state.requests))
    history.recomputed_before = state.counters.recomputed_tokens
    for executor in state.executors.values():
        history.executors[executor.source] = Past(executor.hello)
    return history


def _known(tokens: Tokens, readers: Readers) -> Tokens:
    """Without the rows of requests that ran before the log."""
    if all(seq in readers.open for seq in tokens.seqs):
        return tokens
    known = [row for row, seq in enumerate(tokens.seqs) if seq in readers.open]
    return Tokens(
        executor=tokens.executor,
        step=tokens.step,
        seqs=ints([tokens.seqs[row] for row in known]),
        first=ints([tokens.first[row] for row in known]),
        counts=ints([tokens.counts[row] for row in known]),
        ids=tokens.ids,
    )
