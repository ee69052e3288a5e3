"""Requests and sequences. `Sequence.tokens` is the one authority on a sequence's tokens.

tokens:   prompt ........ | generated, applied .... |
computed: KV planned up to here, advanced when a step is planned
planned_length: len(tokens) + tokens that steps in flight will sample

Also here: service classes (`SloClass`), times to check sequences (`Deadlines`), ended requests
(`EndedRequests`), and the core's input (`Event`) and output (`Send`).
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from shared import messages
from shared.errors import SetupError, from_code
from shared.telemetry import traces
from shared.telemetry.traces import LEAVING_DECISIONS, Choice, Reply, RequestFacts

MAX_DECISIONS = 64  # of a sequence, for the trace: one Close carries them
MAX_CHUNKS = 32  # likewise; later ones count as part of the last
PIN_AFTER_PREEMPTIONS = 3
MAX_ENDED = 1_000
MAX_IDS = 256  # in one Tokens: with 20 alternatives each 48 of the 64 KiB of a message

CLASS_NAMES = ("interactive", "standard", "batch")  # service classes by level, the highest first
DEFAULT_CLASSES = "interactive=10000/50/0,standard=60000/100/20000,batch=0/500/60000"


class Phase(Enum):
    """The life of a sequence. It only moves down, except back to WAITING by a preemption or a requeue."""

    WAITING = "waiting"
    RUNNING = "running"
    CLOSING = "closing"  # Close sent, Ended awaited
    ENDED = "ended"


@dataclass(slots=True)
class Request:
    """One accepted request; `tokenized.tokens` is the prompt."""

    tokenized: messages.Tokenized
    trace: str
    tokenizer: str
    arrival_us: int
    deadline_us: int
    level: int = 1  # of its class, 0 is the highest
    start_deadline_us: int = 0  # it fails if it has not started by then: its class's limit. 0: none
    executor_deadline_us: int = 0  # it fails if its model has no executor by then; 0: it has one
    unchecked: bool = False  # it came before an executor: whether it fits is checked when one joins
    transit_us: int = 0
    attempt: int = 1  # of the reply stream: one more each time another detokenizer takes over
    shard: str = ""  # detokenizer id, "" while none is alive
    backup_shard: str = ""  # a second detokenizer, with a copy of the request; "" if there is none
    opened_us: int = 0  # when it was last opened at its detokenizer
    model_digest: str = ""  # of the executors that have generated its tokens, or are expected to
    sequences: list[Sequence] = field(default_factory=list)
    detached: bool = False
    calls: tuple[str, ...] = ()  # names of the functions that its answers call
    prompt_scores: list[messages.PromptTokens] = field(default_factory=list)  # in order, without a gap
    promotions: int = 0  # classes that it has risen by aging
    executor_deaths: int = 0  # deaths of executors that it may have caused: see ../admission.py
    acquittals: int = 0  # of these deaths, later found to be none
    tokens_at_death: int = 0  # tokens that it had generated at the last of them
    reply: Reply = field(default_factory=Reply)  # the detokenizer's timestamps, after it has ended

    @property
    def is_traced(self) -> bool:
        """Whether spans of it are exported."""
        return bool(self.tokenized.parent_span) and traces.is_sampled(self.trace)

    def keep_prompt_scores(self, piece: messages.PromptTokens) -> bool:
        """Keep a piece of the prompt's log probabilities, for another detokenizer. False if it is known."""
        last = self.prompt_scores[-1] if self.prompt_scores else None
        known = 0 if last is None else last.first + len(last.ids)
        if piece.first + len(piece.ids) <= known:
            return False
        self.prompt_scores.append(piece)
        return True

    @property
    def key(self) -> tuple[str, str]:
        return self.tokenized.tenant, self.tokenized.request

    @property
    def client(self) -> tuple[str, int]:
        """The unit of fair queueing: the tenant, and the level after aging."""
        return self.tokenized.tenant, self.level - self.promotions


@dataclass(slots=True)
class ChunkRecord:
    """A prompt chunk, for the trace; `done_us` is 0 until the result of its step."""

    planned_us: int
    tokens: int
    step: int
    executor: str
    done_us: int = 0


