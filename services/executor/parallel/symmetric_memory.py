"""The GPUs of one host map each other's memory (torch's symmetric memory) for fast collectives.

SymmetricMemory is the plain memory. SymmetricBuffers serve the fused all-reduce + RMSNorm
(kernels.collectives.gpu). OneShotAllReduce only sums. Nothing here uses NVLink multicast. ranks.py and cuda/
call it.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from kernels.collectives.gpu import EMPTY, MappedBuffers

# Symmetric buffers.
LIMIT_BYTES = 2 << 20  # of a sum: up to here faster than a separate sum and norm, as measured on H200
ONE_HOP_BYTES = 128 << 10  # of a sum: above it two hops are faster
_ROWS = 1024  # each is a program that waits for the other ranks: a GPU runs as many at once
_HALF_BYTES = 2 * LIMIT_BYTES + (1 << 18)  # norms, parts, and the rows for rounding up

BARRIER_TIMEOUT_MS = 60_000  # then the device traps, the process ends and the group starts anew

# One-shot all-reduces: bytes of a sum, by ranks, above which NCCL is faster, as measured on H200.
ONE_SHOT_LIMITS = {2: 4 << 20, 4: 2 << 20}
_MORE_RANKS = 256 << 10
_ALIGNED_BYTES = 16


def _symmetric(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Any]:
    """`count` numbers in the memory of this rank's GPU, and torch's handle of those of all ranks, which call
    it at once. Raises torch's errors if GPUs cannot map each other's memory."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # not every host grants the rights
    import torch.distributed._symmetric_memory as symmetric

    group = torch.distributed.group.WORLD
    assert group is not None, "the ranks have joined"
    memory = symmetric.empty(count, dtype=dtype, device=device)
    return memory, symmetric.rendezvous(memory, group)


class SymmetricMemory:
    """Memory of the GPUs of one host, mapped by all ranks: see services.executor.parallel.ranks.Memory. Calls
    are queued on the current stream, and a graph may capture them."""

    def __init__(self, bytes_each: int, device: torch.device) -> None:
        """See _symmetric."""
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._mine, self._shared = _symmetric(bytes_each, torch.uint8, device)
        self._all: list[Tensor] = [
            self._shared.get_buffer(rank, (bytes_each,), torch.uint8) for rank in range(self.size)
        ]

    def view(self, rank: int, shape: torch.Size, dtype: torch.dtype, at: int = 0) -> Tensor:
        return self._all[rank].narrow(0, at, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def barrier(self) -> None:
        self._shared.barrier(channel=0, timeout_ms=BARRIER_TIMEOUT_MS)


class SymmetricBuffers:
    """Owns the symmetric buffers of one rank. No rank may write before all ranks have created theirs."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """See _symmetric."""
        self._memory, shared = _symmetric(_HALF_BYTES, torch.int16, device)  # two halves, by turn
        self._memory.fill_(EMPTY)
        torch.cuda.synchronize(device)
        addresses = torch.tensor(shared.buffer_ptrs, dtype=torch.int64, device=device)
        self._buffers = MappedBuffers(addresses, rank, size, _HALF_BYTES, ONE_HOP_BYTES)

    def for_rows(self, rows: int, row_bytes: int) -> MappedBuffers | None:
        """The buffers for a sum of so many rows; None if it is too large."""
        fits = rows <= _ROWS and rows * row_bytes <= LIMIT_BYTES and self._buffers.has_room(rows, row_bytes)
        return self._buffers if fits else None


class OneShotAllReduce:
    """One-shot all-reduce over the GPUs of one host: every GPU reads the others' numbers in one launch, where
    a ring needs many hops even for short tensors. Owns the buffer of one rank.

    The order of summation differs by rank, so residual streams may differ in their last bits between ranks.
    This never changes a token on one rank only, because logits are gathered and not summed."""

    def __init__(self, size: int, device: torch.device, limit_bytes: int = 0) -> None:
        """See _symmetric. `limit_bytes` 0: as measured."""
        self._limit_bytes = limit_bytes or ONE_SHOT_LIMITS.get(size, _MORE_RANKS)
        self._buffer, _ = _symmetric(self._limit_bytes, torch.uint8, device)
        self._group: str = distributed.group.WORLD.group_name  # type: ignore[union-attr]  # all have joined
        self._sum: Any = torch.ops.symm_mem.one_shot_all_reduce_copy_out

    def can_sum(self, x: Tensor) -> bool:
        """Whether it can sum `x` faster than NCCL."""
        size = x.numel() * x.element_size()
        return 0 < size <= self._limit_bytes and size % _ALIGNED_BYTES == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` by the sum of all ranks' `x`, and return it. Two calls on two streams must not overlap:
        they share the buffer."""
        buffer = self._buffer.view(x.dtype)[: x.numel()]
        self._sum(buffer, x.view(-1), "sum", self._group, x.view(-1))
        return x
