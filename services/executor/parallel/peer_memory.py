"""The GPUs of one host map each other's memory, and ranks talk through it: torch's symmetric memory.

A PeerMemory is such memory as it is. In SymmetricBuffers a sum between ranks, the residual add and the norm
are one kernel (kernels.collectives.gpu). OneShotAllReduce are sums alone. Nothing here uses NVLink multicast.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from kernels.collectives.gpu import EMPTY, PeerBuffers

log = logging.getLogger("headrace.executor")

# Of symmetric buffers.
LIMIT_BYTES = 2 << 20  # of a sum: up to here it is quicker than a sum and a norm apart, as measured on H200
ONE_HOP_BYTES = 128 << 10  # of a sum: over them two hops are quicker
_ROWS = 1024  # each a program that waits for those of the other ranks: a GPU runs as many at once
_HALF_BYTES = 2 * LIMIT_BYTES + (1 << 18)  # norms, parts, and the rows by which these are rounded up

# Of the meetings over PeerMemory.
BARRIER_TIMEOUT_MS = 60_000  # then the device traps, and the process ends: the group starts anew

# Of one-shot all-reduces.
ONE_SHOT_LIMITS = {
    2: 4 << 20,
    4: 2 << 20,
}  # bytes of a sum by ranks: over them NCCL is quicker, as measured on H200
_MORE_RANKS = 256 << 10
_ALIGNED_BYTES = 16


class PeerMemory:
    """Memory of the GPUs of one host, mapped by all of its ranks. See
    services.executor.parallel.ranks.Memory. What is called is queued on the current stream, and may be
    captured."""

    def __init__(self, bytes_each: int, device: torch.device, group: distributed.ProcessGroup) -> None:
        """Made by all ranks together. RuntimeError where GPUs cannot map each other's memory."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # needs rights not every host gives
        import torch.distributed._symmetric_memory as symmetric

        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._mine = symmetric.empty(bytes_each, dtype=torch.uint8, device=device)
        self._shared = symmetric.rendezvous(self._mine, group)
        self._all = [self._shared.get_buffer(rank, (bytes_each,), torch.uint8) for rank in range(self.size)]

    def of(self, rank: int, shape: torch.Size, dtype: torch.dtype, at: int = 0) -> Tensor:
        return self._all[rank].narrow(0, at, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def barrier(self) -> None:
        self._shared.barrier(channel=0, timeout_ms=BARRIER_TIMEOUT_MS)


class SymmetricBuffers:
    """The symmetric buffers of one rank of several GPUs. Owns the memory. Made by all ranks at once; raises
    what torch says where GPUs cannot map each other's. Whoever writes first must wait until all ranks have
    made theirs."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        group = torch.distributed.group.WORLD
        assert group is not None, "the ranks have joined"
        self._memory = symmetric.empty(_HALF_BYTES, dtype=torch.int16, device=device)  # two micro-batches
        shared = symmetric.rendezvous(self._memory, group)
        self._memory.fill_(EMPTY)
        torch.cuda.synchronize(device)
        addresses = torch.tensor(shared.buffer_ptrs, dtype=torch.int64, device=device)
        self._buffers = PeerBuffers(addresses, rank, size, _HALF_BYTES, ONE_HOP_BYTES)

    def of(self, rows: int, row_bytes: int) -> PeerBuffers | None:
        """The boxes, for a sum of so many rows; None where it is not for them."""
        fits = rows <= _ROWS and rows * row_bytes <= LIMIT_BYTES and self._buffers.fits(rows, row_bytes)
        return self._buffers if fits else None


def symmetric_buffers(rank: int, size: int, device: torch.device) -> SymmetricBuffers | None:
    """None where there is no such memory: sum and norm are then apart."""
    try:
        return SymmetricBuffers(rank, size, device)
    except (RuntimeError, ImportError, AttributeError) as error:
        log.warning("sums between GPUs and norms are apart, and take longer: %s", error)
        return None


class OneShotAllReduce:
    """one-shot all-reduces over the GPUs of one host: every GPU reads the others' numbers itself, in one
    launch. This is the buffer of one rank. Raises what torch says where GPUs cannot map each other's memory.

    A ring passes what is short around in as many hops as for what is long. In which order a GPU adds up is
    its own business, so residual streams may differ in their last bits between ranks. Logits are gathered and
    not summed, which is why that never changes a token on one rank alone."""

    def __init__(self, size: int, device: torch.device, limit_bytes: int = 0) -> None:
        """All ranks do this at once. `limit_bytes` 0: as measured."""
        import torch.distributed._symmetric_memory as symmetric

        group = torch.distributed.group.WORLD
        assert group is not None, "the ranks have joined"
        self._limit_bytes = limit_bytes or ONE_SHOT_LIMITS.get(size, _MORE_RANKS)
        self._group = group.group_name
        self._buffer = symmetric.empty(self._limit_bytes, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, group)
        self._sum: Any = torch.ops.symm_mem.one_shot_all_reduce_copy_out

    def fits(self, x: Tensor) -> bool:
        """True for what it can sum, and quicker than NCCL."""
        size = x.numel() * x.element_size()
        return 0 < size <= self._limit_bytes and size % _ALIGNED_BYTES == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place of `x`; `x` itself. Two at once, on two streams, would write over
        each other's numbers: all come from one stream, or wait for each other."""
        buffer = self._buffer.view(x.dtype)[: x.numel()]
        self._sum(buffer, x.view(-1), "sum", self._group, x.view(-1))
        return x


def one_shot_all_reduce(size: int, device: torch.device) -> OneShotAllReduce | None:
    """None where there is no such memory: NCCL then sums everything."""
    try:
        return OneShotAllReduce(size, device)
    except (RuntimeError, ImportError, AttributeError) as error:
        log.warning("one-shot all-reduces go through NCCL, and take longer: %s", error)
        return None