@dataclass(frozen=True, slots=True)
class Tail:
    """The partial block at the end of a preempted sequence: entry `at` of its table, with `valid` tokens.
    Only this sequence uses its key, which holds for one root."""

    at: int = 0
    valid: int = 0
    key: bytes = b""
    root: bytes = b""


NO_TAIL = Tail()


@dataclass(slots=True)
class Turn:
    """The preemptions of a sequence, and what spares it from the next one: see ../preemption.py."""

    preemptions: int = 0
    ceded: int = 0  # of these, after its turn, for a tenant without a running sequence: at most all of them
    until_us: int = 0  # its turn lasts until then: it has run for as long as it had waited
    tokens: int = 1  # and until it has computed so many tokens: as many as it had lost
    pinned: bool = False  # preempted often: it reserves all blocks that it may need, and is never a victim
    protected_until_us: int = 0  # it has just resumed: others are preempted before it
    price: int = 0  # when it was last a candidate


@dataclass(slots=True)
class TierCopies:
    """Copies of a running sequence's blocks to and from a tier: see ../kv_tiers. New at each admission."""

    load_job: int = 0  # the job that loads blocks of its table; no row of it is planned before
    found: tuple[int, ...] = ()  # what a lookup has found of its keys, for the loads after the first one
    found_more: bool = False  # the keys after those may be there, too
    loads_until: int = 0  # tokens that it has after the loads that follow that one, 0: none follow
    stored: int = 0  # entries of its table whose copy down was started while it runs: see moves.py
    store_job: int = 0  # the last job of these copies


@dataclass(slots=True)
class RecomputeDebt:
    """The time to compute again what a preemption has lost; new at each admission."""

    owed_us: int = 0  # predicted; 0: nothing is owed, or it is paid
    paid_us: int = 0  # measured, so far


@dataclass(slots=True)
class Scores:
    """The log probabilities of a sequence's generated tokens, from token `first` on: those before it were
    generated at another scheduler. The columns are those of Tokens."""

    first: int = 0
    logprobs: messages.Floats = field(default_factory=messages.floats)
    top_counts: messages.Ints = field(default_factory=messages.ints)
    top_ids: messages.Ints = field(default_factory=messages.ints)
    top_logprobs: messages.Floats = field(default_factory=messages.floats)


def add_scores(
    to: Scores | messages.Tokens, result: messages.StepResult | Scores, index: int, top: slice
) -> None:
    """Append entry `index` of `result`, with its alternatives at `top`."""
    to.logprobs.append(result.logprobs[index])
    to.top_counts.append(result.top_counts[index])
    to.top_ids.extend(result.top_ids[top])
    to.top_logprobs.extend(result.top_logprobs[top])


UNKNOWN_PM = 500  # of drafts that nothing is known of
FIRST, FAST, SLOW = (
    6,
    32,
    64,
)  # drafts over which a share is learned: of a sequence at first and later, of an executor


