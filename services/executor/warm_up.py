"""Steps that touch every code path once: first chunk, chunk with prefix, decode, every sampler."""

from __future__ import annotations

from collections.abc import Iterator

from services.executor.backend import BackendInfo
from shared.blocks import blocks_for
from shared.messages import Sampling, SlotOpen, StepPlan, ints

WARM_ROWS = 64  # matrix products are compiled up to here: larger steps take so long that it does not show

_GREEDY = Sampling(temperature=0.0)
_FILTERED = Sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, frequency_penalty=0.1)


def warm_up_steps(info: BackendInfo) -> Iterator[tuple[SlotOpen, list[StepPlan]]]:
    """Slots to open, each with the plans to run after it. They use slot 0 and the first blocks."""
    tokens = min(info.max_step_tokens, info.max_context - 3, 2 * info.block_tokens)
    if tokens < 2:
        return
    half = tokens // 2
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
        yield opened, [_plan(0, half, blocks), _plan(half, tokens - half, 0), _plan(tokens, 1, 0)]


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
