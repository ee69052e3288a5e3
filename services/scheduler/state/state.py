"""The whole state of the scheduler. Only functions that `core.Scheduler.handle` calls change it."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from services.scheduler.state import requests
from services.scheduler.state.block_pool import BlockPool
from services.scheduler.state.cost_model import CostModel, DraftTimes, StepPace
from services.scheduler.state.counters import Counters, StepLog
from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import (
    ChunkRecord,
    Deadlines,
    EndedRequests,
    Request,
    Send,
    Sequence,
    SloClass,
)
from services.scheduler.state.reuse import Reuse
from services.scheduler.state.transfers import Tiers, TransferLink
from services.scheduler.state.waiting_queue import Quotas, WaitingQueue
from shared.messages import ExecHello, Message, Rejected, SessionAnswer, SessionVerb, StepPlan, StepResult
from shared.step_model import StepShape

MAX_DROPPED = 10_000  # lost executors that are not back: most never come back
GRAMMARS = 32  # noted for each executor; half of those that an engine keeps
MAX_MOVED = 100_000  # sequences of lost detokenizers

# what decides which requests an executor can ever serve
CAPACITY = attrgetter(
    "vocab",
    "max_stop_ids",
    "slots",
    "blocks",
    "block_tokens",
    "max_context",
    "adapter_places",
    "scores_prompts",
)

AUTO = -1  # of `Limits.speculate`
PREFILL, DECODE = "prefill", "decode"  # roles of executors

Row = tuple[Sequence, int]  # a sample row in flight: its sequence, and the placement then


def _grammar_key(grammar: str) -> int:
    """A number of a grammar, the same in each process: event logs hold it."""
    return int.from_bytes(hashlib.blake2b(grammar.encode(), digest_size=7).digest())


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's settings."""

    window: int = 2  # most steps in flight per executor
    overlap: str = "auto"  # auto, single, run_ahead, two_batch: see ../overlap.py
    comm: str = "auto"  # auto, off, two_stream: see ../step_planner.py
    speculate: int = AUTO  # drafts of each row; AUTO: by their price, see ../speculation.py
    step_tokens: int = 1024  # most tokens of one step: decode rows and prompt chunks together
    max_waiting: int = 1024  # requests
    max_waiting_tokens: int = 1_048_576
    policy: Policy = field(default_factory=Policy)
    classes: tuple[SloClass, ...] = field(default_factory=lambda: requests.parse(""))
    model_digest: str = ""  # of the executors that may serve; empty: of the first one
    accept_mixed: bool = False  # executors of any model digest may serve
    shares_memory: bool = False  # only a SleepSet wakes executors; else waiting requests do, too
    cold_start_wait_us: int = 0  # how long a request waits for the first executor of its model; 0: refused
    # How long a closed sequence waits for Ended. Longer than a dead detokenizer goes unnoticed: until then
    # another one may have to send the end to the client.
    ended_within_us: int = 5_000_000
    move_after_us: int = (
        3_000_000  # from then on the sequences of a draining executor move: ../executors/moves.py
    )

    def strictest(self, running_by_class: list[int]) -> tuple[int, int]:
        """The shortest target time between tokens of the classes that run, or of all if none does, in us; and
        its class."""
        times = [(slo.tbt_us, level) for level, slo in enumerate(self.classes)]
        return min((of for of in times if running_by_class[of[1]]), default=min(times))


@dataclass(slots=True)
class InFlight:
    """A planned step without a result."""

    step: int
    rows: list[Row]
    planned_us: int
    plan: StepPlan
    shape: StepShape  # without drafts
    predicted_us: int = 0  # 0: not predicted
    chunks: list[tuple[Sequence, ChunkRecord]] = field(default_factory=list)
    lead_us: int = 0  # before the predicted end of the step that ran: see overlap.py
    drafts: dict[int, int] = field(default_factory=dict)  # how many its rows may have, by index into `rows`


