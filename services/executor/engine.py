"""The protocol of engines (`Backend`) and the validation of plans. All engines pass one contract test.

The device thread calls every method, in the order of the messages. Only `sample` may run on the host thread:
one step at a time, in step order, while the device thread forwards, opens and closes other slots. So each
thread writes only the entries of its own slots in the state that both share. Plans are strictly ordered by
step. The copier's methods belong to a third thread, the copy worker (services.executor.kv_transfer.worker).

`plan_error`, `open_error`, `sequence_error` and `copy_error` reject slots that are not open, and blocks,
positions and tokens that do not exist. On a device such an index kills the process or writes into another
sequence's memory; here it fails the step, the sequence or the copy. The event loop calls them.

An executor maps a host's L1 arena, the shared-memory segment of kv_offload, read-write.

It uses open + mmap: Python's SharedMemory deletes a segment when a reader ends. A name ends with its
generation and is never used twice, so a mapping stays valid for its generation after the file is unlinked.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from shared import messages
from shared.errors import NO_PROMPT_SCORES, NO_TEXT, HeadraceError, SetupError
from shared.kv_blocks import blocks_for

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import Event


# By the type of device: each `build` takes TorchOptions, and the ranks of a group.
ENGINES = {
    "cpu": "services.executor.cpu.engine:build",
    "cuda": "services.executor.cuda.engine:build",
}
TUNING = {  # the number of threads on a CPU: a timing of products chooses the first one, steps the others
    "products": "services.executor.cpu.autotune:timing_for",
    "steps": "services.executor.cpu.autotune:thread_count",
}
SPECULATION = {
    "prompt": "services.executor.speculation.rows:drafting",
}
ADAPTERS = {  # the places of the engines, their size on a GPU, and their loads
    "cpu": "services.executor.adapters.places:build",
    "cuda": "services.executor.adapters.device_places:build",
    "bytes": "services.executor.adapters.device_places:size_bytes",
    "sim": "services.executor.adapters.sim:build",
    "loads": "services.executor.adapters.shell:AdapterLoads",
}
COMPILED = {  # operators in machine code for a CPU, where their kernels fit the cache; else torch's
    "numba": "services.executor.cpu.compiled:CompiledOperators",
}
LAST_TOKEN = "lasttoken"  # its name in sentence-transformers
WARM_ROWS = 64  # matrix products are compiled up to here: in larger steps a compilation does not show
MAX_SEGMENTS = 32  # about four layers
MAX_WHY_BYTES = 160  # 256 of them fit into a result
NO_DRAFT = -1
MOST_FLOAT32 = float(np.finfo(np.float32).max)
COMPUTE, COMM = (0, 1), (2, 3)  # of micro-batches A and B, see shared.messages.SEGMENT_LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """The facts about an engine that the scheduler plans with."""

    backend: str  # torch, sim
    model: str
    dtype: str
    fingerprint: str  # hex digest of everything that makes KV bytes interchangeable
    vocab_digest: str
    vocab: int
    blocks: int
    block_tokens: int
    bytes_per_block: int
    slots: int
    max_step_tokens: int
    max_context: int
    stages: int = 1  # of a pipeline: it computes as many steps at once
    two_stream_tokens: int = 0  # this and the next three: see ExecHello
    max_stop_ids: int = 0
    reports_grammars: bool = False
    model_digest: str = ""
    weights: str = ""  # hex digest of the weights and shapes alone
    flags: tuple[str, ...] = ()  # that start an engine with this `model_digest`
    follows_grammars: bool = False  # and the packages for it are installed
    sleeps: bool = False  # the engine is a Sleeper
    memory_bytes: int = 0  # that `sleep` frees: weights and KV cache
    only_tier: bool = False  # the KV cache is in DRAM, with the memory that L1 would have
    hidden: int = 0  # numbers of a vector; 0: the engine gives none
    pooling: str = LAST_TOKEN  # of the model; any other is one that this engine lacks
    generates: bool = True  # else it gives vectors alone
    tokens_digest: str = ""  # of its vocabulary, see Vocabulary; empty: it has none
    max_drafts: int = 0  # see ExecHello
    max_draft_rows: int = 0
    adapter_places: int = 0
    scores_prompts: bool = False

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that the engine can hold."""
        return min(self.max_context, self.blocks * self.block_tokens)


