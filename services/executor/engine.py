"""An engine runs plans behind `Backend`; SimBackend and TorchBackend pass the same contract tests.

Every method of an engine is called from one thread, the device thread, in the order of the messages, but
`sample`: it may run on the host thread, of one step at a time and in step order, while the device thread goes
on. Whatever the device thread then forwards, opens or closes is of other slots than those sampled: both
threads write entries of their own slots in state that they share. Plans are strictly ordered by step. The
methods of its copier belong to a third thread, the copy worker (services.executor.kv_transfer.worker).

`plan_error`, `open_error`, `sequence_error` and `copy_error` find what must not reach an engine: slots that
are not open, blocks, positions and tokens that do not exist. On a device such an index kills the process or
writes into another sequence's memory; here it costs the step, the sequence that brings it, or the copy. They
are called on the event loop, while the device computes.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from services.executor.arena import Arena
from shared.kv_blocks import blocks_for
from shared.messages import (
    Floats,
    GrammarFailed,
    GrammarReady,
    Ints,
    KvCopy,
    Sampling,
    SlotOpen,
    StepPlan,
    floats,
    ints,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import Event

WARM_ROWS = 64  # matrix products are compiled up to here: larger steps take so long that it does not show
MAX_SEGMENTS = 32  # pieces: of some four layers
MOST_FLOAT32 = float(np.finfo(np.float32).max)
COMPUTE, COMM = (0, 1), (2, 3)  # the lanes of A and B, see shared.messages.SEGMENT_LANES


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
    stages: int = 1  # of a pipeline: so many steps are computed at once
    two_stream_tokens: int = 0  # see ExecHello
    max_stop_ids: int = 0  # likewise
    reports_grammars: bool = False  # likewise
    model_digest: str = ""  # likewise

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that its cache holds."""
        return min(self.max_context, self.blocks * self.block_tokens)


@dataclass(frozen=True, slots=True)
class Segment:
    """Some compute or talk of a half of a step: when it began, from the step's start on, and how long it
    took."""

    lane: int
    from_us: int
    took_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A step between its forward and its sampling: what `forward` returns and `sample` takes, once."""

    plan: StepPlan
    logits: Tensor | None = None  # [samples, vocab]
    padding_rows: int = 0
    forwarded: Event | None = None  # marks the forward's end on a GPU; with an answer, the sampling's
    answer: Tensor | None = None  # ids and done [2, rows]: sampling is queued already, `sample` only waits
    tokens: tuple[Ints, ...] = ()  # with an answer: the host records of its slots
    due_s: float = 0.0  # sim: when the forward ends, on the monotonic clock
    segments: Callable[[], tuple[Segment, ...]] = tuple  # of a step in halves, once it has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Sampled ids of one step, row for row as `StepPlan.sample_slots`. See StepResult."""

    ids: Ints
    done: Ints
    padding_rows: int = 0
    logprobs: Floats = field(default_factory=floats)
    top_counts: Ints = field(default_factory=ints)
    top_ids: Ints = field(default_factory=ints)
    top_logprobs: Floats = field(default_factory=floats)
    host_us: int = 0  # logits processors
    row_errors: tuple[tuple[int, str], ...] = ()
    segments: tuple[Segment, ...] = ()  # of a step in halves


@dataclass(slots=True)
class Alarm:
    """Why an engine is gone, empty while it is there: set once, on any thread. Its steps then never end."""

    why: str = ""

    def ring(self, why: str) -> None:
        """The engine is gone."""
        self.why = self.why or why


ReportGrammar = Callable[[GrammarReady | GrammarFailed], None]


def ignore_grammar_news(news: GrammarReady | GrammarFailed) -> None:
    """A ReportGrammar of an engine that is asked nothing."""


@dataclass(slots=True)
class GrammarNews:
    """Whom an engine tells that a grammar has been compiled: set once, before it is built."""

    report: ReportGrammar = ignore_grammar_news


YieldDevice = Callable[[float], bool]


def no_yield(took_s: float) -> bool:
    """A YieldDevice where no step waits."""
    return True


class Copier(Protocol):
    """Moves whole KV blocks between an engine and the host's arena, while steps run. Nobody else writes or
    reads the blocks of a load, or writes those of a store, until `finish` returns."""

    piece_bytes: int  # to copy in one call: about a millisecond's work, so that a stop need not wait longer

    def attach(self, arena: Arena, yield_device: YieldDevice = no_yield) -> None:
        """Copy from and to this arena from now on. May take seconds, in slices of some milliseconds: after
        each `yield_device` is called with what it took, returns when the next may begin, and False when
        nobody wants the arena any more. Raises ArenaError then. Errors leave nothing attached."""

    def detach(self) -> None:
        """Let go of the mapping; without one it does nothing."""

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy block `blocks[i]` to the arena's bytes from `offsets[i]` on, as the steps whose results are
        delivered left it. Returns when what was asked before is done, or later."""

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy the arena's bytes from `offsets[i]` on to block `blocks[i]`, after the steps whose results
        are delivered. Returns when what was asked before is done, or later."""

    def finish(self) -> int:
        """Return when all that was asked is done: what was stored is in the arena, and every later forward
        reads what was loaded. The time since the last `finish` in which bytes were on their way, by the
        device's clock, in us; 0 where the caller's clock tells as much."""