@dataclass(slots=True)
class RowSums:
    """Sums over the running sequences of an executor, for one number of `row_changes`; and what others derive
    from them, for one number of `changes`."""

    row_changes: int
    changes: int = 0
    decodes: int = 0
    decode_tokens: int = 0  # in their KV cache
    prompt_tokens: list[int] = field(default_factory=lambda: [0] * len(requests.CLASS_NAMES))  # by level
    backlog_tokens: int = 0  # of all levels, without tokens that are loaded
    backlog_prompts: int = 0  # sequences that have some
    speed: int = 0  # see ../load_shedding.py; 0: not derived yet
    base: StepShape | None = None  # of a step of the decodes alone; None: not derived yet
    base_us: int = -1  # its time, see ../preemption.py; -1: not derived yet
    ends: dict[int, tuple[int, list[tuple[int, int]], int]] = field(default_factory=dict)  # likewise

    def count(self, sequence: Sequence, one: int, block_tokens: int) -> None:
        """Add a row with 1, take it out with -1."""
        if not sequence.is_prefilling:
            self.decodes += one
            self.decode_tokens += one * sequence.computed
        elif sequence.parent is None:
            self.prompt_tokens[sequence.level] += one * (sequence.opened_length - sequence.computed)
            if tokens := sequence.backlog_tokens(block_tokens):
                self.backlog_tokens += one * tokens
                self.backlog_prompts += one


@dataclass(slots=True)
class ModelExecutors:
    """The executors of one model, and sums over them: so decisions at each event need no loop over them."""

    executors: list[Executor] = field(default_factory=list)  # in order of joining, as in `State`
    unlike: list[Executor] = field(default_factory=list)  # one for each CAPACITY
    running_by_class: list[int] = field(default_factory=lambda: [0] * len(requests.CLASS_NAMES))
    running_by_tenant: dict[str, int] = field(default_factory=dict)  # only tenants with a running sequence

    def review(self) -> None:
        """An executor has joined or left."""
        self.unlike = list({CAPACITY(e.hello): e for e in self.executors}.values())

    def count(self, sequence: Sequence, one: int) -> None:
        """A sequence runs on one of the executors, or runs there no longer."""
        self.running_by_class[sequence.request.level] += one
        if count := self.running_by_tenant.pop(sequence.tenant, 0) + one:
            self.running_by_tenant[sequence.tenant] = count


@dataclass(slots=True)
class DraftPace:
    """How drafts of an executor went lately: what a new sequence begins with. And which sequences are asked
    for drafts, so that a step takes no loop over all its rows."""

    found_ppm: int = 1_000 * requests.UNKNOWN_PM  # as of Drafting, per million: they change slowly
    kept_ppm: int = 1_000 * requests.UNKNOWN_PM
    chosen_step: int = 0  # when the drafts of its rows were last chosen
    least_pm: int = 0  # the probability from which a draft pays
    together: int = 0  # drafts of each row that pay, of recorded steps
    last_step: int = 0  # the last result of a step with drafts
    last_pm: int = 0  # drafts that were kept in it, for each row
    times: DraftTimes = field(default_factory=DraftTimes)
    bare_step: dict[int, int] = field(
        default_factory=dict
    )  # the last one without drafts, by the size of its rows
    asked: list[Row] = field(default_factory=list)  # in each step
    in_turn: deque[Row] = field(default_factory=deque)  # a few in each step

    def begin(self, sequence: Sequence, running: int) -> None:
        """Its prompt is planned: it decodes from now on, one of so many `running` sequences. Forgets the ones
        that have left, before an eighth has: they would stay in memory."""
        if len(self.asked) + len(self.in_turn) > running + running // 8:
            self.asked = [row for row in self.asked if row[0].placement == row[1]]
            self.in_turn = deque(row for row in self.in_turn if row[0].placement == row[1])
        self.asked.append((sequence, sequence.placement))

    def ask(self, row: Row) -> None:
        """Ask a row in each step that was asked in turn."""
        row[0].drafting.in_turn = False
        self.in_turn.remove(row)
        self.asked.append(row)

    def ask_in_turn(self, row: Row) -> None:
        """Ask a row in turn that was asked in each step."""
        row[0].drafting.in_turn = True
        self.in_turn.append(row)

    def next_in_turn(self, most: int) -> list[Sequence]:
        """At most so many of the rows in turn."""
        found = list[Sequence]()
        for _ in range(len(self.in_turn) if most else 0):
            sequence, placement = row = self.in_turn.popleft()
            if sequence.placement == placement:
                self.in_turn.append(row)
                found.append(sequence)
                if len(found) == most:
                    break
        return found

    def learn(self, drafted: int, kept: int, *, refused: bool) -> None:
        """See Drafting.learn."""
        self.found_ppm += ((1_000_000 if drafted else 0) - self.found_ppm) // requests.SLOW
        for _ in range(kept):
            self.kept_ppm += (1_000_000 - self.kept_ppm) // requests.SLOW
        self.kept_ppm -= self.kept_ppm // requests.SLOW if refused else 0


