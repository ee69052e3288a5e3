"""A step's chunks as two halves of as many tokens; the cut may go through a prompt.

The second half of a cut prompt attends to the KV of the first, which must be there first in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.executor.cuda.inputs import Chunk

CUT_TOKENS = 64  # the first half has a multiple of this: a product's tile of rows


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