@dataclass(slots=True)
class Drafting:
    """The drafts of a sequence: tokens that its executor foresees, and computes beside its next token.

    `Sequence.computed` counts a draft as computed when its step is planned, and no longer once the result
    has refused it. So it is an upper bound of the slot's length, by at most `in_flight`."""

    in_flight: int = 0  # drafts of its steps without a result
    count: int = -1  # that pay in its next row; -1: not known yet
    found_pm: int = UNKNOWN_PM  # of its rows that might have drafts, those that had
    kept_pm: int = UNKNOWN_PM  # of its drafts after kept ones, those that were kept
    tried_step: int = 0  # when a draft of it was last refused, see ../speculation.py
    quiet: int = 0  # its last rows without a draft that was found
    in_turn: bool = False  # it is one of DraftPace.in_turn
    accepted: int = 0  # drafts that became tokens
    rejected: int = 0

    def learn(self, drafted: int, kept: int, *, refused: bool) -> None:
        """`kept` of the `drafted` drafts of a row became tokens. `refused`: the one after them did not."""
        self.found_pm += ((1_000 if drafted else 0) - self.found_pm) // FIRST
        self.quiet = 0 if drafted else self.quiet + 1
        for right in [True] * kept + [False] * refused:
            over = min(FIRST + self.accepted + self.rejected, FAST)
            self.kept_pm += ((1_000 if right else 0) - self.kept_pm + over // 2) // over
        self.accepted += kept
        self.rejected += drafted - kept

    def choose(self, least_pm: int, most: int) -> None:
        """Choose how many drafts pay, at most `most`: those with a probability of `least_pm` to be kept."""
        chance, self.count = self.kept_pm, 0
        while chance >= least_pm and self.count < most:
            self.count += 1
            chance = chance * self.kept_pm // 1_000


@dataclass(slots=True, eq=False, kw_only=True)
class StepFields:
    """The fields of a sequence that its decodes use. In a class of their own they lie side by side in memory:
    else slots are in the order of the alphabet, and a step of many executors misses the caches more often."""

    seq: int
    request: Request
    tokens: array[int]
    prompt_tokens: int
    max_length: int
    stop_ids: frozenset[int]
    placement: int = 0  # counts admissions to an executor: rows of an earlier placement are ignored
    slot: int = -1
    table_capacity: int = 0  # tokens that fit into the entries of the table that the executor has
    opened_length: int = 0  # len(tokens) when the slot was opened: host-fed up to here
    computed: int = 0
    drafting: Drafting = field(default_factory=Drafting)
    first_token_us: int = 0
    last_token_us: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(StepFields):
    """One choice of a request."""

    choice: int
    seed: int
    host_fed: bool = False  # its next input needs the host: planned again only after its result
    group: int = 0  # the number of the group it was last queued in
    level: int = 0  # its class while it runs, after aging
    micro_batch: int = 0  # 0 or 1, in mode two_batch
    phase: Phase = Phase.WAITING
    executor: str = ""
    generation: int = 0  # of the slot
    table: list[int] = field(default_factory=list)
    table_sent: int = 0  # entries of the table that the executor has
    reserved: int = 0  # blocks reserved and not yet allocated
    opened_after: int = 0  # the executor's last step then: no step up to it used this slot
    keyed: tuple[bytes, int] = (b"", 0)  # root and block size that `keys` were made with
    keys: list[bytes] = field(default_factory=list)  # of its full blocks of known tokens
    registered: int = 0  # entries of the table with keys in the prefix cache
    adopted: int = 0  # entries up to the last one that was found in the prefix cache
    most_computed: int = 0  # the most that was ever computed or cached: computing less is recomputation
    charged_tokens: int = 0  # generated tokens that its client has been charged for
    scores: Scores | None = None  # if its request asks for log probabilities: for another detokenizer
    tail: Tail = NO_TAIL  # of its last preemption
    turn: Turn = field(default_factory=Turn)
    copies: TierCopies = field(default_factory=TierCopies)
    debt: RecomputeDebt = field(default_factory=RecomputeDebt)
    compiles_grammar: bool = False  # its executor compiles its grammar, which the next token needs
    parent: Sequence | None = None  # computes the prompt for this sequence, until the fork
    final: int = 0
    reason: str = ""
    close_deadline_us: int = 0
    close: messages.Close | None = None  # as sent, to send it again
    vector: bytes = b""  # of a request with `pooling`, once it is computed
    admitted_us: int = 0
    prefill_chunks: int = 0
    steps: int = 0  # without the decodes since its admission
    cached_tokens: int = 0  # tokens from a prefix cache or tier, never computed for it
    recomputed_tokens: int = 0
    decisions: list[messages.Decision] = field(default_factory=list)
    chunks: list[ChunkRecord] = field(default_factory=list)
    last_executor: str = ""  # kept after it has left the executor

    @property
    def tenant(self) -> str:
        return self.request.tokenized.tenant

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def has_fixed_end(self) -> bool:
        """Only its length ends it, or a stop string or its client."""
        return not self.stop_ids

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.opened_length

    def backlog_tokens(self, block_tokens: int) -> int:
        """Tokens to compute before it decodes, without those that are loaded or that its parent computes."""
        if self.parent is not None:
            return 0
        known = self.computed
        if self.copies.load_job:
            known = max(known, len(self.table) * block_tokens, self.copies.loads_until)
        return max(self.opened_length - known, 0)

    @property
    def needs_grammar(self) -> bool:
        """All tokens but the last are computed or planned, and the next sample must wait for the grammar."""
        return self.compiles_grammar and self.computed + 1 >= self.opened_length

    @property
    def planned_length(self) -> int:
        """Its length after every step in flight, if all drafts are kept: a decode samples a token, and so
        does the end of a prompt."""
        return self.opened_length if self.computed < self.opened_length else self.computed + 1

    @property
    def steps_planned(self) -> int:
        """The number of steps that it was in."""
        return self.steps + max(self.computed - self.opened_length, 0)

    @property
    def is_live(self) -> bool:
        return self.phase in (Phase.WAITING, Phase.RUNNING)

    @property
    def due_us(self) -> int:
        """When it is overdue; for a closing one, when the wait for its Ended is over."""
        request = self.request
        if self.is_live:
            begun = any(s.admitted_us for s in request.sequences)
            start_us = request.executor_deadline_us or request.start_deadline_us
            return request.deadline_us if begun or not start_us else min(request.deadline_us, start_us)
        return (  # without a detokenizer none has its Close yet
            self.close_deadline_us if request.shard else max(self.close_deadline_us, request.deadline_us)
        )

    def leave(self) -> None:
        """Forget the executor; rows in flight are ignored from now on."""
        self.most_computed = max(self.most_computed, min(self.computed, len(self.tokens)))
        self.placement += 1
        self.executor, self.slot, self.parent = "", -1, None
        self.table, self.table_sent, self.table_capacity, self.registered, self.reserved = [], 0, 0, 0, 0
        self.steps = self.steps_planned
        self.opened_length = self.computed = self.adopted = 0
        self.copies, self.debt = TierCopies(), RecomputeDebt()
        self.compiles_grammar = False
        self.drafting.in_flight, self.drafting.count = 0, -1
        self.drafting.quiet, self.drafting.in_turn = 0, False

    def record_decision(self, now_us: int, what: str, why: str, **numbers: int) -> None:
        """Record a decision for the request's trace."""
        at_us = now_us - self.request.arrival_us
        if len(self.decisions) < MAX_DECISIONS:
            self.decisions.append(
                messages.Decision(at_us=at_us, what=what, why=why, numbers=tuple(numbers.items()))
            )

    def record_chunk(self, now_us: int, tokens: int, step: int) -> ChunkRecord:
        """Record a prompt chunk in the step that is being planned."""
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(ChunkRecord(now_us, tokens, step, self.executor))
        else:
            self.chunks[-1].tokens += tokens
        return self.chunks[-1]


def timings_of(sequence: Sequence, now_us: int) -> messages.Timings:
    """The times of a sequence's stages so far."""
    tokenized = sequence.request.tokenized
    first = sequence.first_token_us or sequence.last_token_us
    handled_wall_us = tokenized.handled_wall_us or tokenized.received_wall_us
    arrival_us = sequence.request.arrival_us
    return messages.Timings(
        received_wall_us=tokenized.received_wall_us,
        tokenize_us=max(tokenized.sent_wall_us - handled_wall_us, 0),
        transit_us=sequence.request.transit_us,
        queue_us=max(sequence.admitted_us - arrival_us, 0) if sequence.admitted_us else 0,
        prefill_us=max(first - sequence.admitted_us, 0) if first else 0,
        decode_us=max(sequence.last_token_us - first, 0),
        prefill_chunks=sequence.prefill_chunks,
        steps=sequence.steps_planned,
        received_us=max(handled_wall_us - tokenized.received_wall_us, 0),
        live_us=max(now_us - arrival_us, 0),
    )


def chunks_of(sequence: Sequence, now_us: int) -> tuple[messages.Chunk, ...]:
    """Its prompt chunks so far. A chunk without a result ended when its sequence left the executor, or lasts
    until now."""
    arrival_us = sequence.request.arrival_us
    left_us = [arrival_us + d.at_us for d in sequence.decisions if d.what in LEAVING_DECISIONS]
    return tuple(
        messages.Chunk(
            at_us=note.planned_us - arrival_us,
            took_us=(note.done_us or min([*(at for at in left_us if at >= note.planned_us), now_us]))
            - note.planned_us,
            tokens=note.tokens,
            step=note.step,
            executor=note.executor,
        )
        for note in sequence.chunks
    )


def close_of(sequence: Sequence, now_us: int, final: int, reason: str) -> messages.Close:
    """The Close of a sequence that ends now after `final` tokens. Drafts that became tokens after these,
    beyond a stop string, were computed in vain."""
    drafting = sequence.drafting
    accepted = min(drafting.accepted, max(final - 1, 0))  # the first token is no draft
    return messages.Close(
        seq=sequence.seq,
        final=final,
        reason=reason,
        usage=messages.Usage(
            prompt_tokens=sequence.prompt_tokens,
            completion_tokens=final,
            cached_tokens=sequence.cached_tokens,
        ),
        timings=timings_of(sequence, now_us),
        decisions=tuple(sequence.decisions),
        executor=sequence.last_executor,
        chunks=chunks_of(sequence, now_us),
        vector=sequence.vector,
        accepted_drafts=accepted if sequence.request.tokenized.prediction else -1,
        rejected_drafts=drafting.rejected + drafting.accepted - accepted,
    )


def request_facts(request: Request, now_us: int) -> RequestFacts:
    """The data for the spans of a request; a running one is recorded as if it ended now."""
    tokenized = request.tokenized
    choices = []
    for s in request.sequences:
        close = s.close or close_of(s, now_us, s.generated, "")
        tokens = s.final if s.close else s.generated
        choices.append(Choice(index=s.choice, tokens=tokens, reason=s.reason or s.phase.value, close=close))
    failed = next((c.close for c in choices if c.close.code), None)
    return RequestFacts(
        request=tokenized.request,
        tenant=tokenized.tenant,
        model=tokenized.model,
        format=tokenized.format,
        inbox=tokenized.inbox,
        received_wall_us=tokenized.received_wall_us,
        detokenizer=f"detokenizer.{request.shard}" if request.shard else "",
        choices=tuple(choices),
        reply=request.reply,
        error=from_code(failed.code, failed.message, failed.retry_after_ms) if failed else None,
    )


@dataclass(frozen=True, slots=True)
class SloClass:
    """The targets of one service class.

    ttft_us   longest predicted time to the first token: a request that would wait longer is refused at once
              with a time to retry, and one that has waited so long fails. 0: no limit
    tbt_us    longest time between two tokens: limits the prompt chunks in steps with its decodes
    age_us    a request that has waited so long counts as one class higher. 0: never
    """

    name: str
    ttft_us: int
    tbt_us: int
    age_us: int


def parse(text: str) -> tuple[SloClass, ...]:
    """The classes by level, from `name=ttft/tbt/age,...` in milliseconds; a class that is not named keeps its
    default. Raises SetupError."""
    found = _read(DEFAULT_CLASSES) | _read(text)
    return tuple(found[name] for name in CLASS_NAMES)


def level_of(name: str) -> int:
    """The level of a class, 0 is the highest. An unknown name, which the tokenizer refuses, counts as 1."""
    return CLASS_NAMES.index(name) if name in CLASS_NAMES else 1


def _read(text: str) -> dict[str, SloClass]:
    found: dict[str, SloClass] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, numbers = part.partition("=")
        try:
            ttft_ms, tbt_ms, age_ms = (int(number) for number in numbers.split("/"))
        except ValueError:
            raise SetupError(_wrong(part, "is not name=ttft/tbt/age in whole milliseconds")) from None
        if name not in CLASS_NAMES:
            raise SetupError(_wrong(part, f"names no class: {', '.join(CLASS_NAMES)}"))
        if name in found:
            raise SetupError(_wrong(part, "names a class for the second time"))
        if min(ttft_ms, age_ms) < 0 or tbt_ms < 1:
            raise SetupError(_wrong(part, "has a time below zero, or no time between tokens"))
        found[name] = SloClass(name, ttft_ms * 1000, tbt_ms * 1000, age_ms * 1000)
    return found


def _wrong(part: str, why: str) -> str:
    return f"setting slo: {part!r} {why}; for example slo={DEFAULT_CLASSES}"


@dataclass(slots=True)
class Deadlines:
    """A heap of times, in us, at which to check sequences for their deadlines.

    An entry is a lower bound: a sequence that is not due yet gets a new entry when it is checked. So moving a
    deadline takes no time. An ended sequence leaves its entry in the heap; when most entries are of ended
    ones they are removed.
    """

    heap: list[tuple[int, int]] = field(default_factory=list)  # at_us, sequence

    def watch(self, at_us: int, seq: int, live: Mapping[int, object]) -> None:
        """Check a sequence at `at_us`; `live` has the sequences that have not ended."""
        heapq.heappush(self.heap, (at_us, seq))
        if len(self.heap) > 64 + 2 * len(live):
            first = {seq: at_us for at_us, seq in sorted(self.heap, reverse=True) if seq in live}
            self.heap = sorted((at_us, seq) for seq, at_us in first.items())

    def pop(self, now_us: int) -> int | None:
        """A sequence to check now."""
        return heapq.heappop(self.heap)[1] if self.heap and self.heap[0][0] <= now_us else None


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is kept of an ended request."""

    inbox: str
    trace: str  # the traceparent of its root span, empty when not traced
    facts: RequestFacts
    ended_us: int  # by the scheduler's monotonic clock


@dataclass(slots=True)
class EndedRequests:
    """The last MAX_ENDED ended requests, by (tenant, request): for late resends and for
    `headrace.v1.trace.<request>`."""

    by_key: OrderedDict[tuple[str, str], EndedRequest] = field(default_factory=OrderedDict)

    def add(self, key: tuple[str, str], trace: EndedRequest) -> None:
        """Add an ended request, and drop the oldest."""
        self.by_key[key] = trace
        self.by_key.move_to_end(key)
        while len(self.by_key) > MAX_ENDED:
            self.by_key.popitem(last=False)

    def find(self, wanted: Callable[[tuple[str, str]], bool]) -> EndedRequest | None:
        """The newest ended request whose tenant and id are `wanted`."""
        key = next(filter(wanted, reversed(self.by_key)), None)
        return None if key is None else self.by_key[key]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message from the actor `source` (kind.id)."""

    source: str
    message: messages.Message
    trace: str = ""
    transit_us: int = 0  # time on the way, by wall clocks: for spans, never for a decision


@dataclass(frozen=True, slots=True)
class PeerReady:
    """An actor is ready, or is a new incarnation (`epoch`) of itself."""

    kind: str
    actor: str
    epoch: int
    arena_generation: int = -1  # of the arena that an executor maps, 0 for none; -1: not reported


@dataclass(frozen=True, slots=True)
class PeerLost:
    """An actor missed its heartbeats or stopped. Not `died`: an executor now belongs to another scheduler."""

    kind: str
    actor: str
    died: bool = True


@dataclass(frozen=True, slots=True)
class PeerDraining:
    """An actor finishes its work and takes nothing new."""

    kind: str
    actor: str


@dataclass(frozen=True, slots=True)
class StreamLost:
    """Messages from `source` are gone for good."""

    source: str


@dataclass(frozen=True, slots=True)
class BrokerBack:
    """The broker was away: requests may have been sent meanwhile that nothing here has seen."""


@dataclass(frozen=True, slots=True)
class OffloadReady:
    """A kv_offload is ready, or is a new incarnation of itself; its arena serves executors of its host."""

    actor: str
    epoch: int
    host_id: str
    generation: int  # of its arena
    tiers: tuple[str, ...]  # l1, l2: those that work now


@dataclass(frozen=True, slots=True)
class OffloadLost:
    """A kv_offload missed its heartbeats or stopped."""

    actor: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; deadlines may be due."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Take nothing new."""


@dataclass(frozen=True, slots=True)
class DrainTimedOut:
    """The time to drain is over: remaining requests fail."""


@dataclass(frozen=True, slots=True)
class QuotasChanged:
    """The quotas of the tenants, in place of those before."""

    quotas: tuple[tuple[str, int, int], ...]  # tenant, requests and tokens a minute; 0: unlimited


@dataclass(frozen=True, slots=True)
class SleepSet:
    """Put executors to sleep or wake them; no name: all."""

    asleep: bool
    executors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The policies named in `policy`, `kind=name,...`, in place of those before: see ../core.py."""

    policy: str


Event = (
    Arrived
    | PeerReady
    | PeerDraining
    | PeerLost
    | StreamLost
    | BrokerBack
    | OffloadReady
    | OffloadLost
    | Ticked
    | DrainRequested
    | DrainTimedOut
    | QuotasChanged
    | PolicySet
    | SleepSet
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to the actor `to` (kind.id)."""

    to: str
    message: messages.Message
    trace: str = ""
