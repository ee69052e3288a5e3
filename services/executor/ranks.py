"""The ranks of an executor: processes that compute one model together, and what they say to each other.

A rank of `Solo` is alone and says nothing: it never imports torch.distributed. `join` makes the others: gloo
between CPUs, NCCL between GPUs. Every rank makes the same calls in the same order, on one thread; on a GPU a
call is queued on the current stream and may be captured in a graph.

Small host objects go through the store over which the ranks have met, so that no GPU is asked for them.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from services.executor.cuda.letter_boxes import LetterBoxes
    from services.executor.cuda.short_sums import ShortSums

T = TypeVar("T")

log = logging.getLogger("headrace.executor")

LEADER = 0  # the rank that is the actor
MEET_WITHIN_S = 600.0  # the others may still be loading
LEAVE_WITHIN_S = 5.0
_ONE_HOST = "127.0.0.1"
# Over NVLink it needs rights that not every host gives, and more than one process that uses it may hang.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class Ranks(Protocol):
    """What one rank has of its group. `rank` is from 0 on, below `size`."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place of `x`, which is contiguous; `x` itself."""

    def all_gather(self, x: Tensor) -> Tensor:
        """`[size, *x.shape]`: the `x` of every rank, all of one shape, which is not `[]`."""

    def all_to_all(self, x: Tensor, counts: Sequence[int], found: Sequence[int]) -> Tensor:
        """Send rows of `x`, `counts[r]` of them to rank r, those of rank 0 first; the rows that came,
        `found[r]` from rank r, in the order of ranks."""

    def exchange(self, mine: T) -> list[T]:
        """Everybody's small host object, by rank. Takes milliseconds: for the start."""

    def close(self) -> None:
        """Leave. A second call does nothing."""


class Solo:
    """The only rank of its group. See Ranks."""

    rank, size = LEADER, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def all_to_all(self, x: Tensor, counts: Sequence[int], found: Sequence[int]) -> Tensor:
        return x

    def exchange(self, mine: T) -> list[T]:
        return [mine]

    def close(self) -> None:
        return


SOLO = Solo()


class Spread:
    """A rank of several, over torch.distributed. See Ranks; made by `join`."""

    short: ShortSums | None = None  # on GPUs
    boxes: LetterBoxes | None = None  # on GPUs, for sums with a norm behind them

    def __init__(self, rank: int, size: int, store: TCPStore, *, ordered: bool) -> None:
        """With `ordered` a sum adds up by rank, so that a number's bits do not depend on where in `x` it
        stands; it costs the bytes of all ranks."""
        self.rank, self.size = rank, size
        self._store = store
        self._ordered = ordered
        self._exchanges = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._ordered:
            return x.copy_(self.all_gather(x).sum(0))
        if self.short is not None and self.short.take(x):
            return self.short.all_reduce(x)
        torch.distributed.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.size, *x.shape)
        gather: Callable[[Tensor, Tensor], object] = getattr(
            torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
        )  # its older name warns where it has the newer
        gather(found.flatten(0, 1), x.contiguous())
        return found

    def all_to_all(self, x: Tensor, counts: Sequence[int], found: Sequence[int]) -> Tensor:
        came = x.new_empty(sum(found), *x.shape[1:])
        torch.distributed.all_to_all_single(came, x.contiguous(), list(found), list(counts))
        return came

    def exchange(self, mine: T) -> list[T]:
        self._exchanges += 1
        keys = [f"{self._exchanges}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(mine))  # type: ignore[arg-type]  # bytes, too
        return [pickle.loads(self._store.get(key)) for key in keys]

    def close(self) -> None:
        if not torch.distributed.is_initialized():
            return
        self.short = self.boxes = None
        if torch.distributed.get_backend() != "nccl":
            torch.distributed.destroy_process_group()
            return
        gc.collect()  # NCCL ends after the last graph that sums, which may lie in some cycle
        abort = (
            torch.distributed.distributed_c10d._abort_process_group
        )  # orderly it would wait for the others
        leaving = threading.Thread(target=abort, name="leave", daemon=True)
        leaving.start()
        leaving.join(LEAVE_WITHIN_S)
        if leaving.is_alive():
            log.warning("NCCL has not ended in %.0f s: it is left as it is", LEAVE_WITHIN_S)


def meeting(size: int) -> TCPStore:
    """The store over which the ranks of a new group meet, on a free port: the leader's."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(_ONE_HOST, 0, size, is_master=True, wait_for_workers=False, timeout=_patience())


def join(
    rank: int,
    size: int,
    store: TCPStore | int,
    device: torch.device,
    *,
    ordered: bool = False,
    sums: bool = True,
) -> Spread:
    """Become rank `rank` of `size` on this host, with `device`. `store`: the leader's, or its port for the
    others; `sums`: there will be many short ones. Returns when all are there. One group a process."""
    from torch import distributed
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not what the host's name resolves to
    for name, value in _NO_MULTICAST.items():
        os.environ[name] = value
    if isinstance(store, int):
        store = TCPStore(_ONE_HOST, store, size, timeout=_patience())
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore("torch", store),
        rank=rank,
        world_size=size,
        device_id=device if on_gpu else None,
    )
    ranks = Spread(rank, size, store, ordered=ordered)
    if on_gpu and size > 1 and sums:
        from services.executor.cuda.letter_boxes import letter_boxes
        from services.executor.cuda.short_sums import short_sums

        found = short_sums(size, device)
        ranks.short = found if all(ranks.exchange(found is not None)) else None
        boxes = None if ordered else letter_boxes(rank, size, device)
        ranks.boxes = boxes if all(ranks.exchange(boxes is not None)) else None
    return ranks


def _patience() -> timedelta:
    return timedelta(seconds=MEET_WITHIN_S)
