"""Every message that crosses the wire is a frozen dataclass of this module.

    liveness             the heartbeat of every actor
    requests and text    client -> tokenizer -> scheduler -> detokenizer -> client
    steps                scheduler -> executor: plans; executor -> scheduler: results
    key-value tiers      scheduler <-> kv_offload, the copies that an executor makes, kv_offload <-> its peers

The position of a field is its position on the wire; golden bytes (tests/contract) freeze it. New fields go
last and have a default. Per-row integers and floats are columns: arrays, which the wire carries as raw bytes.

Units are in the names: `_us` are durations for decisions, `_wall_us` wall-clock stamps for spans only. A
*sequence* is one choice of one request (int32); slots, token indices and results belong to sequences. A
*token index* counts the generated tokens of a sequence from 0. A message with more than `codec.PAGE_TOKENS`
tokens travels in parts, numbered `part`/`parts`, each with its slice of `tokens`; the first part carries the
other fields. Any other message that is too long travels as `Fragment`s of its bytes. The names AuxMsg,
KvRenew and KvRenewed are reserved: they belonged to kinds that were deleted.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    IntArray = array[int]
    FloatArray = array[float]
else:  # array.array cannot be subscripted before Python 3.12
    IntArray = FloatArray = array

ATTEMPTS = 100  # attempt numbers per tokenizer, more than one uses: a takeover starts above the previous ones
MOVED = 410  # code of a Rejected or Cancel: another detokenizer answers the client of this request

EMBEDDING, EMBEDDING_BASE64 = "embedding", "embedding_base64"  # formats of a request without an answer
WHOLE_VECTOR = -1  # of `pooling`
MANY_CALLS = 2  # of `most_calls`: any number
FROM_HOST, FROM_DEVICE, AT_DEVICE = 0, 1, 2  # of `StepPlan.from_device`
NO_ROOM, PRESENT = -1, -2  # in `KvReserved.offsets`; PRESENT: in L1 already, no copy needed

ROW_REFUSED = "refused: "  # prefix of a row error that is the client's fault: a 400, not a 500
SEGMENT_LANES = ("compute A", "compute B", "comm A", "comm B")  # of the micro-batches A and B of a step

FEW = 16  # values; packing more with `struct` takes a third of the time of `array`
Ints = Annotated[IntArray, "i"]  # int32 column, little-endian bytes on the wire
Longs = Annotated[IntArray, "q"]  # int64 column
Floats = Annotated[FloatArray, "f"]  # float32 column


def ints(values: Iterable[int] = ()) -> Ints:
    """An int32 column. Raises OverflowError for a value that does not fit."""
    if type(values) is list and len(values) > FEW:
        try:
            return array("i", struct.pack(f"{len(values)}i", *values))
        except struct.error:
            return array("i", values)  # raises the error that names the cause
    return array("i", values)


def longs(values: Iterable[int] = ()) -> Longs:
    """An int64 column."""
    return array("q", values)


def floats(values: Iterable[float] = ()) -> Floats:
    """A float32 column."""
    return array("f", values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Every actor, about once a second: its state and its load."""

    kind: str
    actor: str
    host_id: str
    state: str  # starting, ready, draining, stopped, failed
    model: str = ""
    load: tuple[tuple[str, int], ...] = ()
    interval_us: int = 1_000_000
    arena: str = ""  # kv_offload: shared memory name, carries the generation
    arena_generation: int = 0  # kv_offload: the current one; executor: the one it has mapped
    tiers: tuple[str, ...] = ()
    rates: tuple[int, ...] = ()  # bytes per second per tier
    scheduler: str = ""  # executor: id of the scheduler that welcomed it
    aliases: tuple[str, ...] = ()  # tokenizer: further names of its model
    model_digest: str = ""  # scheduler: of the executors that serve its model, as in ExecHello


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen. Opaque to the scheduler; `temperature == 0` is greedy."""

    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # prompt and output, as in the CTRL paper
    presence_penalty: float = 0.0  # output only, as in the OpenAI API
    frequency_penalty: float = 0.0
    bias_ids: Ints = field(default_factory=ints)
    bias_values: Floats = field(default_factory=floats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one sequence; `cached_tokens` of the prompt came from the prefix cache or a tier."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The durations of a request's phases, in this order."""

    received_wall_us: int = 0
    tokenize_us: int = 0
    transit_us: int = 0  # tokenizer -> scheduler, from wall stamps: for spans only
    queue_us: int = 0  # arrival at the scheduler -> admission
    prefill_us: int = 0  # admission -> first token
    decode_us: int = 0  # first token -> last token
    prefill_chunks: int = 0
    steps: int = 0
    received_us: int = 0  # the first phase: read from the bus -> the tokenizer starts on it
    live_us: int = 0  # arrival at the scheduler -> Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One prompt chunk of a sequence, for its trace: a row of a step."""

    at_us: int  # arrival at the scheduler -> the step's plan was sent
    took_us: int  # plan sent -> result applied
    tokens: int
    step: int
    executor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One scheduling decision about a sequence, for its trace."""

    at_us: int  # since arrival at the scheduler
    what: str  # admit, requeue, preempt, restore, ...
    why: str
    numbers: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """tokenizer -> scheduler: a validated request. Idempotent by (tenant, request, attempt).

    scheduler -> detokenizer, after its Opens: the request, kept in case this scheduler dies.
    scheduler -> another detokenizer (`shard` is set): a backup, kept in case both die.
    detokenizer -> another scheduler: resume the request. The last `tokens` are then the generated ones of all
    choices, `generated` counts them by choice, and `timeout_us` counts from the first arrival."""

    request: str
    attempt: int
    tenant: str
    model: str
    inbox: str  # the client's reply subject
    slo_class: str = "standard"  # interactive, standard, batch
    timeout_us: int = 0  # time left to answer, counted from arrival; the shell subtracts transit
    received_wall_us: int = 0
    sent_wall_us: int = 0
    n: int = 1
    max_tokens: int = 16
    stream: bool = False
    format: str = "chat"  # chat, completion, EMBEDDING(_BASE64): the shape of the public reply
    finish_detached: bool = False  # finish the answer although its client has gone
    seed: int = 0  # uint64; choice i draws from choice_seed(seed, i)
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: Ints = field(default_factory=ints)  # end-of-sequence ids included
    logprobs: int = 0  # 0 = none, else 1 + number of alternatives
    prompt_logprobs: bool = False
    grammar: str = ""  # see answer_formats/grammar.py: packed
    echo: bool = False
    part: int = 0
    parts: int = 1
    tokens: Ints = field(default_factory=ints)  # the prompt
    include_stop: bool = False
    include_usage: bool = True
    handled_wall_us: int = 0  # the tokenizer starts on it; until then it waited in the mailbox
    parent_span: str = ""  # parent of the trace's root span, zeros = none; empty: the request is not traced
    processors: tuple[str, ...] = ()  # logits processors, each JSON: {"name": ..., "args": {...}}
    generated: Ints = field(default_factory=ints)  # tokens by choice, of a resumed request
    reasons: tuple[str, ...] = ()  # finish reason of each choice, empty while it runs
    age_us: int = 0  # since the first scheduler accepted it
    first_us: int = 0  # first scheduler -> first token; 0: no token yet
    open_end: bool = False  # the client gave no `max_tokens`: a scheduler lowers it to what fits
    waited_us: int = 0  # read by the tokenizer -> sent by it
    model_digest: str = ""  # of the executors that compute it, as in ExecHello
    shard: str = ""  # in a backup: id of the detokenizer that has the request open
    min_tokens: int = 0  # of an answer: until then neither stop ids nor stop strings end it
    answer_format: str = ""  # of a chat: of shared/answer_formats, with THINKING if its prompt opens it
    savepoints: str = ""  # the submitted body's hash, under which its tokens are kept; empty: they are not
    routing_key: str = ""  # requests with an equal one go to the same scheduler; empty: the id decides
    pooling: int = 0  # it ends with its prompt's vector, of so many numbers or WHOLE_VECTOR; 0: it generates
    most_calls: int = 0  # of functions that its answer may have: none, one, or MANY_CALLS
    run: int = 0  # of a durable request: the number of this run of it, from its keeper; 0: it has none
    speculate: bool = True  # its rows may have drafts: they change the time of its tokens alone
    prediction: Ints = field(default_factory=ints)  # its answer may repeat them: drafts are found there
    session: str = ""  # session_hints.name of its tenant and the client's id; empty: the client gave none
    parent: str = ""  # likewise, of the session that started this one
    session_final: bool = False  # no request of the session follows
    expects_tokens: int = 0  # of the answer, as the client foresees; 0: it does not
    keep_us: int = 0  # the client's wish: how long its blocks stay after the answer; 0: none
    has_tools: bool = False  # its answer may call functions: Ended names them
    prefetch: bool = False  # the client's wish: its blocks are on the device when the next request comes
    adapter: str = ""  # digest of the adapter that computes it; empty: the model alone
    adapter_name: str = ""  # under which its client knows the adapter
    adapter_path: str = ""  # its folder, where the executors run
    prompt_alternatives: int = 0  # of each token, with `prompt_logprobs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """scheduler -> sender of Tokenized: the scheduler owns the request; a tokenizer forgets the inbox."""

    tenant: str
    request: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """scheduler -> sender of Tokenized: not accepted, and why. The sender answers the client."""

    tenant: str
    request: str
    attempt: int
    code: int
    message: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """client -> tokenizers and schedulers: stop working. May overtake its request.

    tokenizer, detokenizer -> scheduler: the client has got an error, `code` and `message`. With MOVED another
    scheduler runs the request and another detokenizer answers it."""

    tenant: str
    request: str
    code: int = 0  # public error code; 0: cancelled by the client
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """tokenizer -> the others of its model, a few times a second: requests that the sender has taken, and
    requests that are done and need no takeover. Each is a 64-bit key (tokenizer/standby.py).

    detokenizer -> the others of its model: requests that it has answered (detokenizer/failover.py)."""

    taken: Longs = field(default_factory=longs)
    ids: tuple[str, ...] = ()  # of `taken`: the ids drawn for requests without a `request_id`
    done: Longs = field(default_factory=longs)  # accepted by a scheduler, refused, or answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """scheduler -> detokenizer: take over the text and the reply stream of a sequence."""

    seq: int
    request: str
    attempt: int
    tenant: str
    model: str
    inbox: str
    choice: int = 0
    choices: int = 1
    stream: bool = False
    format: str = "chat"
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int = 0
    received_wall_us: int = 0
    prompt_tokens: int = 0
    part: int = 0
    parts: int = 1
    tokens: Ints = field(default_factory=ints)  # generated so far: not empty on a re-open
    include_usage: bool = True
    echo: bool = False  # the text starts with the prompt, which arrives in PromptTokens
    prompt_logprobs: bool = False
    parent_span: str = ""  # as in Tokenized
    stop_ids: Ints = field(default_factory=ints)  # each ends the text; shown only with `include_stop`
    min_tokens: int = 0  # stop strings end the text after these tokens only
    answer_format: str = ""  # as in Tokenized; its markers are shown
    most_calls: int = 0  # as in Tokenized: their text has no stop strings
    run: int = 0  # as in Tokenized; readers get it with the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """scheduler -> detokenizer: the tokens of one step for one shard. Row i of `seqs`, `first` and
    `counts` owns the next `counts[i]` entries of `ids`."""

    executor: str
    step: int
    seqs: Ints
    first: Ints  # token index of the row's first id
    counts: Ints
    ids: Ints
    logprobs: Floats = field(default_factory=floats)  # of the chosen ids, empty if none asked
    top_counts: Ints = field(default_factory=ints)  # alternatives per id
    top_ids: Ints = field(default_factory=ints)
    top_logprobs: Floats = field(default_factory=floats)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """executor, in a StepResult -> scheduler -> detokenizer: a prompt's piece; its first token has rank 0."""

    seq: int
    step: int
    first: int  # position in the prompt of the first id
    ids: Ints
    logprobs: Floats = field(default_factory=floats)
    top_counts: Ints = field(default_factory=ints)  # alternatives per id
    top_ids: Ints = field(default_factory=ints)
    top_logprobs: Floats = field(default_factory=floats)
    ranks: Ints = field(default_factory=ints)  # of each id among all tokens, from 1 on


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFound:
    """detokenizer -> scheduler: a stop string ends in token `index`. The earliest index wins."""

    seq: int
    index: int  # number of tokens kept: the answer and its stop string


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """detokenizer -> scheduler: the client of these sequences has gone. Empty `seqs`: messages to this
    detokenizer were lost; the scheduler opens all its requests there again."""

    seqs: Ints
    moved: bool = False  # another scheduler runs them


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """scheduler -> detokenizer: no token at or beyond `final` belongs to the sequence."""

    seq: int
    final: int  # number of generated tokens
    reason: str  # stop, length, error, moved (another shard answers: send nothing)
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    decisions: tuple[Decision, ...] = ()
    code: int = 0  # with reason "error": the public error code
    message: str = ""
    retry_after_ms: int = 0
    executor: str = ""  # the last executor that ran it; empty: never admitted
    chunks: tuple[Chunk, ...] = ()
    vector: bytes = b""  # of a sequence with `pooling`, which has no token: float32, little-endian
    accepted_drafts: int = -1  # that became tokens of the answer; -1: its request came without a prediction
    rejected_drafts: int = 0  # that were computed in vain


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """detokenizer -> scheduler: the last frame has been sent. `index` <= Close.final is the true number of
    generated tokens; the record and the usage are final only now. The choice that ends its request carries
    the stamps of the reply."""

    seq: int
    index: int
    reason: str
    first_wall_us: int = 0  # the first text was sent, or added to a plain answer
    built_wall_us: int = 0  # the last frame was built
    sent_wall_us: int = 0  # the last frame left the process
    calls: tuple[str, ...] = ()  # names of the functions that the answer calls: few, and short


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionVerb:
    """client -> scheduler: the state of a session, or a wish for its blocks. Idempotent."""

    tenant: str
    session: str  # as in Tokenized
    verb: str  # state, release, prefetch, keep
    keep_us: int = 0  # of `keep`
    tree: bool = False  # of `release`: the sessions that it started, too


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAnswer:
    """scheduler -> client: a session now, before any copy that a verb starts; a row of the list of all."""

    state: str  # unknown, running, idle, rising (its blocks come up), below (none on the device), ended
    tokens: int = 0
    device: int = 0  # tokens there, and in L1, and in L2
    l1: int = 0
    l2: int = 0
    will: str = ""  # what follows from the verb: release, prefetch, keep; nothing
    why: str = ""  # of `nothing`
    tenant: str = ""
    session: str = ""  # as in Tokenized; of a session without an id: as the scheduler has named it
    tool: str = ""  # the slowest function that its last answer called; empty: none
    idle_us: int = 0  # since its last answer ended
    kept_us: int = 0  # until its blocks lose their rank
    returns_p50_us: int = 0  # half of such pauses end by then; 0: not learned
    returns_p90_us: int = 0
    load_us: int = 0  # its next request: until its blocks are on the device
    compute_us: int = 0  # the same, computed


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecHello:
    """executor -> scheduler: an incarnation with empty slots. Repeated until ExecWelcome.

    `exec_epoch` numbers the incarnations of the device state: a restart of the process and an ExecReset both
    start a new one."""

    executor: str
    exec_epoch: int
    host_id: str
    model: str
    fingerprint: str  # hex: everything that makes KV bytes interchangeable
    vocab_digest: str
    vocab: int
    blocks: int
    block_tokens: int
    slots: int
    max_step_tokens: int
    max_context: int
    ranks: int = 1
    arena_generation: int = 0
    backend: str = "sim"
    dtype: str = "f32"
    bytes_per_block: int = 0
    stages: int = 1  # pipeline stages: the number of steps that can be computed at once
    two_stream_tokens: int = 0  # StepPlan.two_stream is faster from this many tokens; 0: not supported
    max_stop_ids: int = 0  # of a slot; 0: any number
    reports_grammars: bool = False  # GrammarReady or GrammarFailed follows each SlotOpen with a grammar
    model_digest: str = ""  # hex, of weights, dtype, KV format, deterministic: where equal, answers are equal
    asleep: bool = False  # its device memory is free for others: it computes nothing before ExecWake
    weights: str = ""  # hex, of the weights and shapes alone
    flags: tuple[str, ...] = ()  # with these weights they start an executor of the same `model_digest`
    max_drafts: int = 0  # of a row; 0: the engine has no drafts
    max_draft_rows: int = 0  # rows of a step that has drafts; 0: any number
    adapter_places: int = 0  # adapters that a step may have; 0: none
    scores_prompts: bool = False  # it gives log probabilities of prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecWelcome:
    """scheduler -> executor: ExecHello of incarnation `exec_epoch` is accepted."""

    exec_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRefused:
    """scheduler -> executor: not accepted, since executors with another `model_digest` serve. The executor
    repeats ExecHello, and receives ExecWelcome once that has changed."""

    exec_epoch: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecReset:
    """scheduler -> executor: forget every slot and send ExecHello with a new `exec_epoch`. The envelope's
    epoch stays, since the process does."""

    exec_epoch: int
    why: str
    scheduler: str = ""  # id of the scheduler that gets the ExecHello; empty: the sender


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecSleep:
    """scheduler -> executor: free the device memory and send ExecHello with `asleep` and a new `exec_epoch`.
    An executor that cannot sleep sends it without `asleep`."""

    exec_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecWake:
    """scheduler -> executor: take the device memory back and send ExecHello with a new `exec_epoch`. Blocks
    start empty."""

    exec_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOpen:
    """scheduler -> executor: everything about a slot, enough to rebuild it."""

    slot: int
    generation: int
    seq: int
    prompt_tokens: int  # tokens[:prompt_tokens] is the prompt, the rest was generated
    computed: int = 0  # tokens with their KV in the blocks already
    max_length: int = 0  # limit of prompt + generated tokens
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: Ints = field(default_factory=ints)
    logprobs: int = 0
    prompt_logprobs: bool = False
    grammar: str = ""
    part: int = 0
    parts: int = 1
    tokens: Ints = field(default_factory=ints)
    processors: tuple[str, ...] = ()  # see Tokenized; rows of the slot are host-fed
    tenant: str = ""  # owner of the grammar: compilation takes tenants in turn
    min_tokens: int = 0  # until then `stop_ids` have no probability
    pooling: int = 0  # as in Tokenized: its sampled row also gives a vector
    prediction: Ints = field(default_factory=ints)  # as in Tokenized
    adapter: int = 0  # the place of its adapter, see AdapterLoad; 0: none
    prompt_alternatives: int = 0  # as in Tokenized


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """scheduler -> executor: put an adapter into a place, from 1 on, that no open slot has. Slots may have it
    after AdapterLoaded. Steps go on meanwhile."""

    place: int
    digest: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoaded:
    """executor -> scheduler: the adapter is in its place, or `error` has the reason."""

    place: int
    digest: str
    error: str = ""
    bytes: int = 0  # in host memory
    took_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotClose:
    """scheduler -> executor: the slot is free after step `last_step`."""

    slot: int
    generation: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarReady:
    """executor -> scheduler: the slot's grammar is compiled; the scheduler may plan its next sample."""

    slot: int
    generation: int
    compile_us: int  # 0: it failed for no fault of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarFailed:
    """executor -> scheduler: the slot's grammar cannot be compiled: the request is a 400."""

    slot: int
    generation: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """scheduler -> executor: one step, by columns. Idempotent by (exec_epoch, step).

    Forward rows: tokens [start, start+count) of a slot, read from the host record or, for one token, from
    the device's own last sample. Sample rows: the last position of a forward row samples the next token of a
    slot; one prompt row may serve several slots, a chunk that is not the prompt's last serves none.

    A row AT_DEVICE goes on from the device's own last token and length, and computes up to `counts - 1`
    drafts after that token: tokens that the executor foresees. Its sample row samples the next token at each
    of these positions, and keeps the tokens up to the first one that differs from the draft there. `starts`
    of the row is an upper bound of the length. Rows of a slot that is done, and drafts at or beyond
    `max_length`, are not computed.

    Block-table deltas and block copies apply before the forward pass.
    """

    exec_epoch: int
    step: int
    mode: str  # single, run_ahead, two_batch
    micro_batch: int  # 0 = A, 1 = B
    slots: Ints
    starts: Ints
    counts: Ints
    from_device: Ints  # FROM_DEVICE = the input token is last_token[slot]; AT_DEVICE = the place is, too
    sample_rows: Ints  # index into the forward rows
    sample_slots: Ints
    table_slots: Ints = field(default_factory=ints)  # delta: slot's table from entry `table_first`
    table_first: Ints = field(default_factory=ints)
    table_counts: Ints = field(default_factory=ints)
    table_blocks: Ints = field(default_factory=ints)
    copy_from: Ints = field(default_factory=ints)
    copy_to: Ints = field(default_factory=ints)
    wait_jobs: Ints = field(default_factory=ints)  # reserved: copies that must end before the forward
    forward: bool = True
    sample: bool = True
    two_stream: bool = False  # two micro-batches: collectives of one overlap compute of the other


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """executor -> scheduler: the sampled ids of a step, row for row as `StepPlan.sample_slots`."""

    exec_epoch: int
    step: int
    ids: Ints  # -1: the slot had ended before
    done: Ints  # by row: 1 = its last token ended the slot (stop id or length); 2 = it had ended before
    start_wall_us: int = 0
    end_wall_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    bucket_padding_rows: int = 0  # no reader is left; the place of a positional field stays
    logprobs: Floats = field(default_factory=floats)
    top_counts: Ints = field(default_factory=ints)
    top_ids: Ints = field(default_factory=ints)
    top_logprobs: Floats = field(default_factory=floats)
    error: str = ""  # the whole step failed: its sequences cannot continue here
    wait_us: int = 0  # device idle before this step, waiting for its plan
    published_us: int = 0  # of the previous result: end of its step -> sent
    queued_us: int = 0  # the plan arrived at the executor -> its step started
    host_us: int = 0  # logits processors, on the host
    row_errors: tuple[tuple[int, str], ...] = ()  # (row, reason); with ROW_REFUSED the request is at fault
    segments: Ints = field(default_factory=ints)  # of two streams: in threes, lane, start, length (us)
    vectors: tuple[tuple[int, bytes], ...] = ()  # (row, vector as in Close) of the rows with `pooling`
    counts: Ints = field(default_factory=ints)  # ids of each row, from 1 on; empty: one each
    drafted: Ints = field(default_factory=ints)  # drafts of each row that were computed; with `counts` only
    prompts: tuple[PromptTokens, ...] = ()  # of the rows with `prompt_logprobs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend:
    """either way, to the sender of a stream: its messages from number `first_seq` on are missing."""

    first_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReset:
    """either way, the answer to Resend: messages are gone; the stream continues at `next_seq`."""

    next_seq: int
    lost: bool = False  # some of them were for the receiver's current incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAt:
    """either way, on a silent stream: its last number, so that the receiver detects a lost tail."""

    last_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """either way: a piece of a long message, whose fragments are consecutive; `data`, joined, is its row."""

    part: int
    parts: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLookup:
    """scheduler -> kv_offload: in which tier is each key? Keys are 32 bytes, joined."""

    job: int
    keys: bytes
    prefix: bool = True  # stop at the first miss
    fingerprint: str = ""  # of the model's KV layout, as in ExecHello: part of the name in L2
    promote: bool = False  # start to copy L2 hits into L1: the request waits already


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFound:
    """kv_offload -> scheduler: tier of each key: 0 none, 1 DRAM (L1), 2 remote (L2)."""

    job: int
    tiers: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReserve:
    """scheduler -> kv_offload: reserve room in L1 for these keys, leased for `lease_us`."""

    job: int
    owner: str
    keys: bytes
    value_bytes: int
    lease_us: int
    priority: int = 0  # 1 = preemption
    valid_tokens: Ints = field(default_factory=ints)  # per key; the last block of a preempted one is partial
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReserved:
    """kv_offload -> scheduler: arena offset of each key, or NO_ROOM or PRESENT."""

    job: int
    arena_generation: int
    offsets: Longs
    status: str = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPrefetch:
    """scheduler -> kv_offload: bring these keys into L1 and pin them for `lease_us`."""

    job: int
    owner: str
    keys: bytes
    deadline_us: int
    lease_us: int
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReady:
    """kv_offload -> scheduler: arena offset of each key, -1: not available."""

    job: int
    arena_generation: int
    offsets: Longs
    valid_tokens: Ints = field(default_factory=ints)
    status: str = "ok"
    took_us: int = 0
    from_l2: int = 0  # keys read from L2 for this


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCommit:
    """scheduler -> kv_offload: which of the reserved ranges are written; the others failed."""

    job: int
    written: Ints  # 1 or 0 by key


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStored:
    """kv_offload -> scheduler: tier of each key of a committed job, 0 = lost."""

    job: int
    tiers: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRelease:
    """scheduler -> kv_offload: end the leases of these jobs."""

    jobs: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGone:
    """kv_offload -> scheduler: no tier holds these keys any more. Needs no answer."""

    keys: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvForget:
    """scheduler -> kv_offload: no request needs these blocks. Needs no answer."""

    keys: bytes
    fingerprint: str = ""  # as in KvLookup


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTouch:
    """scheduler -> kv_offload: these blocks are needed soon, the last key first to stay. Needs no answer."""

    keys: bytes
    fingerprint: str = ""  # as in KvLookup


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCopy:
    """scheduler -> executor: copy blocks between HBM and the arena after step `after_step`."""

    job: int
    to_arena: bool
    after_step: int
    arena_generation: int
    blocks: Ints
    offsets: Longs
    block_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCopied:
    """executor -> scheduler: the result of a KvCopy."""

    job: int
    status: str  # ok, no_arena, stale_arena, failed
    bytes: int = 0
    took_us: int = 0
    wait_us: int = 0  # arrival -> start: waited for other copies and for `after_step`


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaReleased:
    """executor -> scheduler -> kv_offload: the executor has unmapped this arena generation."""

    executor: str
    arena_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLookup:
    """kv_offload -> kv_offload of another host: which of these keys does its L1 hold? With `lease_us` the
    blocks stay there so long, or until KvRelease, and the answer has what the sender needs to read them."""

    job: int
    fingerprint: str
    keys: bytes
    lease_us: int = 0  # 0: no lease


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFound:
    """kv_offload -> kv_offload of another host: arena offset of each key, -1: not there."""

    job: int
    arena_generation: int
    offsets: Longs
    value_bytes: int = 0  # of each block
    lease_us: int = 0  # from when this was sent; 0: no lease, and the other fields are empty
    headers: bytes = b""  # of each leased block, 128 bytes with its checksum, as in L2
    address: bytes = b""  # of the arena, for the transport


Message = (
    Tokenized | Accepted | Rejected | Cancel | Open | Tokens | PromptTokens | StopFound | Detached
    | Close | Ended | ExecHello | ExecWelcome | ExecRefused | ExecReset | ExecSleep | ExecWake | SlotOpen
    | SlotClose | GrammarReady | GrammarFailed | StepPlan | StepResult | Resend | StreamReset | StreamAt
    | Fragment | KvLookup | KvFound | KvReserve | KvReserved | KvPrefetch | KvReady | KvCopy | KvCopied
    | KvCommit | KvStored | KvRelease | KvGone | ArenaReleased | Heartbeat | Claims | PeerLookup | PeerFound
    | SessionVerb | SessionAnswer | KvForget | KvTouch | AdapterLoad | AdapterLoaded
)  # fmt: skip
