"""An engine without weights: a latency model and reproducible tokens. Ships in the product.

A step takes the time of its shape (see sim_timing), slept through as a GPU would be waited for; in a
pipeline it passes one stage after the other, and another step may be in the stage that it has left. The
next token depends on the slot's seed, its position and the token before, so that the same request gives
the same tokens in any batch, slot or order of steps.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.executor.backend import BackendInfo, Pending, StepOutput
from services.executor.processors import MakeProcessor
from services.executor.sim_blocks import SimBlocks, SimCopier
from services.executor.sim_host import SimHostRows
from services.executor.sim_timing import sim_timing
from shared.messages import Ints, SlotOpen, StepPlan, ints
from shared.messages.steps import ROW_REFUSED
from shared.step_model import shape_of

_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, as in SplitMix64
_MASK = (1 << 64) - 1
_NO_GRAMMARS = f"{ROW_REFUSED}the simulated engine follows no grammar: ask an engine with weights"
FIRST_TEXT_ID = 256  # below are control tokens in most vocabularies


@dataclass(frozen=True, slots=True)
class SimOptions:
    """The engine that SimBackend pretends to be."""

    model: str = "sim"
    vocab: int = 32_000
    blocks: int = 65_536
    block_tokens: int = 16
    slots: int = 256
    max_step_tokens: int = 8_192
    max_context: int = 131_072
    timing: str = "step=5000"  # the setting `sim`
    processors: Mapping[str, MakeProcessor] = field(default_factory=dict)  # by the names requests give


@dataclass(slots=True)
class _Slot:
    opened: SlotOpen
    stop_ids: frozenset[int]
    last: int
    max_length: int
    tokens: list[int]  # all so far; of a slot with logits processors, else empty
    done: bool = False


class SimBackend:
    """See services.executor.backend.Backend."""

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self._slots: dict[int, _Slot] = {}
        self._grammars: set[int] = (
            set()
        )  # slots that were opened with one: its tokens are not chosen by logits
        self._timing = sim_timing(options.timing)
        self._free_s = [0.0] * self._timing.stages  # when each stage has nothing left to do
        self._host_rows = SimHostRows(options.processors, options.vocab, self._timing.host_row_us)
        self._blocks = SimBlocks(options.blocks, options.block_tokens, options.slots, options.max_context)
        self._copier = SimCopier(self._blocks, self._timing.copies)

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
        )

    def warm_up(self) -> None:
        """Nothing to warm."""

    def open_slot(self, opened: SlotOpen) -> None:
        last, max_length = opened.tokens[-1], opened.max_length or self._options.max_context
        tokens = list(opened.tokens) if opened.processors else []
        self._slots[opened.slot] = _Slot(opened, frozenset(opened.stop_ids), last, max_length, tokens)
        self._host_rows.open(opened)
        (self._grammars.add if opened.grammar else self._grammars.discard)(opened.slot)

    def close_slot(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._grammars.discard(slot)
        self._host_rows.close(slot)

    def forward(self, plan: StepPlan) -> Pending:
        now_s = time.monotonic()
        self._write(plan)
        left_s, due_s = self._pass_stages(now_s, self._timing.step_us(shape_of(plan)) / 1e6)
        if len(self._free_s) > 1 or self._host_rows.rows_of(plan.sample_slots):
            _sleep_until(left_s)  # the next step's forward may begin before this step is sampled
        return Pending(plan=plan, due_s=due_s)

    def sample(self, pending: Pending) -> StepOutput:
        slots = pending.plan.sample_slots
        hosted = self._host_rows.rows_of(slots)
        host_us, failures = 0, dict[int, str]()
        if hosted:
            _sleep_until(pending.due_s)
            host_us, failures = self._host_rows.process(slots, self._tokens)
        if self._grammars:
            failures |= {row: _NO_GRAMMARS for row, slot in enumerate(slots) if slot in self._grammars}
        for row in failures:
            self._slots[slots[row]].done = True
        ids, done = self._choose(pending.plan)
        for row in hosted:
            self._slots[slots[row]].tokens.append(ids[row])
        _sleep_until(pending.due_s)
        return StepOutput(ids=ids, done=done, host_us=host_us, row_errors=tuple(failures.items()))

    def _choose(self, plan: StepPlan) -> tuple[Ints, Ints]:
        """The columns `ids` and `done` of a step."""
        ids, done = ints(), ints()
        for row, slot in zip(plan.sample_rows, plan.sample_slots, strict=True):
            state = self._slots[slot]
            position = plan.starts[row] + plan.counts[row]
            if state.done:
                ids.append(-1)
                done.append(2)
                continue
            state.last = token = self._next(state.opened.seed, position, state.last)
            state.done = token in state.stop_ids or position + 1 >= state.max_length
            ids.append(token)
            done.append(1 if state.done else 0)
        return ids, done

    def copier(self) -> SimCopier:
        return self._copier

    def reset(self) -> None:
        for slot in list(self._slots):
            self.close_slot(slot)

    def close(self) -> None:
        self.reset()

    def _write(self, plan: StepPlan) -> None:
        """Write the blocks of the rows that are not done."""
        states = [self._slots[slot] for slot in plan.slots]
        rows = [row for row, state in enumerate(states) if not state.done]
        self._blocks.write(plan, rows, [states[row].opened.seq for row in rows])

    def _tokens(self, slot: int) -> Sequence[int]:
        return self._slots[slot].tokens

    def _pass_stages(self, now_s: float, took_s: float) -> tuple[float, float]:
        """When a step that begins now leaves the first stage, and when the last."""
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


def _sleep_until(at_s: float) -> None:
    left_s = at_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