@dataclass(frozen=True, slots=True)
class Segment:
    """A span of one micro-batch's compute or collectives."""

    lane: int  # see COMPUTE and COMM
    from_us: int  # since the step's start
    took_us: int


Masked = tuple[int, dict[int, str]]  # us on the host, and why rows failed, by index


@dataclass(frozen=True, slots=True)
class Late:
    """The state of a step whose sampling is queued once its masks are made."""

    masked: Future[Masked] = field(default_factory=Future)
    recorded: threading.Event = field(default_factory=threading.Event)  # its ids are among its slots' tokens


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of a step: sample row i of its plan has `counts[i]`, and `ids` are those of all rows."""

    ids: messages.Ints
    counts: messages.Ints


@dataclass(frozen=True, slots=True)
class Runs:
    """What was chosen in a step with drafts, by sample row: ids, `done` of the last one, why it failed."""

    ids: list[list[int]]
    done: messages.Ints
    errors: dict[int, str]


# ids, done and why rows failed, by index into the rows; only first rows end the slots in which they fail
ChooseRows = Callable[[list[int], bool], tuple[messages.Ints, messages.Ints, dict[int, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A step between its forward and its sampling: `forward` returns it, `sample` takes it once."""

    plan: messages.StepPlan
    logits: Tensor | None = None  # [samples, vocab]
    hidden: Tensor | None = None  # [samples, hidden], the head's input; a GPU keeps it for `pooling` only
    padding_rows: int = 0
    forwarded: Event | None = None  # the forward's end on a GPU; with an answer, the end of sampling
    answer: Tensor | None = None  # ids and done [2, rows]: sampling is queued already, `sample` only waits
    tokens: tuple[messages.Ints, ...] = ()  # with an answer: the host records of its slots
    late: Late | None = None  # with an answer that is valid after `forwarded` once `late.masked` is done
    due_s: float = 0.0  # simulated engine: when the forward ends, on the monotonic clock
    segments: Callable[[], tuple[Segment, ...]] = tuple  # of a split step, once it has ended
    drafts: Drafts | None = None  # then `plan` has a row for each of them
    prompts: tuple[messages.PromptTokens, ...] = ()  # of the prompts whose log probabilities are asked for

    @property
    def positions(self) -> list[int]:
        """The positions of the sampled tokens in their sequences."""
        starts, counts = self.plan.starts, self.plan.counts
        return [starts[row] + counts[row] for row in self.plan.sample_rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The result of one step, row for row as `StepPlan.sample_slots`. See StepResult."""

    ids: messages.Ints
    done: messages.Ints
    padding_rows: int = 0
    logprobs: messages.Floats = field(default_factory=messages.floats)
    top_counts: messages.Ints = field(default_factory=messages.ints)
    top_ids: messages.Ints = field(default_factory=messages.ints)
    top_logprobs: messages.Floats = field(default_factory=messages.floats)
    host_us: int = 0  # logits processors
    row_errors: tuple[tuple[int, str], ...] = ()
    segments: tuple[Segment, ...] = ()  # of a split step
    vectors: tuple[tuple[int, bytes], ...] = ()
    counts: messages.Ints = field(default_factory=messages.ints)
    drafted: messages.Ints = field(default_factory=messages.ints)


class Drafter(Protocol):
    """Foresees the tokens of slots. Drafts change the time of tokens and no token: a draft is kept where the
    sampler chooses it."""

    def open(self, opened: messages.SlotOpen) -> None:
        """Take over the tokens of a slot."""

    def close(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""

    def draft(self, slots: Sequence[int], most: int) -> NDArray[np.int32]:
        """Ids `[rows, most]` that may follow the tokens of each of `slots`; NO_DRAFT after a row's last."""


class Speculation(Protocol):
    """Finds the drafts of an engine's slots, and makes rows of them."""

    max_drafts: int  # of a row

    def open(self, opened: messages.SlotOpen) -> None:
        """As of Drafter."""

    def close(self, slot: int) -> None:
        """As of Drafter."""

    def spread(
        self, plan: messages.StepPlan, done: Callable[[int], bool]
    ) -> tuple[messages.StepPlan, Drafts | None]:
        """The plan with a row of one token for each draft, and the drafts; None if there are none. Rows
        AT_DEVICE start where their slot is. `done`: the slot has ended."""

    def choose(self, drafts: Drafts, choose: ChooseRows) -> Runs:
        """Choose the tokens of a step with drafts, by rows of its plan. `choose` gets rows of different
        slots, and whether they are the first ones of their slots."""


class HeldAdapter(Protocol):
    """An adapter in host memory."""

    @property
    def digest(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...


class Adapters(Protocol):
    """The adapters of an engine, by place. Place 0 has none."""

    count: int  # places
    held: list[Any]  # by place: a HeldAdapter or None

    def read(self, path: str) -> HeldAdapter:
        """Read an adapter to host memory, on any thread. Raises BadRequest."""

    def bind(self, place: int, adapter: Any) -> None:
        """Put an adapter that was read into a place, or None, on the device thread. Earlier steps have the
        adapter before it."""

    def open(self, opened: messages.SlotOpen) -> None:
        """The rows of a slot have the adapter in its place."""

    def reset(self) -> None:
        """Empty all places."""


def adapters_of(kind: str, places: int, *given: Any) -> Any:
    """The Adapters of an engine, made of what is `given`; None without places, or without their line."""
    return resolve_name(ADAPTERS[kind])(*given) if places and kind in ADAPTERS else None


def adapter_loads_of(backend: Backend, *given: Any) -> Any:
    """What loads the adapters of an engine; None: it has no places for any."""
    made = ADAPTERS.get("loads") if backend.info.adapter_places else None
    return resolve_name(made)(cast("Adapting", backend).adapters, *given) if made else None


Forced = Callable[[int, int], Sequence[int]]  # ids that a slot's grammar hardly leaves open, at most so many


def speculation_of(tokens: Callable[[int], messages.Ints], forced: Forced | None) -> Speculation | None:
    """What finds drafts in the `tokens` of slots; None: nothing does. `forced` is None for one of several
    ranks: they find the same drafts, each on its own, so in the tokens of the slot alone."""
    return next((resolve_name(name)(tokens, forced) for name in SPECULATION.values()), None)


def report_of(device: str) -> Callable[..., Any]:
    """`report` beside the `build` of the engine for a device: what runs there."""
    report: Callable[..., Any] = resolve_name(ENGINES[device].partition(":")[0] + ":report")
    return report


def engine_of(device: str) -> Callable[..., Any]:
    """The function that builds the engine of this type of device. Raises SetupError."""
    if device not in ENGINES:
        raise SetupError(f"there is no engine for {device}: set `device` to one of {', '.join(ENGINES)}")
    build: Callable[..., Any] = resolve_name(ENGINES[device])
    return build


def timing_of(*model: Any, **how: Any) -> Any:
    """The timing of a model's products here, see services.executor.cpu.autotune; None: not timed."""
    return resolve_name(TUNING["products"])(*model, **how) if "products" in TUNING else None


class Threads(Protocol):
    """Chooses how many threads compute the next step, `now`, by the time of those before."""

    @property
    def now(self) -> int: ...

    def observe(self, tokens: int, took_us: int) -> None:
        """Take the time of a step with `now` threads."""


def thread_count() -> Threads | None:
    """What changes the number of threads between steps; None: each step has the first number."""
    return resolve_name(TUNING["steps"])() if "steps" in TUNING else None


class LogitsProcessor(Protocol):
    """One instance for each sequence and entry of its request. Called once a row, on the executor's host
    thread. An error ends only its own request."""

    def process(self, generated: Sequence[int], logits: Tensor) -> Tensor:
        """The logits to sample from: `logits` `[vocab]`, float32, on the CPU, changed in place or not, or
        another tensor of that shape. At least one must be finite, none may be NaN or +inf; -inf forbids a
        token. `generated` are the sequence's tokens after its prompt."""


# Called with the request's `args` and the prompt's tokens. The class attribute `waits = True`: `process`
# waits for something outside instead of computing, so rows wait at the same time, on several threads.
MakeProcessor = Callable[[dict[str, Any], Sequence[int]], LogitsProcessor]


@dataclass(frozen=True, slots=True)
class HostRow:
    """A sampled row. The slot's processors change `logits` `[vocab]` float32 in place. `tokens` is the
    sequence so far, with its prompt."""

    slot: int
    tokens: Sequence[int]
    logits: Tensor


def cut_why(why: str) -> str:
    """`why`, cut to MAX_WHY_BYTES."""
    return why.encode(errors="replace")[:MAX_WHY_BYTES].decode(errors="ignore")


class EngineGone(HeadraceError):
    """An engine cannot go on, for no fault of a request: its process must be replaced, and what runs goes on
    there. Raised by `forward`."""


@dataclass(slots=True)
class Alarm:
    """Why an engine has died, empty while it lives. Set once, on any thread. Its pending steps never end."""

    why: str = ""

    def ring(self, why: str) -> None:
        """Report the engine's death; the first reason stays."""
        self.why = self.why or why


ReportGrammar = Callable[[messages.GrammarReady | messages.GrammarFailed], None]


def ignore_grammar_news(news: messages.GrammarReady | messages.GrammarFailed) -> None:
    """A ReportGrammar for engines that compile no grammars."""


@dataclass(slots=True)
class GrammarNews:
    """Where an engine reports compiled grammars. The actor sets `report` before the engine is built."""

    report: ReportGrammar = ignore_grammar_news


YieldDevice = Callable[[float], bool]


def keep_device(took_s: float) -> bool:
    """A YieldDevice where no step waits."""
    return True


class Copier(Protocol):
    """Moves whole KV blocks between an engine and the host's arena, while steps run. Until `finish` returns,
    nothing else writes the blocks of a store, or reads or writes the blocks of a load."""

    piece_bytes: int  # to copy in one call: about a millisecond's work, so that a stop waits no longer

    def attach(self, arena: Arena, yield_device: YieldDevice = keep_device) -> None:
        """Copy from and to this arena from now on. May take seconds, in slices of some milliseconds. After
        each slice `yield_device` is called with the slice's seconds. It returns True when the next slice may
        start, and False when the arena is not wanted any more; ArenaError is raised then. Errors leave
        nothing attached."""

    def detach(self) -> None:
        """Drop the mapping, if there is one."""

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy block `blocks[i]` to the arena at byte `offsets[i]`, in the state that the steps with
        delivered results left. Returns when the calls before are done, or later."""

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy the arena's bytes at `offsets[i]` to block `blocks[i]`, after the steps with delivered
        results. Returns when the calls before are done, or later."""

    def finish(self) -> int:
        """Wait for all copies: stored blocks are in the arena, and every later forward reads the loaded ones.
        Returns the time since the last `finish` in which bytes moved, by the device's clock, in us; 0 where
        the caller's clock measures the same."""


class Backend(Protocol):
    """An engine. Errors in `forward` or `sample` fail the step, not the process."""

    @property
    def info(self) -> BackendInfo: ...

    def warm_up(self) -> None:
        """Run every code path once, so that the first request waits for no compilation."""

    def open_slot(self, opened: messages.SlotOpen) -> None:
        """Set a slot up from scratch: tokens, sampling, seed, stops, an empty block table. An exception fails
        this sequence only; its `without_host_work` is opened then."""

    def close_slot(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""

    def forward(self, plan: messages.StepPlan) -> Pending:
        """Apply table deltas, then block copies, then compute the forward rows. Rows of a done slot (stop id
        sampled, or `max_length` reached) are no-ops and write no KV. On return the work is queued or done.
        The plan has no slot of a forward that is not sampled yet, unless its `answer` is queued."""

    def sample(self, pending: Pending) -> StepOutput:
        """Choose a token for each sample row of that forward, keep it as the slot's last token (so the next
        plan may be device-fed), and wait for the ids to reach the host. Logits processors run first. A failed
        processor, or logits that are not finite, give a row error with id -1 and done 2, and end the slot."""

    @property
    def copier(self) -> Copier:
        """The copier of this engine's blocks; always the same object."""

    def reset(self) -> None:
        """Forget every slot and block table; keep the weights and the contents of the blocks."""

    def close(self) -> None:
        """Free everything. A second call does nothing."""


class Adapting(Protocol):
    """An engine with `info.adapter_places`."""

    adapters: Adapters


class Sleeper(Protocol):
    """An engine with `info.sleeps`."""

    def sleep(self) -> None:
        """Free the memory of the device, after `reset`: the contents of all blocks are lost. Until `wake`
        only `info`, `reset` and `close` are called."""

    def wake(self) -> None:
        """Undo `sleep`: the engine computes the same as before, with blocks of zeros. May take seconds. After
        an exception the engine is unusable."""


def plan_error(plan: messages.StepPlan, info: BackendInfo, open_slots: set[int]) -> str:
    """Why the plan cannot run on this engine with these slots open; empty when it can."""
    slots = {*plan.slots, *plan.table_slots}
    if plan.sample_slots != plan.slots:  # they are equal in a step of decodes
        slots.update(plan.sample_slots)
    if not slots <= open_slots:
        return f"the plan names slot {min(slots - open_slots)}, which is not open"
    for blocks in (plan.table_blocks, plan.copy_from, plan.copy_to):
        if blocks and max(blocks) >= info.blocks:
            return f"the plan names block {max(blocks)} of {info.blocks}"
    if (tokens := sum(plan.counts)) > info.max_step_tokens:
        return f"the plan computes {tokens} tokens; a step of this engine has at most {info.max_step_tokens}"
    if (end := _farthest(plan.starts, plan.counts)) > info.max_context:
        return f"the plan computes token {end} of a context of {info.max_context}"
    if (end := _farthest(plan.table_first, plan.table_counts)) > -(-info.max_context // info.block_tokens):
        return f"the plan sets entry {end} of a block table, more than a context has"
    return ""


def open_error(opened: messages.SlotOpen, info: BackendInfo) -> str:
    """Why this engine cannot have such a slot; empty when it can."""
    if opened.slot >= info.slots:
        return f"slot {opened.slot} is not one of {info.slots} slots"
    if not opened.tokens:
        return f"slot {opened.slot} is opened without a token"
    if opened.adapter > info.adapter_places:
        return f"slot {opened.slot} has place {opened.adapter} of {info.adapter_places} for adapters"
    if len(opened.tokens) > info.max_context:
        return f"slot {opened.slot} has {len(opened.tokens)} tokens in a context of {info.max_context}"
    return ""


def sequence_error(opened: messages.SlotOpen, info: BackendInfo) -> str:
    """Why this engine cannot compute the sequence; empty when it can. The scheduler's load shedding checks
    the same with the facts of ExecHello."""
    for what, ids in (("prompt", opened.tokens), ("logit_bias", opened.sampling.bias_ids)):
        if ids and (largest := int(_numbers(ids).max())) >= info.vocab:
            return f"{what}: the weights have {info.vocab} tokens, and no token {largest}"
    if 0 < info.max_stop_ids < len(opened.stop_ids):
        return f"stop_token_ids: {len(opened.stop_ids)} with the model's own, over {info.max_stop_ids}"
    if opened.prompt_logprobs and not info.scores_prompts:
        return f"prompt_logprobs: {NO_PROMPT_SCORES}"
    if opened.pooling and (error := _pooling_error(opened.pooling, info)):
        return error
    if not opened.pooling and not info.generates:
        return f"model: {info.model} {NO_TEXT}"
    values = [getattr(opened.sampling, each.name) for each in fields(opened.sampling)]
    numbers = [n for value in values for n in (value if isinstance(value, array) else (value,))]
    return "" if all(abs(number) <= MOST_FLOAT32 for number in numbers) else "its sampling is not finite"


def _pooling_error(pooling: int, info: BackendInfo) -> str:
    if info.pooling != LAST_TOKEN:
        return (
            f"input: the vectors of model {info.model} need {info.pooling}, which is not supported: only "
            "pooling of the last token is; ask for another model"
        )
    if not info.hidden or pooling > info.hidden:
        return f"dimensions: vectors of model {info.model} have {info.hidden} numbers, and not {pooling}"
    return ""


def without_host_work(opened: messages.SlotOpen, vocab: int) -> messages.SlotOpen:
    """A plain slot in place of one that cannot be opened, so that plans with it can be computed: token ids
    out of the vocabulary become 0, and sampling is greedy."""
    tokens = opened.tokens
    if tokens and int(_numbers(tokens).max()) >= vocab:
        tokens = messages.ints(token if token < vocab else 0 for token in tokens)
    return messages.SlotOpen(
        slot=opened.slot,
        generation=opened.generation,
        seq=opened.seq,
        prompt_tokens=opened.prompt_tokens,
        computed=opened.computed,
        max_length=opened.max_length,
        sampling=_GREEDY,
        tokens=tokens,
    )


def copy_error(copy: messages.KvCopy, info: BackendInfo) -> str:
    """Why the blocks cannot be copied to or from any arena; empty when they can."""
    if len(copy.blocks) != len(copy.offsets):
        return f"it has {len(copy.blocks)} blocks and {len(copy.offsets)} offsets"
    if not info.bytes_per_block or copy.block_bytes != info.bytes_per_block:
        return f"its blocks have {copy.block_bytes} bytes, those of this engine {info.bytes_per_block}"
    if copy.blocks and not 0 <= min(copy.blocks) <= max(copy.blocks) < info.blocks:
        return f"it names a block that is not one of {info.blocks}"
    return ""


def _farthest(first: messages.Ints, counts: messages.Ints) -> int:
    """The largest end of a range. Numbers are below 2^31: the sum of two fits."""
    return int((_numbers(first) + _numbers(counts)).max()) if first else 0


def _numbers(column: messages.Ints) -> NDArray[np.uint32]:
    return np.frombuffer(column, dtype=np.uint32)


_GREEDY = messages.Sampling(temperature=0.0)
_FILTERED = messages.Sampling(temperature=1.0, top_k=5, top_p=0.9, frequency_penalty=0.1)


WarmUp = tuple[messages.SlotOpen, list[messages.StepPlan]]  # a slot to open, and the plans to run after it


def warm_up_steps(info: BackendInfo) -> Iterator[WarmUp]:
    """Steps that run every code path once: first chunk, chunk with prefix, decode, every sampler. They use
    slot 0 and the first blocks."""
    tokens = min(info.max_step_tokens, info.max_context - 3, 2 * info.block_tokens)
    if tokens < 2:
        return
    micro_batch = tokens // 2
    for sampling in (_GREEDY, _FILTERED):
        first = trial_plan([0], [micro_batch], [blocks_for(tokens + 1, info.block_tokens)])
        second = trial_plan([micro_batch], [tokens - micro_batch], [0])
        yield _prompt(tokens, sampling, logprobs=2), [first, second, trial_plan([tokens], [1], [0])]


def long_steps(info: BackendInfo) -> Iterator[WarmUp]:
    """A prompt in two chunks, each of as many tokens as a step and half a sequence may have."""
    longest = min(info.max_step_tokens, (info.context - 1) // 2)
    if longest < 1:
        return
    blocks, opened = blocks_for(2 * longest, info.block_tokens), _prompt(2 * longest, _GREEDY)
    yield opened, [trial_plan([0], [longest], [blocks]), trial_plan([longest], [longest], [0])]


def _prompt(tokens: int, sampling: messages.Sampling, logprobs: int = 0) -> messages.SlotOpen:
    zeros = messages.ints([0]) * tokens
    return messages.SlotOpen(
        slot=0, generation=0, seq=0, prompt_tokens=tokens, sampling=sampling, logprobs=logprobs, tokens=zeros
    )


def trial_plan(
    starts: Sequence[int], counts: Sequence[int], blocks: Sequence[int], *, sampled: bool = True
) -> messages.StepPlan:
    """A step of the slots from 0 on: `counts[i]` tokens of slot i from position `starts[i]`. The table of a
    slot begins with `blocks[i]` new blocks; 0: it stays. `sampled`: all rows are."""
    slots = messages.ints(range(len(counts)))
    tables = [slot for slot in slots if blocks[slot]]
    return messages.StepPlan(
        exec_epoch=0,
        step=0,
        mode="single",
        micro_batch=0,
        slots=slots,
        starts=messages.ints(starts),
        counts=messages.ints(counts),
        from_device=messages.ints(int(count == 1) for count in counts),
        sample_rows=slots if sampled else messages.ints(),
        sample_slots=slots if sampled else messages.ints(),
        table_slots=messages.ints(tables),
        table_first=messages.ints([0] * len(tables)),
        table_counts=messages.ints(blocks[slot] for slot in tables),
        table_blocks=messages.ints(range(sum(blocks))),
    )


SHM = Path("/dev/shm")


class ArenaError(HeadraceError):
    """An arena cannot be mapped, or its name does not fit its generation."""

    code, type = 500, "arena_error"


class Arena:
    """A mapping of one generation. Call `close` when nothing uses `view` any more."""

    def __init__(self, name: str, generation: int) -> None:
        """Map `/dev/shm/<name>`. Raises ArenaError."""
        if not re.fullmatch(rf"[\w.-]*?(?<!\d){generation}", name, re.ASCII):
            raise ArenaError(f"the arena {name!r:.200} is not of generation {generation}: restart kv_offload")
        self.name, self.generation = name, generation
        try:
            self._file = os.open(SHM / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaError(
                f"cannot open the arena {name}: {error.strerror}; kv_offload must run on this host, as the "
                "same user and with the same /dev/shm"
            ) from error
        try:
            self.size_bytes = os.fstat(self._file).st_size
            self.view = mmap.mmap(self._file, self.size_bytes)
        except (OSError, ValueError) as error:  # an empty file is a ValueError
            os.close(self._file)
            raise ArenaError(f"cannot map the arena {name} of {self.size_bytes} bytes: {error}") from error

    def range_error(self, offsets: Sequence[int], block_bytes: int) -> str:
        """Why blocks at these offsets cannot be copied; empty when they can. Access beyond the end of a
        shrunken segment would kill the process (SIGBUS)."""
        if min(offsets) < 0 or max(offsets) + block_bytes > self.size_bytes:
            return f"an offset is outside the arena of {self.size_bytes} bytes"
        if (now_bytes := os.fstat(self._file).st_size) < self.size_bytes:
            return f"the arena has shrunk from {self.size_bytes} to {now_bytes} bytes"
        return ""

    def close(self) -> None:
        """Unmap. Raises BufferError while a view of it exists."""
        self.view.close()
        os.close(self._file)
