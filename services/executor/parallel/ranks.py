"""The ranks of an executor are processes that compute one model together, with collectives between them.

`Solo` is a single rank without a process group. `join` creates the others, with gloo between CPUs and NCCL
between GPUs. Every rank makes the same calls in the same order, on one thread; on a GPU a call is queued on
the current stream, and a graph may capture it. Small host objects are exchanged through the rendezvous store,
without a GPU. `Collectives` and `MappedCopies` are for split steps: they write into given tensors.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as distributed
from torch import Tensor

from shared.errors import SetupError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from services.executor.parallel.symmetric_memory import OneShotAllReduce, SymmetricBuffers

T = TypeVar("T")

log = logging.getLogger("headrace.executor")

DRIVER = 0  # the rank in the actor's process
RENDEZVOUS_TIMEOUT_S = 600.0  # the others may still load their weights
LEAVE_TIMEOUT_S = 5.0
_STORE_POLL_S = 0.002  # between two polls of the store
_ONE_HOST = "127.0.0.1"
# NVLink multicast needs rights that not every host grants, and several processes that use it may hang.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

_ALIGNED = 256  # bytes: alignment of tensors in the memory of MappedCopies


class Ranks(Protocol):
    """One rank's view of its group. `rank` is from 0 to `size - 1`."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace the contiguous `x` by the sum of all ranks' `x`, and return it."""

    def all_gather(self, x: Tensor) -> Tensor:
        """`[size, *x.shape]`: the `x` of every rank, all of one shape, which is not `[]`."""

    def exchange(self, mine: T) -> list[T]:
        """The small host objects of all ranks, by rank. Takes milliseconds: use it at start only. Raises
        SetupError when a rank has died."""

    def close(self) -> None:
        """Leave the group. A second call does nothing."""


class Memory(Protocol):
    """Memory of the same size on every rank; every rank can read and write all of it."""

    rank: int
    size: int

    def view(self, rank: int, shape: torch.Size, dtype: torch.dtype, at: int = 0) -> Tensor:
        """A rank's memory from byte `at` on. Raises RuntimeError beyond its end."""

    def barrier(self) -> None:
        """Work after the barrier sees the work of all ranks before their barrier."""


class Solo:
    """A single rank. See Ranks."""

    rank, size = DRIVER, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def exchange(self, mine: T) -> list[T]:
        return [mine]

    def close(self) -> None:
        return


SOLO = Solo()


class DistributedRanks:
    """A rank of several, over torch.distributed. See Ranks; made by `join`."""

    one_shot: OneShotAllReduce | None = None  # on GPUs
    symmetric: SymmetricBuffers | None = None  # on GPUs, for fused all-reduce + RMSNorm

    def __init__(
        self, rank: int, size: int, store: TCPStore, *, ordered: bool, gone: Callable[[], str]
    ) -> None:
        """With `ordered` sums add up in the order of the ranks, so that a number's bits do not depend on its
        index in `x`; this moves the bytes of all ranks. `gone`: why another rank has died, or empty."""
        self.rank, self.size = rank, size
        self._gone = gone
        self._store = store
        self._ordered = ordered
        self._exchanges = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._ordered:
            return x.copy_(self.all_gather(x).sum(0))
        if self.one_shot is not None and self.one_shot.can_sum(x):
            return self.one_shot.all_reduce(x)
        torch.distributed.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.size, *x.shape)
        # The newer name, if there is one: the older one warns then.
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        gather(found.flatten(0, 1), x.contiguous())
        return found

    def exchange(self, mine: T) -> list[T]:
        self._exchanges += 1
        keys = [f"{self._exchanges}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(mine))  # type: ignore[arg-type]  # bytes, too
        return [pickle.loads(self._awaited(key)) for key in keys]

    def _awaited(self, key: str) -> bytes:
        give_up_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        while not self._store.check([key]):  # the store's own wait does not notice a dead rank
            if why := self._gone():
                raise SetupError(why)
            if time.monotonic() > give_up_s:
                raise SetupError(
                    f"another rank has not answered for {RENDEZVOUS_TIMEOUT_S:.0f} s: see its log"
                )
            time.sleep(_STORE_POLL_S)
        return self._store.get(key)

    def close(self) -> None:
        if not torch.distributed.is_initialized():
            return
        self.one_shot = self.symmetric = None
        if torch.distributed.get_backend() != "nccl":
            torch.distributed.destroy_process_group()
            return
        gc.collect()  # NCCL ends after the last graph with a sum, which a reference cycle may hold
        # An orderly end would wait for the other ranks.
        abort = torch.distributed.distributed_c10d._abort_process_group
        leaving = threading.Thread(target=abort, name="leave", daemon=True)
        leaving.start()
        leaving.join(LEAVE_TIMEOUT_S)
        if leaving.is_alive():
            log.warning("NCCL has not ended in %.0f s: it is left as it is", LEAVE_TIMEOUT_S)


def rendezvous(size: int) -> TCPStore:
    """The driver's store for the rendezvous of a new group, on a free port."""
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
    gone: Callable[[], str] = str,
) -> DistributedRanks:
    """Become rank `rank` of `size` on this host, with `device`; waits for all ranks. One group a process.
    `store`: the driver's, workers give its port. `sums`: many short sums will follow. `gone`: why another
    rank has died, or empty. Raises SetupError when a rank has died."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not what the host's name resolves to
    for name, value in _NO_MULTICAST.items():
        os.environ[name] = value
    if isinstance(store, int):
        store = TCPStore(_ONE_HOST, store, size, timeout=_patience())
    ranks = DistributedRanks(rank, size, store, ordered=ordered, gone=gone)
    ranks.exchange(None)  # all ranks are here: torch would wait for a dead rank
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore("torch", store),
        rank=rank,
        world_size=size,
        device_id=device if on_gpu else None,
    )
    if on_gpu and size > 1 and sums:
        from services.executor.parallel.symmetric_memory import OneShotAllReduce, SymmetricBuffers

        ranks.one_shot = if_mapped(
            ranks, lambda: OneShotAllReduce(size, device), "NCCL sums, which is slower"
        )
        if not ordered:
            apart = "sums and norms are separate and slower"
            ranks.symmetric = if_mapped(ranks, lambda: SymmetricBuffers(rank, size, device), apart)
    return ranks


def if_mapped(ranks: Ranks, make: Callable[[], T], otherwise: str) -> T | None:
    """What `make` returns on each rank. None on all if GPUs of one cannot map each other's memory: its log
    has the reason, and what is done `otherwise`."""
    found = None
    try:
        found = make()
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        log.warning("GPUs do not map each other's memory: %s: %s", otherwise, error)
    return found if all(ranks.exchange(found is not None)) else None


def _patience() -> timedelta:
    return timedelta(seconds=RENDEZVOUS_TIMEOUT_S)


class Collectives:
    """The all-reduce of split steps over a process group of torch.distributed. It writes into the given
    contiguous tensor, on the current stream: the communication may have its own stream, while the tensor
    belongs to the stream that made it (services.executor.parallel.coroutines)."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x` by the sum of all ranks' `x`."""
        distributed.all_reduce(x, group=self.group)


