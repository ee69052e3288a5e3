"""The virtual world: a heap of (time, number, event), the scheduler, and its counterparts.

    while events: take the earliest, hand it to the scheduler, carry out its commands

Same workload, machines and seed: same run, to the microsecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from loadtest.simulator.engine import Machine, VirtualEngine
from loadtest.simulator.readers import Readers, Record
from loadtest.simulator.requests import SimRequest, Workload, tokenized
from loadtest.simulator.tier_side import TierSide, ToTier
from loadtest.simulator.tiers import Tier
from services.scheduler import overlap
from services.scheduler.core import Scheduler
from services.scheduler.state.requests import Arrived, Event, PeerReady, PolicySet, Send, Ticked
from services.scheduler.state.state import Limits
from shared.messages import (
    Close,
    Ended,
    ExecReset,
    KvCopied,
    KvCopy,
    Open,
    Rejected,
    SlotClose,
    SlotOpen,
    StepPlan,
    StepResult,
    Tokens,
)

READER_HOP_US = 200  # scheduler -> detokenizer -> scheduler
TIER_HOP_US = 200  # scheduler -> kv_offload, and back
TICK_US = 10_000  # while nothing is in flight
SLOW_TICK_US = 100_000  # while steps are: each result is an event, too
MOST_IDLE_TICKS = 1_000_000  # 10,000 s in which nothing happens
PLAN_DUE = Ticked()  # the one for a step that is planned late
FIRST_US = 1_000_000  # arrival 0: the clock of a process is never at 0


class WorldStopped(AssertionError):
    """Requests wait and nothing will ever move."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run is made of, apart from its workload."""

    machines: tuple[Machine, ...]
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    until_us: int = 0  # stop here, 0 = when all has ended
    tier: Callable[[], Tier] | None = None  # makes the kv_offload of this world
    policies: tuple[tuple[int, str], ...] = ()  # changes of the policy: when after the start, to what


