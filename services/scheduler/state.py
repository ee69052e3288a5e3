"""Everything the scheduler knows. Only the functions behind `core.Scheduler.handle` change it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from services.scheduler.events import Send
from services.scheduler.ledger import Ledger
from services.scheduler.recent import Recent
from services.scheduler.records import ChunkNote, Request, Sequence
from services.scheduler.steps import Steps
from shared.messages import ExecHello, Message, Rejected, StepPlan

NEVER_US = 2**63
Row = tuple[Sequence, int]  # a sample row in flight: its sequence, and in which placement


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's settings."""

    window: int = 2  # steps in flight per executor
    step_tokens: int = 256  # tokens of one step: decode rows and prompt chunks together
    max_waiting: int = 1024  # requests
    max_waiting_tokens: int = 1_000_000


@dataclass(slots=True)
class InFlight:
    """A step that has been planned and not answered."""

    step: int
    rows: list[Row]
    planned_us: int
    plan: StepPlan
    chunks: list[tuple[Sequence, ChunkNote]] = field(default_factory=list)


@dataclass(slots=True)
class Executor:
    """One incarnation of one executor: its ledger and its window."""

    hello: ExecHello
    epoch: int
    ledger: Ledger
    step: int = 0  # last step planned
    in_flight: deque[InFlight] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)  # in order of admission
    copies: list[tuple[int, int]] = field(default_factory=list)  # block copies for the next plan
    generation: int = 0
    steps_done: int = 0
    draining: bool = False  # finishes what it has, gets nothing new

    @property
    def source(self) -> str:
        return f"executor.{self.hello.executor}"


@dataclass(slots=True, eq=False)
class Unit:
    """Sequences admitted together: a fresh request with its choices, or one requeued sequence."""

    sequences: list[Sequence]

    @property
    def order(self) -> tuple[int, int]:
        head = self.sequences[0]
        return head.request.arrival_us, head.seq


@dataclass(slots=True)
class State:
    """The whole state; `now_us` is the time of the event being handled."""

    limits: Limits
    now_us: int = 0
    draining: bool = False
    next_seq: int = 1
    requests: dict[tuple[str, str], Request] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    waiting: list[Unit] = field(default_factory=list)  # by Unit.order
    executors: dict[str, Executor] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)  # executors given up: id -> their epoch
    detokenizers: dict[str, int] = field(default_factory=dict)  # id -> epoch
    moved: dict[str, tuple[int, list[int]]] = field(default_factory=dict)  # shard -> epoch, sequences
    tombstones: dict[tuple[str, str], int] = field(default_factory=dict)  # cancelled early: until
    due_us: int = NEVER_US  # no deadline ends earlier; see closing.expire
    refused: dict[tuple[str, str, int], tuple[int, Rejected]] = field(default_factory=dict)  # until
    recent: Recent = field(default_factory=Recent)
    steps: Steps = field(default_factory=Steps)
    out: list[Send] = field(default_factory=list)

    def send(self, to: str, message: Message, trace: str = "") -> None:
        """Put a message among the commands of this event."""
        self.out.append(Send(to, message, trace))

    def wake(self, at_us: int) -> None:
        """Something may be due at `at_us`."""
        self.due_us = min(self.due_us, at_us)
