"""Memory that ranks on CPUs share through files, as GPUs map each other's memory, for
services.executor.parallel.ranks.MappedCopies, and the same collectives by a process group of torch.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor


class HostMemory:
    """See services.executor.parallel.ranks.Memory. Made by all ranks of the default group together."""

    def __init__(self, bytes_each: int) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        where: list[str | None] = [tempfile.mkdtemp() if self.rank == 0 else None]
        distributed.broadcast_object_list(where)
        paths = [Path(str(where[0])) / str(rank) for rank in range(self.size)]
        with paths[self.rank].open("wb") as file:
            file.truncate(bytes_each)
        self.barrier()
        self._all = [
            torch.from_file(str(path), shared=True, size=bytes_each, dtype=torch.uint8) for path in paths
        ]
        self.barrier()  # all have mapped all
        paths[self.rank].unlink()
        self.barrier()
        if self.rank == 0:
            os.rmdir(str(where[0]))

    def view(self, rank: int, shape: torch.Size, dtype: torch.dtype, at: int = 0) -> Tensor:
        return self._all[rank].narrow(0, at, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def barrier(self) -> None:
        distributed.barrier()


class GroupCollectives:
    """Collectives in the default process group of torch.distributed."""

    def all_reduce(self, x: Tensor) -> None:
        distributed.all_reduce(x)

    def all_gather_into(self, out: Tensor, x: Tensor) -> None:
        _call("all_gather_single", "all_gather_into_tensor", out.flatten(), x.flatten())

    def all_gather_each(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        for out, x in zip(outs, xs, strict=True):
            self.all_gather_into(out, x)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> None:
        _call("reduce_scatter_single", "reduce_scatter_tensor", out.flatten(), x.flatten())


def _call(newer: str, older: str, *given: Any) -> None:
    """Call torch.distributed's function by its newer name, where there is one: the older one warns then."""
    call = getattr(distributed, newer, None) or getattr(distributed, older)
    call(*given)
