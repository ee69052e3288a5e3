"""What an adapter adds to a product: out += scale * B (A x), row by row (Hu et al. 2021, LoRA).

A product joins several projections, q, k and v for example, of which each has an A and a B of its own:

    A [segments * rank, in]      of all projections below each other
    B [rank, out]                column o is the row of B for output o, in the segment of o
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Adapted:
    """The matrices of an adapter for one product: of a layer `[segments * rank, in]` and `[rank, out]`, or of
    all layers, with one dimension before these."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.b.shape[-2]


def adapt(x: Tensor, out: Tensor, bounds: Sequence[int], adapters: Sequence[Adapted | None]) -> None:
    """Add to `out` `[rows, out]` what the adapter of each row of `x` `[rows, in]` adds. `bounds`: the first
    output of each segment, and the number of outputs. Sums are float32; a row's depend on no other row."""
    for row, adapter in enumerate(adapters):
        if adapter is None:
            continue
        low = adapter.a.float() @ x[row].float() * adapter.scale
        for segment, (begin, end) in enumerate(pairwise(bounds)):
            part = low[segment * adapter.rank : (segment + 1) * adapter.rank]
            out[row, begin:end] += (part @ adapter.b[:, begin:end].float()).to(out.dtype)