@dataclass(slots=True)
class PromptShare:
    """The prompts of an executor, for the roles: see ../executors/roles.py, whose review empties the sums."""

    limit: int = 0  # with the role DECODE: longer prompts start elsewhere
    tokens: int = 0  # of prompts, computed since the last review
    squares: int = 0  # sum of the squares of the lengths of the prompts that ended since


@dataclass(slots=True)
class LatePlan:
    """The next step is planned shortly before the predicted end of the one that runs: see ../overlap.py."""

    due_us: int = 0  # when it is planned; 0: at once
    lead_us: int = 0  # so long before the predicted end


@dataclass(slots=True)
class Hold:
    """A step that waited for a slot: see `is_room_coming` in ../step_planner.py."""

    step: int = -1  # the one before it
    since_us: int = 0


@dataclass(slots=True)
class StorePace:
    """How often blocks are copied down without need: see ../kv_tiers/store.py."""

    judged_us: int = 0  # when dirty blocks were last judged
    next_eager_us: int = 0  # no eager copy before
    next_ahead_us: int = 0  # no copy of a running sequence's blocks before: the tier had no room


@dataclass(slots=True, eq=False)
class PlacedAdapter:
    """An adapter in a place of an executor, or on its way there: see ../adapters.py."""

    digest: str
    name: str
    used_us: int  # when a sequence last began with it
    loaded: bool = False
    bytes: int = 0
    took_us: int = 0  # its load


