"""Memory of the GPUs of one host, mapped by all of its ranks: torch's symmetric memory, without multicast."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as distributed
from torch import Tensor

MEET_WITHIN_MS = 60_000  # then the device traps, and the process ends: the group starts anew


class PeerMemory:
    """See services.executor.exchange.Memory. What is called is queued on the current stream, and may be
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

    def meet(self) -> None:
        self._shared.barrier(channel=0, timeout_ms=MEET_WITHIN_MS)