class World:
    """One run. `run` returns the readers' records; `engines` keep their totals."""

    def __init__(self, setup: Setup, workload: Workload) -> None:
        self.now_us = FIRST_US
        self.setup = setup
        self.scheduler = Scheduler(setup.limits)
        self.readers = Readers()
        self.engines = {
            f"e{number}": VirtualEngine(f"e{number}", machine, setup.seed + number, self._output_tokens)
            for number, machine in enumerate(setup.machines)
        }
        self.tier = TierSide(setup.tier()) if setup.tier else None
        self._heap: list[tuple[int, int, Event | SimRequest | ToTier]] = []
        self._number = 0
        self._ticking = False
        self._due_us = 0
        self._idle_ticks = 0
        self._live: dict[str, tuple[SimRequest, int, int]] = {}  # asked, arrival, choices left
        self._queue: deque[SimRequest] = deque()
        for at_us, policy in setup.policies:
            self._push(FIRST_US + at_us, PolicySet(policy))
        self._expect(workload)

    def run(self) -> Readers:
        """Everything, to the last Ended."""
        self.begin()
        return self._to_the_end()

    def begin(self) -> None:
        """Start all services; `next_event` then does the rest."""
        self._handle(PeerReady("detokenizer", "d", 1))
        for name, engine in self.engines.items():
            self._handle(Arrived(f"executor.{name}", engine.hello))
        if self.tier is not None:
            self._handle(self.tier.ready)

    def go_on(self, workload: Workload) -> Readers:
        """Another workload, after all of the one before has ended. Arrivals count from now."""
        self._expect(workload)
        return self._to_the_end()

    def _expect(self, workload: Workload) -> None:
        self._queue.extend(workload.requests if workload.clients else ())
        for _ in range(workload.clients):
            self._next_of_client()
        for asked in () if workload.clients else workload.requests:
            self._push(self.now_us + asked.arrival_us, asked)

    def _to_the_end(self) -> Readers:
        while self.next_event():
            pass
        return self.readers

    def next_event(self) -> bool:
        """Handle the earliest event. False if there was none, or none before the end of the run."""
        until_us = FIRST_US + self.setup.until_us if self.setup.until_us else 0
        if not self._heap:
            return False
        self.now_us, _, event = heappop(self._heap)
        if until_us and self.now_us > until_us:
            return False
        if isinstance(event, ToTier):
            self._at_tier(event)
        else:
            self._handle(self._prepared(event))
        return True

    def go_until(self, now_us: int) -> None:
        """Everything before `now_us`."""
        while self._heap and self._heap[0][0] < now_us:
            self.next_event()
        self.now_us = now_us

    def ask(self, asked: SimRequest) -> None:
        """A request arrives now."""
        self._handle(self._prepared(asked))

    def _output_tokens(self, seq: int) -> int:
        """The real length of a sequence; its slot is opened before its reader, so that only the scheduler
        knows yet whose it is."""
        return self._live[self.scheduler.state.sequences[seq].request.tokenized.request][0].output_tokens

    def _push(self, at_us: int, event: Event | SimRequest | ToTier) -> None:
        self._number += 1
        heappush(self._heap, (at_us, self._number, event))

    def _prepared(self, event: Event | SimRequest) -> Event:
        """The scheduler's part of an event, after this world has noted it."""
        if isinstance(event, SimRequest):
            if not self._live:
                for engine in self.engines.values():
                    engine.work_since_us = self.now_us
            self._live[event.request] = (event, self.now_us, event.n)
            return Arrived("tokenizer.t", tokenized(event, self.now_us))
        if isinstance(event, Ticked) and event is not PLAN_DUE:
            self._ticking = False
            self._idle_ticks += 1
            if self._idle_ticks > MOST_IDLE_TICKS:
                raise WorldStopped(f"{len(self._live)} requests wait and nothing moves")
        elif isinstance(event, Arrived) and isinstance(event.message, StepResult):
            self._idle_ticks = 0
            self.engines[event.source.removeprefix("executor.")].answered(event.message.step)
        elif isinstance(event, Arrived) and isinstance(event.message, KvCopied):
            self.engines[event.source.removeprefix("executor.")].copied(event.message.job)
        return event

    def _handle(self, event: Event) -> None:
        for command in self.scheduler.handle(event, self.now_us):
            self._carry_out(command)
        self.scheduler.state.step_log.unsent.clear()
        due_us = overlap.plan_due_us(self.scheduler.state)
        if due_us not in (0, self._due_us):
            self._push(due_us, PLAN_DUE)
        self._due_us = due_us
        if not self._ticking and not self.scheduler.is_idle:
            self._ticking = True
            busy = any(engine.in_flight for engine in self.engines.values())
            self._push(self.now_us + (SLOW_TICK_US if busy else TICK_US), Ticked())

    def _carry_out(self, command: Send) -> None:
        name = command.to.removeprefix("executor.")
        if self.tier is not None and command.to == self.tier.source:
            self._push(self.now_us + TIER_HOP_US, ToTier(command.message))
            return
        match command.message:
            case StepPlan() as plan:
                result, at_us = self.engines[name].run(plan, self.now_us)
                self._push(at_us, Arrived(command.to, result))
            case KvCopy() as copy:
                copied, at_us = self.engines[name].copy(copy, self.now_us)
                self._push(at_us, Arrived(command.to, copied))
            case Tokens() as tokens:
                self.readers.tokens(tokens, self.now_us)
            case SlotOpen() as opened:
                self.engines[name].open(opened)
            case SlotClose() as closed:
                self.engines[name].close(closed)
            case Open() as opened:
                asked, arrival_us, _ = self._live[opened.request]
                self.readers.opened(opened, asked, arrival_us)
            case Close() as close:
                self._closed(command.to, close)
            case Rejected() as rejected:
                asked, arrival_us, _ = self._live.pop(rejected.request)
                self.readers.rejected(rejected, asked, arrival_us, self.now_us)
                self._next_of_client()
            case ExecReset(why=why):
                raise WorldStopped(f"the scheduler resets a virtual engine: {why}")

    def _at_tier(self, event: ToTier) -> None:
        """A message reaches kv_offload, or something that it waits for is due."""
        assert self.tier is not None
        for delay_us, message in self.tier.answer(event, self.now_us):
            self._push(self.now_us + delay_us + TIER_HOP_US, Arrived(self.tier.source, message))
        due_us = self.tier.wake_us()
        if due_us:
            self._push(max(due_us, self.now_us), ToTier(None))

    def _closed(self, shard: str, close: Close) -> None:
        record = self.readers.closed(close, self.now_us)
        if record is None:
            return
        ended = Ended(seq=close.seq, index=close.final, reason=close.reason, calls=record.asked.calls)
        self._push(self.now_us + 2 * READER_HOP_US, Arrived(shard, ended))
        self._choice_ended(record)

    def _choice_ended(self, record: Record) -> None:
        """The last choice ends its request, and a client of a closed loop sends its next one."""
        asked, arrival_us, left = self._live.pop(record.asked.request)
        if left > 1:
            self._live[asked.request] = (asked, arrival_us, left - 1)
        else:
            self._next_of_client()

    def _next_of_client(self) -> None:
        if self._queue:
            self._push(self.now_us + READER_HOP_US, self._queue.popleft())