@dataclass(slots=True, eq=False)
class Executor:
    """One incarnation of one executor: its pool and its window."""

    hello: ExecHello
    epoch: int
    pool: BlockPool
    of_model: ModelExecutors
    step: int = 0  # last step planned
    in_flight: deque[InFlight] = field(default_factory=deque)
    early_results: dict[int, StepResult] = field(default_factory=dict)  # results before an older one
    running: list[Sequence] = field(default_factory=list)  # in order of admission
    fork_copies: list[tuple[int, int]] = field(default_factory=list)  # block copies for the next plan
    forked_step: int = 0  # the last step with such copies: the blocks that it reads may be free already
    generation: int = 0
    changes: int = 0  # of its rows: admitted, planned, loaded, with a result, gone
    row_changes: int = 0  # likewise, only those that `RowSums` does not follow: loads and forks
    settled: int = -1  # `changes` when no step could be planned before another one
    sums: RowSums = field(default_factory=lambda: RowSums(-1, -1))
    steps_done: int = 0
    draining: bool = False  # finishes what it has, gets nothing new
    drains_since_us: int = 0
    role: str = ""  # PREFILL, DECODE, or empty: both. See ../executors/roles.py
    sleep_by_us: int = 0  # it drains in order to sleep, and what runs then is preempted; 0: it does not
    prompts: PromptShare = field(default_factory=PromptShare)
    late_plan: LatePlan = field(default_factory=LatePlan)
    hold: Hold = field(default_factory=Hold)
    store_pace: StorePace = field(default_factory=StorePace)
    cost_model: CostModel = field(default_factory=CostModel)
    pace: StepPace = field(default_factory=StepPace)
    grammars: dict[int, bool] = field(
        default_factory=dict
    )  # by their digest, those opened last: is it compiled?
    host_fed: int = 0  # running sequences that are host-fed
    fixed_lengths: int = 0  # running sequences that only their length ends
    running_by_class: list[int] = field(default_factory=lambda: [0] * len(requests.CLASS_NAMES))
    running_by_tenant: dict[str, int] = field(default_factory=dict)  # only tenants with a running sequence
    micro_batch_rows: list[int] = field(default_factory=lambda: [0, 0])  # running sequences in A and in B
    headroom_pm: int = 150  # share of the expected growth that admission keeps free: see ../preemption.py
    chunk_tokens: int = 0  # the last chunk budget, of a tile or more, that one chunk used up
    decoded_us: int = 0  # when a step with decodes was last planned
    up: TransferLink = field(default_factory=TransferLink)  # from the tier below
    down: TransferLink = field(default_factory=TransferLink)
    drafting: DraftPace = field(default_factory=DraftPace)
    awaited_blocks: int = 0  # kept free until a sequence starts here: one found no room, see ../admission.py
    adapters: dict[int, PlacedAdapter] = field(default_factory=dict)  # by place
    awaits_copies: bool = False  # the next step waits for blocks that are being copied: see is_worth_waiting
    source: str = field(init=False)

    def __post_init__(self) -> None:
        self.source = f"executor.{self.hello.executor}"

    @property
    def has_graphs(self) -> bool:
        """Whether its steps are recorded: they compute the rows of a slot together, and take as long with
        any drafts. Else each draft that is found takes as long as a row."""
        return self.hello.max_draft_rows > 0

    def add(self, sequence: Sequence) -> None:
        """Run a sequence here, in the micro-batch with fewer rows or in its parent's."""
        if (parent := sequence.parent) is not None:
            sequence.micro_batch = parent.micro_batch
        else:
            sequence.micro_batch = int(self.micro_batch_rows[1] < self.micro_batch_rows[0])
        self.running.append(sequence)
        self._count(sequence, 1)

    def note_grammar(self, grammar: str) -> bool:
        """Note the grammar of slots that are opened. True if its engine has to compile it first; engines keep
        more grammars than are noted here."""
        if not grammar or not self.hello.reports_grammars:
            return False
        key = _grammar_key(grammar)
        compiled = self.grammars[key] = self.grammars.pop(key, False)
        if len(self.grammars) > GRAMMARS:
            del self.grammars[next(iter(self.grammars))]
        return not compiled

    def note_compiled(self, grammar: str) -> None:
        """Its engine has compiled a grammar."""
        if (key := _grammar_key(grammar)) in self.grammars:
            self.grammars[key] = True

    def remove(self, sequence: Sequence) -> None:
        """Run a sequence here no longer."""
        self.running.remove(sequence)
        if not sequence.is_prefilling and sequence.computed + 1 < sequence.max_length:
            self.pace.observe_early_end()
        self._count(sequence, -1)

    def row_sums(self) -> RowSums:
        """The sums, counted again only after a change that they do not follow: so an arrival takes no loop
        over all rows of all executors."""
        sums = self.sums
        if sums.row_changes == self.row_changes:
            if sums.changes != self.changes:
                sums.changes, sums.speed, sums.ends = self.changes, 0, {}
                sums.base, sums.base_us = None, -1
            return sums
        self.sums = sums = RowSums(self.row_changes, self.changes)
        for sequence in self.running:
            sums.count(sequence, 1, self.hello.block_tokens)
        return sums

    def change_rows(self) -> None:
        """Count a change of the rows that the sums do not follow."""
        self.changes += 1
        self.row_changes += 1

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """So many more tokens of a running sequence are planned, or found computed: the sums follow."""
        self._add_to_sums(sequence, -1)
        sequence.computed += tokens
        self._add_to_sums(sequence, 1)

    def _add_to_sums(self, sequence: Sequence, one: int) -> None:
        self.changes += 1
        if self.sums.row_changes == self.row_changes:
            self.sums.count(sequence, one, self.hello.block_tokens)

    def count_decodes(self, rows: int) -> None:
        """So many decodes are planned: each has a token more in its KV cache."""
        self.sums.decode_tokens += rows

    def _count(self, sequence: Sequence, one: int) -> None:
        self._add_to_sums(sequence, one)
        self.host_fed += one if sequence.host_fed else 0
        self.fixed_lengths += one if sequence.has_fixed_end else 0
        self.running_by_class[sequence.request.level] += one
        self.micro_batch_rows[sequence.micro_batch] += one
        self.of_model.count(sequence, one)
        if count := self.running_by_tenant.pop(sequence.tenant, 0) + one:
            self.running_by_tenant[sequence.tenant] = count


