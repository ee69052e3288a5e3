"""What ranks say to each other in the middle of a pass: into tensors that are there, on the current stream.

A stream of its own may then carry it, and the tensors stay those of the stream that made them (programs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as distributed
from torch import Tensor

# Their older names warn where there are the newer.
_all_gather: Callable[..., object] = getattr(
    distributed, "all_gather_single", distributed.all_gather_into_tensor
)
_reduce_scatter: Callable[..., object] = getattr(
    distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor
)


class Collectives:
    """Over a process group of torch.distributed, the default one unless told. All tensors are contiguous."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    def all_reduce(self, x: Tensor) -> None:
        """`x` becomes the sum over all ranks of their `x`."""
        distributed.all_reduce(x, group=self._group)

    def all_gather_into(self, out: Tensor, x: Tensor) -> None:
        """`out` `[size, *x.shape]`: everybody's `x`."""
        _all_gather(out.flatten(), x.flatten(), group=self._group)

    def all_gather_each(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        """all_gather_into for several."""
        for out, x in zip(outs, xs, strict=True):
            self.all_gather_into(out, x)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> None:
        """`out`: the sum over all ranks of their `x[rank]`; `x` is `[size, *out.shape]`."""
        _reduce_scatter(out.flatten(), x.flatten(), group=self._group)

    def all_to_all_into(self, out: Tensor, x: Tensor, came: Sequence[int], sent: Sequence[int]) -> None:
        """Rows of `x`, `sent[r]` to rank r in order; rows of `out`, `came[r]` from rank r."""
        distributed.all_to_all_single(out, x, list(came), list(sent), group=self._group)