class Backend(Protocol):
    """An engine. Errors in `forward` or `sample` fail the step, not the process."""

    @property
    def info(self) -> BackendInfo:
        """Facts, known once the engine is built."""

    def warm_up(self) -> None:
        """Run every code path once, so that the first request pays for nothing."""

    def open_slot(self, opened: SlotOpen) -> None:
        """Set a slot up from scratch: tokens, sampling, seed, stops. Its block table is empty. What this
        raises is that sequence's error; its `without_host_work` is opened then."""

    def close_slot(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""

    def forward(self, plan: StepPlan) -> Pending:
        """Apply table deltas, then block copies, then compute the forward rows. Rows of a slot that
        is done (stop id seen, or `max_length` reached) are no-ops and write no KV. On return the
        work is queued or done. The slots of forwards that are not sampled yet are not in this plan, but
        for those that have their `answer` queued."""

    def sample(self, pending: Pending) -> StepOutput:
        """Choose a token for each sample row of that forward, remember it as the slot's last token
        (so the next plan may be device-fed), and wait for the ids to reach the host. Logits processors
        run first. A row whose processor fails, or whose logits are not finite, gets a row error, id -1 and
        done 2, and its slot is done."""

    def copier(self) -> Copier:
        """The one that moves this engine's blocks; always the same."""

    def reset(self) -> None:
        """Forget every slot and block table; keep the weights, and what lies in the blocks."""

    def close(self) -> None:
        """Free everything. A second call does nothing."""


def plan_error(plan: StepPlan, info: BackendInfo, open_slots: set[int]) -> str:
    """Why the plan cannot run on this engine with these slots open; empty when it can."""
    slots = {*plan.slots, *plan.table_slots}
    if plan.sample_slots != plan.slots:  # as in a step of decodes
        slots.update(plan.sample_slots)
    if not slots <= open_slots:
        return f"the plan names slot {min(slots - open_slots)}, which is not open"
    for blocks in (plan.table_blocks, plan.copy_from, plan.copy_to):
        if blocks and max(blocks) >= info.blocks:
            return f"the plan names block {max(blocks)} of {info.blocks}"
    if (end := _farthest(plan.starts, plan.counts)) > info.max_context:
        return f"the plan computes token {end} of a context of {info.max_context}"
    if (end := _farthest(plan.table_first, plan.table_counts)) > -(-info.max_context // info.block_tokens):
        return f"the plan sets entry {end} of a block table, more than a context has"
    return ""


def open_error(opened: SlotOpen, info: BackendInfo) -> str:
    """Why there is no such slot on this engine, whatever runs in it; empty when there is."""
    if opened.slot >= info.slots:
        return f"slot {opened.slot} is not one of {info.slots} slots"
    if not opened.tokens:
        return f"slot {opened.slot} is opened without a token"
    if len(opened.tokens) > info.max_context:
        return f"slot {opened.slot} has {len(opened.tokens)} tokens in a context of {info.max_context}"
    return ""


def sequence_error(opened: SlotOpen, info: BackendInfo) -> str:
    """Why this engine cannot compute what the sequence brings; empty when it can. The scheduler's door looks
    at the same, with what ExecHello says."""
    for what, ids in (("prompt", opened.tokens), ("logit_bias", opened.sampling.bias_ids)):
        if ids and (largest := int(_numbers(ids).max())) >= info.vocab:
            return f"{what}: the weights have {info.vocab} tokens, and no token {largest}"
    if 0 < info.max_stop_ids < len(opened.stop_ids):
        return f"stop_token_ids: {len(opened.stop_ids)} with the model's own, over {info.max_stop_ids}"
    values = [getattr(opened.sampling, each.name) for each in fields(opened.sampling)]
    numbers = [n for value in values for n in (value if isinstance(value, array) else (value,))]
    return "" if all(abs(number) <= MOST_FLOAT32 for number in numbers) else "its sampling is not finite"


def without_host_work(opened: SlotOpen, vocab: int) -> SlotOpen:
    """The slot of a sequence that cannot be opened, so that plans which name it can be computed: with what
    the engine knows of its tokens, and no wishes."""
    tokens = opened.tokens
    if tokens and int(_numbers(tokens).max()) >= vocab:
        tokens = ints(token if token < vocab else 0 for token in tokens)
    return SlotOpen(
        slot=opened.slot,
        generation=opened.generation,
        seq=opened.seq,
        prompt_tokens=opened.prompt_tokens,
        computed=opened.computed,
        max_length=opened.max_length,
        sampling=_GREEDY,
        tokens=tokens,
    )


def copy_error(copy: KvCopy, info: BackendInfo) -> str:
    """Why the blocks cannot be copied, whatever the arena; empty when they can."""
    if len(copy.blocks) != len(copy.offsets):
        return f"it has {len(copy.blocks)} blocks and {len(copy.offsets)} offsets"
    if not info.bytes_per_block or copy.block_bytes != info.bytes_per_block:
        return f"its blocks have {copy.block_bytes} bytes, those of this engine {info.bytes_per_block}"
    if copy.blocks and not 0 <= min(copy.blocks) <= max(copy.blocks) < info.blocks:
        return f"it names a block that is not one of {info.blocks}"
    return ""


def _farthest(first: Ints, counts: Ints) -> int:
    """The largest end of a range. No number is negative, so no sum of two is over 32 bits."""
    return int((_numbers(first) + _numbers(counts)).max()) if first else 0


def _numbers(column: Ints) -> NDArray[np.uint32]:
    return np.frombuffer(column, dtype=np.uint32)


_GREEDY = Sampling(temperature=0.0)
_FILTERED = Sampling(temperature=1.0, top_k=5, top_p=0.9, frequency_penalty=0.1)


WarmUp = tuple[SlotOpen, list[StepPlan]]  # a slot to open, and what runs after it


def warm_up_steps(info: BackendInfo) -> Iterator[WarmUp]:
    """Steps that touch every code path once: first chunk, chunk with prefix, decode, every sampler. Slots to
    open, each with the plans to run after it; they use slot 0 and the first blocks."""
    tokens = min(info.max_step_tokens, info.max_context - 3, 2 * info.block_tokens)
    if tokens < 2:
        return
    micro_batch = tokens // 2
    for sampling in (_GREEDY, _FILTERED):
        opened = SlotOpen(
            slot=0,
            generation=0,
            seq=0,
            prompt_tokens=tokens,
            sampling=sampling,
            logprobs=2,
            tokens=ints([0] * tokens),
        )
        blocks = blocks_for(tokens + 1, info.block_tokens)
        yield (
            opened,
            [_plan(0, micro_batch, blocks), _plan(micro_batch, tokens - micro_batch, 0), _plan(tokens, 1, 0)],
        )


def long_steps(info: BackendInfo) -> Iterator[WarmUp]:
    """A prompt of as many tokens as a step may have, or a sequence, and as many behind it."""
    longest = min(info.max_step_tokens, (info.context - 1) // 2)
    if longest < 1:
        return
    opened = SlotOpen(
        slot=0,
        generation=0,
        seq=0,
        prompt_tokens=2 * longest,
        sampling=_GREEDY,
        tokens=ints([0]) * (2 * longest),
    )
    blocks = blocks_for(2 * longest, info.block_tokens)
    yield opened, [_plan(0, longest, blocks), _plan(longest, longest, 0)]


def _plan(start: int, count: int, blocks: int) -> StepPlan:
    return StepPlan(
        exec_epoch=0,
        step=0,
        mode="single",
        micro_batch=0,
        slots=ints([0]),
        starts=ints([start]),
        counts=ints([count]),
        from_device=ints([int(count == 1)]),
        sample_rows=ints([0]),
        sample_slots=ints([0]),
        table_slots=ints([0] if blocks else []),
        table_first=ints([0] if blocks else []),
        table_counts=ints([blocks] if blocks else []),
        table_blocks=ints(range(blocks)),
    )


class HostSegmentTimer:
    """What the two halves of one step did when: their compute, and their talks under it. For traces. A lane
    may be noted on a thread of its own. Only the first pieces of a step are given: they show how it went on,
    and a step of a deep model has hundreds."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._began_ns = now_ns()
        self._recorded: list[tuple[int, int, int]] = []

    @contextmanager
    def segment(self, lane: int) -> Iterator[None]:
        """Note what is done within this."""
        began_ns = self._now_ns()
        try:
            yield
        finally:
            self._recorded.append((lane, began_ns, self._now_ns()))

    def segments(self) -> tuple[Segment, ...]:
        """The first ones, in the order of their beginnings."""
        first = sorted(self._recorded, key=lambda timed: timed[1])[:MAX_SEGMENTS]
        return tuple(
            Segment(lane, (began - self._began_ns) // 1000, (ended - began) // 1000)
            for lane, began, ended in first
        )
