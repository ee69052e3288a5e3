"""The simulated engine implements Backend without weights: a latency model and reproducible tokens.

It sleeps for the time of a step's shape (SimTiming). In a pipeline a step passes the stages one after the
other, and other steps may be in the other stages. The next token depends on the slot's seed, the position and
the token before, so a request gets the same tokens in any batch, slot or order of steps.

The setting `sim` has the times of steps and copies:

    step=5000,token=20          µs for each step, plus µs for each of its tokens
    h200-8b                     a preset of shared.step_model
    h200-8b,stages=2,host_row=30    a pipeline of two stages; 30 µs for each row with the processor Wait
    step=5000,accept=70         rows may have drafts, of which 70 % are right
    step=5000,block=65536,d2h=5000,h2d=5000  bytes of a KV block; MB/s from the device and to it (0: no time)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from services.executor.engine import (
    Arena,
    BackendInfo,
    HostRow,
    MakeProcessor,
    Pending,
    StepOutput,
    YieldDevice,
    adapters_of,
    keep_device,
)
from services.executor.sampling.logits_processors import ProcessorPipelines, Wait
from shared.codec import MAX_STAGES
from shared.errors import SetupError
from shared.kv_blocks import blocks_for
from shared.messages import AT_DEVICE, ROW_REFUSED, WHOLE_VECTOR, Ints, SlotOpen, StepPlan, ints
from shared.step_model import PRESETS, StepModel, StepShape, shape_of

if TYPE_CHECKING:
    from torch import Tensor

_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, as in SplitMix64
_MASK = (1 << 64) - 1
_NO_GRAMMARS = f"{ROW_REFUSED}the simulated engine follows no grammar: ask an engine with weights"
HIDDEN = 64
FIRST_TEXT_ID = 256  # most vocabularies have control tokens below
_WORDS = 4
SIGNATURE_BYTES = 8 * _WORDS  # the contents of a simulated block
_FREE_PIECE_BYTES = 64 << 20  # copied in one call if copies take no time
_KEYS = ("step", "token", "stages", "host_row", "block", "d2h", "h2d", "accept")
MOST_DRAFTS = 8
_MOST_US = 60_000_000  # the most of any number in the setting


@dataclass(frozen=True, slots=True)
class SimOptions:
    """The simulated engine's facts and settings."""

    model: str = "sim"
    vocab: int = 32_000
    blocks: int = 65_536
    block_tokens: int = 16
    slots: int = 256
    max_step_tokens: int = 8_192
    max_context: int = 131_072
    timing: str = "step=5000"  # the setting `sim`
    processors: Mapping[str, MakeProcessor] = field(default_factory=dict)  # by name
    lora_places: int = 0
    lora_rank: int = 64


@dataclass(slots=True)
class _Slot:
    opened: SlotOpen
    stop_ids: frozenset[int]
    last: int
    length: int
    max_length: int
    tokens: list[int]  # all so far in a slot with logits processors, else empty
    done: bool = False


