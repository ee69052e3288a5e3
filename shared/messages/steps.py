"""Steps: what the scheduler asks of an executor, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages.columns import Floats, Ints, floats, ints
from shared.messages.requests import Sampling

ROW_REFUSED = "refused: "  # begins a row error that is a 400, not a 500
PIECE_LANES = ("compute A", "compute B", "comm A", "comm B")  # of the halves of a step, on two streams


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecHello:
    """executor -> scheduler: an incarnation with empty slots. Repeated until ExecWelcome.

    `exec_epoch` is the incarnation of the device state: a new one after a restart of the process
    and after ExecReset alike.
    """

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
    stages: int = 1  # pipeline stages: so many steps can be computed at once
    two_stream_tokens: int = 0  # StepPlan.two_stream is quicker from so many tokens on; 0: it is not offered


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecWelcome:
    """scheduler -> executor: hello heard; `exec_epoch` says of which incarnation."""

    exec_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecReset:
    """scheduler -> executor: forget every slot and say hello with a new `exec_epoch`. The envelope's
    epoch stays, since the process does."""

    exec_epoch: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOpen:
    """scheduler -> executor: everything about a slot. Alone it rebuilds the slot."""

    slot: int
    generation: int
    seq: int
    prompt_tokens: int  # tokens[:prompt_tokens] is the prompt, the rest was generated
    computed: int = 0  # tokens whose KV is in the blocks already
    max_length: int = 0  # prompt + generated, never exceeded
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotClose:
    """scheduler -> executor: the slot is free after step `last_step`."""

    slot: int
    generation: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarReady:
    """executor -> scheduler: the slot's grammar is compiled; its rows may be planned."""

    slot: int
    generation: int
    compile_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarFailed:
    """executor -> scheduler: the slot's grammar cannot be compiled: the request is a 400."""

    slot: int
    generation: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """scheduler -> executor: one step, by columns. Idempotent by (exec_epoch, step).

    Forward rows: tokens [start, start+count) of a slot, taken from the host record or, for one
    token, from the device's own last sample. Sample rows: the last position of a forward row
    chooses the next token of a slot; one prompt row may feed several slots, a chunk that is not
    the prompt's last feeds none. Block-table deltas and block copies apply before the forward.
    """

    exec_epoch: int
    step: int
    mode: str  # single, run_ahead, two_batch
    micro_batch: int  # 0 = A, 1 = B
    slots: Ints
    starts: Ints
    counts: Ints
    from_device: Ints  # 1 = the input token is last_token[slot]
    sample_rows: Ints  # index into the forward rows
    sample_slots: Ints
    table_slots: Ints = field(default_factory=ints)  # delta: slot's table from entry `table_first`
    table_first: Ints = field(default_factory=ints)
    table_counts: Ints = field(default_factory=ints)
    table_blocks: Ints = field(default_factory=ints)
    copy_from: Ints = field(default_factory=ints)
    copy_to: Ints = field(default_factory=ints)
    wait_jobs: Ints = field(default_factory=ints)  # copies that must have ended before the forward
    forward: bool = True
    sample: bool = True
    two_stream: bool = False  # in two halves, the ranks' talk of one under the compute of the other


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """executor -> scheduler: the sampled ids of a step, row for row as `StepPlan.sample_slots`."""

    exec_epoch: int
    step: int
    ids: Ints  # -1 where the slot was done before
    done: Ints  # 1 = this token ended the slot (stop id or length); 2 = it had ended earlier
    start_wall_us: int = 0
    end_wall_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    bucket_padding_rows: int = 0
    logprobs: Floats = field(default_factory=floats)
    top_counts: Ints = field(default_factory=ints)
    top_ids: Ints = field(default_factory=ints)
    top_logprobs: Floats = field(default_factory=floats)
    error: str = ""  # the step failed as a whole: its sequences cannot go on here
    wait_us: int = 0  # device idle before this step, waiting for its plan
    published_us: int = 0  # how long the result sent last took from the end of its step to its sending
    queued_us: int = 0  # the plan arrived at the executor -> its step began
    host_us: int = 0  # logits processors, on the host
    # (index into `ids`, why): that sequence alone failed; by its request's own fault with ROW_REFUSED first
    row_errors: tuple[tuple[int, str], ...] = ()
    # the first pieces of a two-stream step: of each its lane (PIECE_LANES), begin from the step's, length, us
    pieces: Ints = field(default_factory=ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend:
    """either way: messages of the sender's stream are missing from number `first_seq` on."""

    first_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReset:
    """either way: what a Resend asked for is gone; the stream goes on at `next_seq`."""

    next_seq: int
    lost: bool = False  # part of it was meant for the asker's present incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAt:
    """either way, after a stream has fallen silent: its last number, so that a lost tail shows."""

    last_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxMsg:
    """scheduler -> executor: reserved for token masks made on another host."""

    step: int
    slots: Ints
    masks: bytes
