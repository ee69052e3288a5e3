"""A step's chunks as two halves of as many tokens; the cut may go through a prompt.

The second half of a cut prompt attends to the KV of the first, which must be there first in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.messages import StepPlan, ints

CUT_TOKENS = 64  # the first half has a multiple of this: a product's tile of rows


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one prompt: token rows `first` to `first + count`, from position `start` on."""

    slot: int
    first: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Halves:
    """Two plans in place of one. `order`: for each sample row of the one, where it is among those of the
    first half followed by those of the second."""

    first: StepPlan
    second: StepPlan
    order: tuple[int, ...]


def halves(chunks: Sequence[Chunk], cut: int = CUT_TOKENS) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """The chunks of the first half of the tokens, and of the rest, whose rows begin at 0 again. Chunks stand
    in the order of their rows, from row 0 on; no half is empty where there are `2 * cut` tokens."""
    tokens = sum(chunk.count for chunk in chunks)
    middle = (tokens // 2 + cut // 2) // cut * cut
    before, behind = [], []
    for chunk in chunks:
        here = min(max(middle - chunk.first, 0), chunk.count)
        if here:
            before.append(replace(chunk, count=here))
        if here < chunk.count:
            first = chunk.first + here - middle
            behind.append(Chunk(chunk.slot, first, chunk.start + here, chunk.count - here))
    return tuple(before), tuple(behind)


def split(plan: StepPlan, cut: int = CUT_TOKENS) -> Halves | None:
    """The rows of a plan, decodes among them, in halves, without its tables and copies, which come before
    both; None for a step of less than `2 * cut` tokens."""
    rows, tokens = [], 0
    for row, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        rows.append(Chunk(row, tokens, start, count))
        tokens += count
    if tokens < 2 * cut:
        return None
    parts = halves(rows, cut)
    behind = {chunk.slot for chunk in parts[1]}  # with the row that is cut, whose end is there
    samples: tuple[list[int], list[int]] = ([], [])
    for sample, row in enumerate(plan.sample_rows):
        samples[row in behind].append(sample)
    order = [0] * len(plan.sample_rows)
    for at, sample in enumerate([*samples[0], *samples[1]]):
        order[sample] = at
    first, second = (_rows(plan, *half) for half in zip(parts, samples, strict=True))
    return Halves(first, second, tuple(order))


def _rows(plan: StepPlan, chunks: Sequence[Chunk], samples: Sequence[int]) -> StepPlan:
    """These parts of a plan's rows, which chunks have as their slots, and these of its sample rows."""
    row_of = {chunk.slot: row for row, chunk in enumerate(chunks)}
    return StepPlan(
        exec_epoch=plan.exec_epoch,
        step=plan.step,
        mode=plan.mode,
        micro_batch=plan.micro_batch,
        slots=ints(plan.slots[chunk.slot] for chunk in chunks),
        starts=ints(chunk.start for chunk in chunks),
        counts=ints(chunk.count for chunk in chunks),
        from_device=ints(plan.from_device[chunk.slot] for chunk in chunks),
        sample_rows=ints(row_of[plan.sample_rows[sample]] for sample in samples),
        sample_slots=ints(plan.sample_slots[sample] for sample in samples),
    )