@dataclass(slots=True)
class ModelKind:
    """Executors of one model and digest: see ../load_shedding.py. `members` includes those in a reset."""

    digest: str
    members: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Roles:
    """How many executors of a model only prefill, and what that was chosen by: see ../executors/roles.py."""

    since_us: int  # of the last review
    prefills: int = 0
    wanted: int = 0  # at the last review
    periods: int = 0  # reviews in a row that wanted it
    waiting: int = 0  # prompt tokens that waited then
    demand: int = 0  # prompt tokens a second
    prompt_tokens: int = 0  # length of the prompt of a typical prompt token


@dataclass(slots=True)
class Sleeper:
    """An executor that sleeps, falls asleep (its last ExecHello is not `asleep`) or wakes."""

    hello: ExecHello
    waking: bool = False


@dataclass(frozen=True, slots=True)
class DroppedExecutor:
    """A lost executor that may come back, and the requests (tenant, id) that its death is counted against."""

    epoch: int
    blamed: list[tuple[str, str]]


@dataclass(slots=True)
class Chain:
    """Keys, one after another. Each names all before it: hashes of the state have the last one alone."""

    keys: bytes = b""


class SessionEvents(Protocol):
    """What requests mean for the sessions that they are part of: here nothing. See ../sessions/events.py."""

    learns: bool

    def on_request(self, state: State, request: Request) -> None:
        """A request has come, before the keys of its prompt are computed."""
        return

    def on_admitted(self, state: State, executor: Executor, sequence: Sequence) -> None:
        """A new prompt starts, and has its cached blocks."""
        return

    def on_closed(self, state: State, executor: Executor, sequence: Sequence) -> None:
        """A running sequence ends, and still has its blocks."""
        return

    def on_ended(self, state: State, request: Request) -> None:
        """The last choice of a request is over, and the functions that its answer calls are known."""
        return

    def on_event(self, state: State) -> None:
        """After each event."""
        return

    def on_cut(self, state: State) -> None:
        """Peers or messages were lost: requests may have come and not been seen."""
        return

    def on_evicted(self, state: State) -> None:
        """A tier below has evicted blocks."""
        return

    def chance_pm(self, state: State, seq: int, at: int, tenant: str) -> int:
        """The chance that the block is used again which was entry `at` of the table of sequence `seq`."""
        return state.reuse.chance_pm(tenant)

    def needs_ticks(self) -> bool:
        """Whether something is left to do without an event."""
        return False

    def on_verb(self, state: State, verb: SessionVerb) -> SessionAnswer:
        """A client asks for a session, or for something to be done with its blocks."""
        return SessionAnswer(state="unknown")

    def rows(self, state: State, tenant: str, most: int) -> list[SessionAnswer]:
        """The sessions of a tenant, or of all for an empty name, the least idle first; `most` of them."""
        return []

    def count(self, tenant: str) -> int:
        """How many there are."""
        return 0

    def counted(self, state: State) -> dict[str, Any]:
        """What was learned, and counts, without a look at any block: for metrics, each second."""
        return {}


@dataclass(slots=True)
class NoSessions(SessionEvents):
    """No session is followed: policy `sessions=off`, or an installation without ../sessions."""

    learns: bool = False


