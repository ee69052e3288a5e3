"""An engine without weights: a latency model and reproducible tokens. Ships in the product.

A step takes `step_us + token_us * tokens`, slept through on the device thread as a GPU would be
waited for. The next token depends on the slot's seed, its position and the token before, so that
the same request gives the same tokens in any batch, slot or order of steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from services.executor.backend import BackendInfo, StepOutput
from shared.messages import SlotOpen, StepPlan, ints

_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, as in SplitMix64
_MASK = (1 << 64) - 1
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
    step_us: int = 5_000
    token_us: int = 0


@dataclass(slots=True)
class _Slot:
    opened: SlotOpen
    stop_ids: frozenset[int]
    last: int
    max_length: int
    done: bool = False


class SimBackend:
    """See services.executor.backend.Backend."""

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self._slots: dict[int, _Slot] = {}
        self._ready_at_s = 0.0

    @property
    def info(self) -> BackendInfo:
        o = self._options
        return BackendInfo(
            backend="sim",
            model=o.model,
            dtype="none",
            fingerprint="sim",
            vocab_digest="sim",
            vocab=o.vocab,
            blocks=o.blocks,
            block_tokens=o.block_tokens,
            bytes_per_block=0,
            slots=o.slots,
            max_step_tokens=o.max_step_tokens,
            max_context=o.max_context,
        )

    def warm_up(self) -> None:
        """Nothing to warm."""

    def open_slot(self, opened: SlotOpen) -> None:
        last, max_length = opened.tokens[-1], opened.max_length or self._options.max_context
        self._slots[opened.slot] = _Slot(opened, frozenset(opened.stop_ids), last, max_length)

    def close_slot(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def forward(self, plan: StepPlan) -> None:
        o = self._options
        self._ready_at_s = time.monotonic() + (o.step_us + o.token_us * sum(plan.counts)) / 1e6

    def sample(self, plan: StepPlan) -> StepOutput:
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
        left_s = self._ready_at_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        return StepOutput(ids=ids, done=done)

    def reset(self) -> None:
        self._slots.clear()

    def close(self) -> None:
        self._slots.clear()

    def _next(self, seed: int, position: int, last: int) -> int:
        mixed = (seed ^ (position * _MULTIPLIER) ^ (last << 32)) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed ^= mixed >> 27
        low = min(FIRST_TEXT_ID, self._options.vocab - 1)
        return low + mixed % (self._options.vocab - low)