class SimBackend:
    """See services.executor.engine.Backend."""

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self._slots: dict[int, _Slot] = {}
        self._grammars: set[int] = set()  # slots with a grammar, which has no logits here: their rows fail
        self._timing = sim_timing(options.timing)
        self._free_s = [0.0] * self._timing.stages  # when each stage becomes idle
        self._host_rows = SimHostRows(options.processors, options.vocab, self._timing.host_row_us)
        self._blocks = SimBlocks(options.blocks, options.block_tokens, options.slots, options.max_context)
        self.copier = SimCopier(self._blocks, self._timing.copies)
        self.adapters = adapters_of("sim", options.lora_places, options.lora_places, options.lora_rank)

    @property
    def info(self) -> BackendInfo:
        o, block_bytes = self._options, self._timing.copies.block_bytes
        interchangeable = f"sim {o.model} {o.block_tokens} {block_bytes}"
        return BackendInfo(
            backend="sim",
            model=o.model,
            dtype="none",
            fingerprint=hashlib.sha256(interchangeable.encode()).hexdigest()[:32],
            vocab_digest="sim",
            vocab=o.vocab,
            blocks=o.blocks,
            block_tokens=o.block_tokens,
            bytes_per_block=block_bytes,
            slots=o.slots,
            max_step_tokens=o.max_step_tokens,
            max_context=o.max_context,
            stages=self._timing.stages,
            model_digest=hashlib.sha256(f"sim {o.model} {o.vocab}".encode()).hexdigest()[:32],
            sleeps=True,
            hidden=HIDDEN,
            memory_bytes=o.blocks * block_bytes,
            max_drafts=MOST_DRAFTS if self._timing.accept_pct else 0,
            adapter_places=o.lora_places if self.adapters is not None else 0,
        )

    def warm_up(self) -> None:
        """Does nothing."""

    def open_slot(self, opened: SlotOpen) -> None:
        last, max_length = opened.tokens[-1], opened.max_length or self._options.max_context
        tokens = list(opened.tokens) if opened.processors else []
        self._slots[opened.slot] = _Slot(
            opened, frozenset(opened.stop_ids), last, len(opened.tokens), max_length, tokens
        )
        if self.adapters is not None:
            self.adapters.open(opened)
            added = self.adapters.seed(opened.slot)
            opened = replace(opened, seed=(opened.seed + added) & _MASK)
            self._slots[opened.slot].opened = opened
        self._host_rows.pipelines.open(opened)
        (self._grammars.add if opened.grammar else self._grammars.discard)(opened.slot)

    def close_slot(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._grammars.discard(slot)
        self._host_rows.pipelines.close(slot)

    def forward(self, plan: StepPlan) -> Pending:
        now_s = time.monotonic()
        if AT_DEVICE in plan.from_device:
            plan = self._placed(plan)
        self._write(plan)
        left_s, due_s = self._pass_stages(now_s, self._timing.step_us(shape_of(plan)) / 1e6)
        if len(self._free_s) > 1 or self._host_rows.pipelines.rows_of(plan.sample_slots):
            _sleep_until(left_s)  # the next step's forward may start before this step is sampled
        return Pending(plan=plan, due_s=due_s)

    def sample(self, pending: Pending) -> StepOutput:
        slots = pending.plan.sample_slots
        hosted = self._host_rows.pipelines.rows_of(slots)
        host_us, failures = 0, dict[int, str]()
        if hosted:
            _sleep_until(pending.due_s)
            host_us, failures = self._host_rows.process(slots, self._tokens)
        if self._grammars:
            failures |= {row: _NO_GRAMMARS for row, slot in enumerate(slots) if slot in self._grammars}
        for row in failures:
            self._slots[slots[row]].done = True
        ids, done, counts, drafted = self._choose(pending.plan)
        ends = [*accumulate(counts)]
        for row in hosted:
            self._slots[slots[row]].tokens.extend(ids[ends[row] - counts[row] : ends[row]])
        opened = [(row, self._slots[slot].opened) for row, slot in enumerate(slots)]
        vectors = tuple((row, _vector(each)) for row, each in opened if each.pooling)
        _sleep_until(pending.due_s)
        output = StepOutput(
            ids=ids, done=done, host_us=host_us, row_errors=tuple(failures.items()), vectors=vectors
        )
        return replace(output, counts=counts, drafted=drafted) if any(drafted) else output

    def _choose(self, plan: StepPlan) -> tuple[Ints, Ints, Ints, Ints]:
        """The columns `ids`, `done`, `counts` and `drafted` of a step."""
        ids, done, counts, drafted = ints(), ints(), ints(), ints()
        for row, slot in zip(plan.sample_rows, plan.sample_slots, strict=True):
            state, before = self._slots[slot], len(ids)
            drafts = plan.counts[row] - 1 if plan.from_device[row] == AT_DEVICE and not state.done else 0
            position = plan.starts[row] + plan.counts[row] - drafts
            done.append(2 if state.done else 0)
            if state.done:
                ids.append(-1)
            while not state.done:
                right = len(ids) - before < drafts and self._is_right(state, position)
                state.last = token = self._next(state.opened.seed, position, state.last)
                early = position < state.opened.prompt_tokens + state.opened.min_tokens
                position += 1
                state.done = (token in state.stop_ids and not early) or position >= state.max_length
                state.length = position
                ids.append(token)
                done[-1] = 1 if state.done else 0
                if not right:
                    break
            counts.append(len(ids) - before)
            drafted.append(drafts)
        return ids, done, counts, drafted

    def _is_right(self, state: _Slot, position: int) -> bool:
        """Whether the draft of a position is the token there."""
        return self._next(~state.opened.seed & _MASK, position, state.last) % 100 < self._timing.accept_pct

    def _placed(self, plan: StepPlan) -> StepPlan:
        """The plan with the places of its slots."""
        starts = plan.starts[:]
        for row, fed in enumerate(plan.from_device):
            if fed == AT_DEVICE:
                starts[row] = self._slots[plan.slots[row]].length - 1
        return replace(plan, starts=starts)

    def reset(self) -> None:
        for slot in list(self._slots):
            self.close_slot(slot)
        if self.adapters is not None:
            self.adapters.reset()

    def sleep(self) -> None:
        self._blocks.signatures.fill(0)

    def wake(self) -> None:
        """Does nothing: there are no weights."""

    def close(self) -> None:
        self.reset()

    def _write(self, plan: StepPlan) -> None:
        """Write the blocks of rows in slots that are not done."""
        states = [self._slots[slot] for slot in plan.slots]
        rows = [row for row, state in enumerate(states) if not state.done]
        self._blocks.write(plan, rows, [states[row].opened.seq for row in rows])

    def _tokens(self, slot: int) -> Sequence[int]:
        return self._slots[slot].tokens

    def _pass_stages(self, now_s: float, took_s: float) -> tuple[float, float]:
        """When a step that starts now leaves the first and the last stage."""
        at_s, stages = now_s, len(self._free_s)
        for stage, free_s in enumerate(self._free_s):
            at_s = max(at_s, free_s) + took_s / stages
            self._free_s[stage] = at_s
        return self._free_s[0], at_s

    def _next(self, seed: int, position: int, last: int) -> int:
        mixed = (seed ^ (position * _MULTIPLIER) ^ (last << 32)) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed ^= mixed >> 27
        low = min(FIRST_TEXT_ID, self._options.vocab - 1)
        return low + mixed % (self._options.vocab - low)


def _vector(opened: SlotOpen) -> bytes:
    """Any vector of length 1 that depends on the prompt alone."""
    drawn = hashlib.shake_256(opened.tokens.tobytes()).digest(2 * HIDDEN)
    numbers = np.frombuffer(drawn, np.int16).astype(np.float64) + 0.5
    if opened.pooling != WHOLE_VECTOR:
        numbers = numbers[: opened.pooling]
    return (numbers / np.linalg.norm(numbers)).astype(np.float32).tobytes()


def _sleep_until(at_s: float) -> None:
    left_s = at_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


@dataclass(frozen=True, slots=True)
class SimCopies:
    """The size of a block, and the rates of its copies."""

    block_bytes: int = 65_536  # small, so that many fit into a small arena; 0: no copies
    d2h_mb_s: int = 0  # from the device to the arena; 0: copies take no time
    h2d_mb_s: int = 0

    def store_s(self, blocks: int) -> float:
        return blocks * self.block_bytes / (self.d2h_mb_s * 1e6) if self.d2h_mb_s else 0.0

    def load_s(self, blocks: int) -> float:
        return blocks * self.block_bytes / (self.h2d_mb_s * 1e6) if self.h2d_mb_s else 0.0


# Blocks of 16 tokens, at the rates of docs/benchmarks/kv_copies.md.
PRESET_COPIES = {
    "h200-8b": SimCopies(16 * 131_072, 50_700, 50_900),
    "smollm2-cpu": SimCopies(16 * 46_080, 3_300, 3_200),
}


@dataclass(frozen=True, slots=True)
class SimTiming:
    """The parsed setting `sim`: a step model, more time by the token, pipeline stages, copies."""

    model: StepModel
    token_us: int = 0
    stages: int = 1
    host_row_us: int = 0
    accept_pct: int = 0  # of drafts that are right; 0: rows have none
    copies: SimCopies = field(default_factory=SimCopies)

    def step_us(self, shape: StepShape) -> int:
        """The time of a step through all stages."""
        return self.model.step_us(shape) + self.token_us * shape.tokens


def sim_timing(setting: str) -> SimTiming:
    """Parse the setting `sim`. Raises SetupError."""
    names, numbers = [], {}
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals and key in PRESETS:
            names.append(key)
        elif key in _KEYS and value.isascii() and value.isdigit() and int(value) <= _MOST_US:
            numbers[key] = int(value)
        else:
            raise SetupError(
                f"sim: {entry!r:.60} is neither a preset ({', '.join(PRESETS)}) nor one of "
                f"{', '.join(_KEYS)} with a number; write for example step=5000,token=20"
            )
    if len(names) > 1 or (names and "step" in numbers):
        raise SetupError("sim: give one preset, or step=..., not both")
    model = PRESETS[names[0]] if names else StepModel(weights_us=numbers.get("step", 0), token_ns=0)
    stages = numbers.get("stages", 1)
    if not 1 <= stages <= MAX_STAGES:
        raise SetupError(f"sim: stages={stages} is not from 1 to {MAX_STAGES}")
    host_row_us = numbers.get("host_row", model.host_row_ns // 1_000)
    copies = _copies(numbers, PRESET_COPIES[names[0]] if names else SimCopies())
    if (accept_pct := numbers.get("accept", 0)) > 100:
        raise SetupError(f"sim: accept={accept_pct} is over 100: give a share of drafts in percent")
    return SimTiming(model, numbers.get("token", 0), stages, host_row_us, accept_pct, copies)


def _copies(numbers: dict[str, int], usual: SimCopies) -> SimCopies:
    block_bytes = numbers.get("block", usual.block_bytes)
    if 0 < block_bytes < SIGNATURE_BYTES:
        raise SetupError(f"sim: block={block_bytes} is less than {SIGNATURE_BYTES} bytes; 0 for no copies")
    rates = numbers.get("d2h", usual.d2h_mb_s), numbers.get("h2d", usual.h2d_mb_s)
    return SimCopies(block_bytes, *rates)


class SimBlocks:
    """The KV blocks and the block tables of all slots. A block holds only a signature of its last write.

    signature [sequence, index in the sequence, tokens so far, step]   of 8 bytes each"""

    def __init__(self, blocks: int, block_tokens: int, slots: int, max_context: int) -> None:
        self._block_tokens = block_tokens
        self.signatures: NDArray[np.int64] = np.zeros((blocks, _WORDS), dtype=np.int64)
        self._tables: NDArray[np.int32] = np.zeros((slots, blocks_for(max_context, block_tokens)), np.int32)

    def write(self, plan: StepPlan, rows: Sequence[int], sequences: Sequence[int]) -> None:
        """Apply a plan's table deltas and copies, then write the blocks of its forward `rows`, which belong
        to `sequences`."""
        at = 0
        for slot, begin, count in zip(plan.table_slots, plan.table_first, plan.table_counts, strict=True):
            self._tables[slot, begin : begin + count] = plan.table_blocks[at : at + count]
            at += count
        if plan.copy_from:
            self.signatures[_numbers(plan.copy_to)] = self.signatures[_numbers(plan.copy_from)]
        if not rows:
            return
        slots, starts = _numbers(plan.slots)[rows], _numbers(plan.starts)[rows]
        ends = starts + _numbers(plan.counts)[rows]
        first, last = starts // self._block_tokens, (ends - 1) // self._block_tokens
        spans = last - first + 1
        row = np.repeat(np.arange(len(rows)), spans)  # one entry for each written block
        index = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(spans) - spans, spans)
        written = np.empty((len(row), _WORDS), np.int64)
        written[:, 0] = np.asarray(sequences)[row]
        written[:, 1] = index
        written[:, 2] = np.minimum(ends[row], (index + 1) * self._block_tokens)
        written[:, 3] = plan.step
        self.signatures[self._tables[slots[row], index]] = written


def _numbers(column: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(column, dtype=np.int32)


class SimCopier:
    """See services.executor.engine.Copier. Copies take the times of the setting `sim` and move the
    signatures, so that tests can compare them."""

    def __init__(self, blocks: SimBlocks, times: SimCopies) -> None:
        self._signatures = blocks.signatures
        self._times = times
        slower_mb_s = min(times.d2h_mb_s, times.h2d_mb_s)
        self.piece_bytes = slower_mb_s * 1_000 or _FREE_PIECE_BYTES  # a millisecond of copying
        self._arena: NDArray[np.uint8] | None = None

    def attach(self, arena: Arena, yield_device: YieldDevice = keep_device) -> None:
        self._arena = np.frombuffer(arena.view, dtype=np.uint8)

    def detach(self) -> None:
        self._arena = None

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self._arena is not None, "no arena is attached"
        due_s = time.monotonic() + self._times.store_s(len(blocks))
        for block, offset in zip(blocks, offsets, strict=True):
            self._arena[offset : offset + SIGNATURE_BYTES] = self._signatures[block].view(np.uint8)
        _sleep_until(due_s)

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self._arena is not None, "no arena is attached"
        due_s = time.monotonic() + self._times.load_s(len(blocks))
        for block, offset in zip(blocks, offsets, strict=True):
            self._signatures[block].view(np.uint8)[:] = self._arena[offset : offset + SIGNATURE_BYTES]
        _sleep_until(due_s)

    def finish(self) -> int:
        """Copies end before they return."""
        return 0


class SimHostRows:
    """The logits processors of open slots, `pipelines`. `process` runs them on zero logits, and only checks
    their results. `Wait` sleeps once for all rows of a step, so that a row may take 30 µs."""

    def __init__(self, known: Mapping[str, MakeProcessor], vocab: int, host_row_us: int) -> None:
        """`host_row_us`: of a `Wait` without a time."""
        self._waits: list[float | None] = []  # ms, by row of the current step
        self.pipelines = ProcessorPipelines({name: self._noted(make) for name, make in known.items()})
        self._reads_logits = any(make is not Wait for make in known.values())
        self._vocab = vocab
        self._host_row_us = host_row_us

    def process(
        self, slots: Sequence[int], tokens: Callable[[int], Sequence[int]]
    ) -> tuple[int, dict[int, str]]:
        """Run the processors of the rows. Returns their time in µs and why rows failed, by index into
        `slots`."""
        rows = self.pipelines.rows_of(slots)
        began_ns = time.monotonic_ns()
        hosted = [HostRow(slots[row], tokens(slots[row]), self._logits()) for row in rows]
        failed = self.pipelines.run(hosted, nullcontext)
        sound = [not self._reads_logits or bool(row.logits.amax().isfinite()) for row in hosted]
        failed = self.pipelines.with_row_errors(hosted, failed, sound)
        self._sleep()
        return (time.monotonic_ns() - began_ns) // 1000, {rows[k]: why for k, why in failed.items()}

    def _sleep(self) -> None:
        waits, self._waits[:] = tuple(self._waits), []
        named_ms = [ms for ms in waits if ms is not None]
        us = 1e3 * max(named_ms, default=0.0) + self._host_row_us * (len(waits) - len(named_ms))
        if us:
            time.sleep(us / 1e6)

    def _logits(self) -> Tensor:
        if not self._reads_logits:
            return cast("Tensor", _Unread())
        import torch  # only if a processor reads logits

        return torch.zeros(self._vocab)

    def _noted(self, make: MakeProcessor) -> MakeProcessor:
        if make is not Wait:
            return make
        return lambda args, prompt: _Noted(Wait(args, prompt), self._waits)


class _Noted:
    """A Wait that records its time instead of waiting."""

    def __init__(self, wait: Wait, waits: list[float | None]) -> None:
        self._wait = wait
        self._waits = waits

    def process(self, generated: Sequence[int], logits: Tensor) -> Tensor:
        self._waits.append(self._wait.ms)
        return logits


class _Unread:
    """In place of logits that no processor reads, without torch."""
