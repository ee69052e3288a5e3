"""Short sums over the GPUs of one host: every GPU reads the others' numbers itself, in one launch.

A ring passes what is short around in as many hops as for what is long. The numbers lie in memory that the
GPUs of the group have mapped from each other (torch's symmetric memory); no NVLink multicast. In which order
a GPU adds up is its own business, so residual streams may differ in their last bits between ranks. Logits are
gathered and not summed, which is why that never changes a token on one rank alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("headrace.executor")

LIMITS = {2: 4 << 20, 4: 2 << 20}  # bytes of a sum by ranks: over them NCCL is quicker, as measured on H200
_MORE_RANKS = 256 << 10
_ALIGNED_BYTES = 16


class ShortSums:
    """The buffer of one rank. Raises what torch says where GPUs cannot map each other's memory."""

    def __init__(self, size: int, device: torch.device, limit_bytes: int = 0) -> None:
        """All ranks do this at once. `limit_bytes` 0: as measured."""
        import torch.distributed._symmetric_memory as symmetric

        group = torch.distributed.group.WORLD
        assert group is not None, "the ranks have joined"
        self._limit_bytes = limit_bytes or LIMITS.get(size, _MORE_RANKS)
        self._group = group.group_name
        self._buffer = symmetric.empty(self._limit_bytes, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, group)
        self._sum: Any = torch.ops.symm_mem.one_shot_all_reduce_copy_out

    def take(self, x: Tensor) -> bool:
        """True for what it can sum, and quicker than NCCL."""
        size = x.numel() * x.element_size()
        return 0 < size <= self._limit_bytes and size % _ALIGNED_BYTES == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place of `x`; `x` itself. Two at once, on two streams, would write over
        each other's numbers: all come from one stream, or wait for each other."""
        buffer = self._buffer.view(x.dtype)[: x.numel()]
        self._sum(buffer, x.view(-1), "sum", self._group, x.view(-1))
        return x


def short_sums(size: int, device: torch.device) -> ShortSums | None:
    """None where there is no such memory: NCCL then sums everything."""
    try:
        return ShortSums(size, device)
    except (RuntimeError, ImportError, AttributeError) as error:
        log.warning("short sums go through NCCL, and take longer: %s", error)
        return None