class MappedCopies:
    """Collectives by plain copies in memory that all ranks can address. All tensors are contiguous.

        all-gather       barrier │ write my part to my memory │ barrier │ read the other ranks' memory
        reduce-scatter   barrier │ write each part to its owner's memory │ barrier │ add up my memory

    Between GPUs of one host the copy engines do the copies and take no processors from compute. The kernel of
    an NCCL collective takes some, and a product with a program for each processor then takes twice as long.
    The first barrier ensures that no rank still reads the memory for an earlier collective, in any graph."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.rank, self.size = memory.rank, memory.size

    def all_gather_into(self, out: Tensor, x: Tensor) -> None:
        """Fill `out` `[size, *x.shape]` with the `x` of all ranks."""
        self.all_gather_each((out,), (x,))

    def all_gather_each(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        """all_gather_into for several tensors, with two barriers in all."""
        memory = self._memory
        at = list(accumulate((-(-x.nbytes // _ALIGNED) * _ALIGNED for x in xs), initial=0))
        all_of = list(zip(outs, xs, at, strict=False))  # `at` has their end, too
        memory.barrier()
        for _, x, begin in all_of:
            memory.view(self.rank, x.shape, x.dtype, begin).copy_(x)
        memory.barrier()
        for peer in self._others():
            for out, x, begin in all_of:
                out[peer].copy_(memory.view(peer, x.shape, x.dtype, begin))
        for out, x, _ in all_of:
            out[self.rank].copy_(x)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> None:
        """Fill `out` with the sum, in the order of the ranks, of their `x[rank]`; `x` is `[size,
        *out.shape]`."""
        memory = self._memory
        slots = memory.view(self.rank, x.shape, x.dtype)
        memory.barrier()
        slots[self.rank].copy_(x[self.rank])
        for peer in self._others():
            memory.view(peer, x.shape, x.dtype)[self.rank].copy_(x[peer])
        memory.barrier()
        torch.sum(slots, 0, out=out)

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x` by the sum of all ranks' `x`. Raises ValueError unless `size` divides its elements."""
        if x.numel() % self.size:
            raise ValueError(f"{x.numel()} elements for {self.size} ranks")
        parts = x.view(self.size, -1)
        mine = torch.empty_like(parts[0])
        self.reduce_scatter_into(mine, parts)
        self.all_gather_into(parts, mine)

    def _others(self) -> Iterator[int]:
        """The other ranks, from the next one on, so that at any time one rank writes or reads each memory."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size
