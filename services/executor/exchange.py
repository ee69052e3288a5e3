"""What ranks say to each other by plain copies, in memory that all of them can address.

    all-gather       all come │ lay out what I have │ all have │ take what the others laid out
    reduce-scatter   all come │ put each part into its owner's slots │ all have │ add up my slots

Between GPUs of one host the copy engines carry a copy: it takes no processor from compute beside it, where a
collective's kernel takes some, and a product that has a program for each processor then runs twice as long.
"All come" stands first, so that nobody still reads what was said before, whatever that was and in whichever
graph; a rank never writes what another one may be reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

_ALIGNED = 256  # bytes: where a tensor begins


class Memory(Protocol):
    """Memory of as many bytes on every rank; every rank can read and write that of all."""

    rank: int
    size: int

    def of(self, rank: int, shape: torch.Size, dtype: torch.dtype, at: int = 0) -> Tensor:
        """A rank's memory from byte `at` on. RuntimeError if that is more than it has."""

    def meet(self) -> None:
        """What comes after this sees what all ranks did before their call of it."""


class Copies:
    """What services.executor.collectives says, said by copies. All tensors are contiguous."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.rank, self.size = memory.rank, memory.size

    def all_gather_into(self, out: Tensor, x: Tensor) -> None:
        """`out` `[size, *x.shape]`: everybody's `x`."""
        self.all_gather_each((out,), (x,))

    def all_gather_each(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        """all_gather_into for several, with no more waiting than for one."""
        memory = self._memory
        at = list(accumulate((-(-x.nbytes // _ALIGNED) * _ALIGNED for x in xs), initial=0))
        all_of = list(zip(outs, xs, at, strict=False))  # the last is where they end
        memory.meet()
        for _, x, begin in all_of:
            memory.of(self.rank, x.shape, x.dtype, begin).copy_(x)
        memory.meet()
        for peer in self._others():
            for out, x, begin in all_of:
                out[peer].copy_(memory.of(peer, x.shape, x.dtype, begin))
        for out, x, _ in all_of:
            out[self.rank].copy_(x)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> None:
        """`out`: the sum over all ranks, in their order, of their `x[rank]`; `x` is `[size, *out.shape]`."""
        memory = self._memory
        slots = memory.of(self.rank, x.shape, x.dtype)
        memory.meet()
        slots[self.rank].copy_(x[self.rank])
        for peer in self._others():
            memory.of(peer, x.shape, x.dtype)[self.rank].copy_(x[peer])
        memory.meet()
        torch.sum(slots, 0, out=out)

    def all_reduce(self, x: Tensor) -> None:
        """`x` becomes the sum over all ranks of their `x`. ValueError unless they can share its elements."""
        if x.numel() % self.size:
            raise ValueError(f"{x.numel()} elements for {self.size} ranks")
        parts = x.view(self.size, -1)
        mine = torch.empty_like(parts[0])
        self.reduce_scatter_into(mine, parts)
        self.all_gather_into(parts, mine)

    def all_to_all_into(self, out: Tensor, x: Tensor, came: list[int], sent: list[int]) -> None:
        """Not offered: where rows land at their owner, the owner alone knows."""
        raise NotImplementedError("rows of unknown number go by services.executor.collectives")

    def _others(self) -> Iterator[int]:
        """From the next rank on, so that at any time each is written by one and read by one."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size