@dataclass(slots=True)
class State:
    """The whole state; `now_us` is the time of the event being handled."""

    limits: Limits
    now_us: int = 0
    draining: bool = False
    next_seq: int = 1
    requests: dict[tuple[str, str], Request] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    suspects: set[tuple[str, str]] = field(default_factory=set)  # requests that ran when an executor died
    waiting: WaitingQueue = field(init=False)
    blocked_on: tuple[int, ...] = ()  # what admission saw when group [0] had to wait: see _blocking_state
    mean_output_tokens: int = 256  # generated tokens of a sequence, a moving average
    idle_since_us: int = 0  # since when there is no request; 0: there is one
    reuse: Reuse = field(default_factory=Reuse)
    sessions: SessionEvents = field(default_factory=NoSessions)
    tiers: Tiers = field(default_factory=Tiers)
    executors: dict[str, Executor] = field(default_factory=dict)
    by_model: dict[str, ModelExecutors] = field(default_factory=dict)  # models with an executor
    model_kinds: dict[str, ModelKind] = field(default_factory=dict)  # model -> the kind that serves it
    roles: dict[str, Roles] = field(default_factory=dict)  # by model
    roles_due_us: int = 0  # the next review
    some_leave: bool = False  # an executor drains or only prefills: ../executors/moves.py sets it back
    excluded: dict[str, ExecHello] = field(default_factory=dict)  # executors of other kinds, which stay out
    asleep: dict[str, Sleeper] = field(default_factory=dict)  # executors by id: see ../executors/sleep.py
    dropped: dict[str, DroppedExecutor] = field(default_factory=dict)  # by id
    detokenizers: dict[str, int] = field(default_factory=dict)  # id -> epoch
    draining_detokenizers: set[str] = field(default_factory=set)
    moved: dict[str, tuple[int, list[int]]] = field(default_factory=dict)  # shard -> epoch, sequences
    tombstones: dict[tuple[str, str], int] = field(default_factory=dict)  # cancelled before arrival: when
    deadlines: Deadlines = field(default_factory=Deadlines)
    # (tenant, request) -> until when, submission (received_wall_us, attempt), the refusal
    refused: dict[tuple[str, str], tuple[int, tuple[int, int], Rejected]] = field(default_factory=dict)
    ended: EndedRequests = field(default_factory=EndedRequests)
    step_log: StepLog = field(default_factory=StepLog)
    quotas: Quotas = field(default_factory=Quotas)
    counters: Counters = field(default_factory=Counters)
    commands: list[Send] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = WaitingQueue(self.limits.policy, tuple(c.age_us for c in self.limits.classes))

    def add_executor(self, hello: ExecHello) -> Executor:
        """An executor joins, with empty slots."""
        pool = BlockPool(blocks=hello.blocks, slots=hello.slots, block_tokens=hello.block_tokens)
        served = self.by_model.setdefault(hello.model, ModelExecutors())
        self.executors[hello.executor] = executor = Executor(hello, hello.exec_epoch, pool, served)
        served.executors.append(executor)
        served.review()
        return executor

    def pop_executor(self, executor_id: str) -> Executor | None:
        """An executor is gone, with all that runs there."""
        executor = self.executors.pop(executor_id, None)
        if executor is not None:
            served = executor.of_model
            served.executors.remove(executor)
            served.review()
            for sequence in executor.running:
                served.count(sequence, -1)
            if not served.executors:
                del self.by_model[executor.hello.model]
        return executor

    def begin_drain(self, executor: Executor) -> None:
        """An executor finishes what it has, and gets nothing new."""
        executor.draining, executor.drains_since_us, self.some_leave = True, self.now_us, True

    def watch(self, at_us: int, seq: int) -> None:
        """Look at a sequence at `at_us`."""
        self.deadlines.watch(at_us, seq, self.sequences)

    def note_dropped(self, executor_id: str, epoch: int, blamed: list[tuple[str, str]]) -> None:
        """Remember a lost executor, at most MAX_DROPPED."""
        self.dropped.pop(executor_id, None)
        self.dropped[executor_id] = DroppedExecutor(epoch, blamed)
        if len(self.dropped) > MAX_DROPPED:
            del self.dropped[next(iter(self.dropped))]

    def note_moved(self, shard: str, epoch: int, seqs: list[int]) -> None:
        """Remember which sequences of a lost detokenizer have moved, at most MAX_MOVED."""
        self.moved.pop(shard, None)
        if seqs:
            self.moved[shard] = (epoch, seqs)
        while len(self.moved) > 1 and sum(len(moved) for _, moved in self.moved.values()) > MAX_MOVED:
            del self.moved[next(iter(self.moved))]

    def send(self, to: str, message: Message, trace: str = "") -> None:
        """Put a message among the commands of this event."""
        self.commands.append(Send(to, message, trace))
