"""Requests and text: client -> tokenizer -> scheduler -> detokenizer -> client."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages.columns import Floats, Ints, floats, ints

MOVED = 410  # code of a Rejected: another detokenizer has this request by now, and its client is told there


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
    """Token counts of one sequence; `cached_tokens` is the part of the prompt not computed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of a request went. Durations follow each other in this order."""

    received_wall_us: int = 0
    tokenize_us: int = 0
    transit_us: int = 0  # tokenizer -> scheduler, from wall stamps: for spans only
    queue_us: int = 0  # arrival at the scheduler -> admission
    prefill_us: int = 0  # admission -> first token
    decode_us: int = 0  # first token -> last token
    prefill_chunks: int = 0
    steps: int = 0
    received_us: int = 0  # comes first: seen on the bus -> taken up by the tokenizer
    live_us: int = 0  # arrival at the scheduler -> Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One prompt chunk of a sequence, for its trace: a row of a step."""

    at_us: int  # the step's plan was sent, since arrival at the scheduler
    took_us: int  # until its result was applied
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

    scheduler -> detokenizer, behind its Opens: what was asked, should this scheduler die.
    detokenizer -> another scheduler: go on with it. Then `generated` says how many of the last `tokens` each
    choice has generated, choice by choice, and `timeout_us` counts from the first arrival."""

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
    format: str = "chat"  # chat, completion: the shape of the public reply
    finish_detached: bool = False  # go on computing when the client has gone
    seed: int = 0  # uint64; choice i draws from choice_seed(seed, i)
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: Ints = field(default_factory=ints)  # end-of-sequence ids included
    logprobs: int = 0  # 0 = none, else 1 + number of alternatives
    prompt_logprobs: bool = False
    grammar: str = ""  # JSON: {"kind": ..., "source": ...}
    echo: bool = False
    part: int = 0
    parts: int = 1
    tokens: Ints = field(default_factory=ints)  # the prompt
    include_stop: bool = False
    include_usage: bool = True
    handled_wall_us: int = 0  # the tokenizer took it up; before, it waited in its mailbox
    parent_span: str = ""  # of the trace's root span, zeros = none; empty: nobody traces this request
    processors: tuple[str, ...] = ()  # logits processors, each JSON: {"name": ..., "args": {...}}
    generated: Ints = field(default_factory=ints)  # of a request that goes on: see above
    reasons: tuple[str, ...] = ()  # why each choice has ended, empty where it has not
    age_us: int = 0  # since the first scheduler had it
    first_us: int = 0  # of that until its first token, 0 where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """scheduler -> who sent Tokenized: the scheduler owns the request now; a tokenizer forgets the inbox."""

    tenant: str
    request: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """scheduler -> who sent Tokenized: not accepted, and why. The client is told by that one."""

    tenant: str
    request: str
    attempt: int
    code: int
    message: str
    retry_after_ms: int = 0


def rejection(asked: Tokenized, code: int, message: str, retry_after_ms: int = 0) -> Rejected:
    """The Rejected of a request."""
    return Rejected(
        tenant=asked.tenant,
        request=asked.request,
        attempt=asked.attempt,
        code=code,
        message=message,
        retry_after_ms=retry_after_ms,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """client -> tokenizers and schedulers: stop working. May overtake its request."""

    tenant: str
    request: str


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
    echo: bool = False  # the text starts with the prompt, which PromptTokens bring
    prompt_logprobs: bool = False
    parent_span: str = ""  # as in Tokenized


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
    """executor -> scheduler -> detokenizer: a piece of a prompt with its logprobs, as many messages as
    needed, those of a step before its StepResult. For `echo` alone the scheduler makes them."""

    seq: int
    step: int
    first: int  # position in the prompt of the first id
    ids: Ints
    logprobs: Floats = field(default_factory=floats)
    top_counts: Ints = field(default_factory=ints)  # alternatives per id
    top_ids: Ints = field(default_factory=ints)
    top_logprobs: Floats = field(default_factory=floats)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFound:
    """detokenizer -> scheduler: a stop string ends in token `index`. The earliest index wins."""

    seq: int
    index: int  # number of tokens kept: those whose text belongs to the answer or its stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """detokenizer -> scheduler: nobody reads the reply subject of these sequences any more. None at all:
    messages to this detokenizer were lost, and it knows of no sequence but those it named just before."""

    seqs: Ints
    moved: bool = False  # they are read from another scheduler, which goes on with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """scheduler -> detokenizer: no token at or beyond `final` belongs to the sequence."""

    seq: int
    final: int  # number of generated tokens
    reason: str  # stop, length, error, moved (another shard has it now: send nothing)
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    decisions: tuple[Decision, ...] = ()
    code: int = 0  # with reason "error": the public error code
    message: str = ""
    retry_after_ms: int = 0
    executor: str = ""  # the last one that ran it; empty: never admitted
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """detokenizer -> scheduler: the last frame has gone out. `index` <= Close.final is the true
    number of generated tokens; the record and the usage are final only now. The choice that ends its
    request brings the stamps of the reply."""

    seq: int
    index: int
    reason: str
    first_wall_us: int = 0  # the first text was sent, or joined an answer that is not streamed
    built_wall_us: int = 0  # the last frame was built
    sent_wall_us: int = 0  # it has left the process
