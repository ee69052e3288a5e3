"""The ranks of an executor are processes that compute one model together, and talk to each other.

A rank of `Solo` is alone and says nothing: it joins no process group. `join` makes the others: gloo between
CPUs, NCCL between GPUs. Every rank makes the same calls in the same order, on one thread; on a GPU a call is
queued on the current stream and may be captured in a graph.

Small host objects go through the store over which the ranks have met, so that no GPU is asked for them.

`Collectives` and `PeerCopies` are what ranks say in the middle of a pass, into tensors that are there.
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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as distributed
from torch import Tensor

from shared.errors import SetupError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from services.executor.parallel.peer_memory import OneShotAllReduce, SymmetricBuffers

T = TypeVar("T")

log = logging.getLogger("headrace.executor")

DRIVER = 0  # the rank that is the actor
RENDEZVOUS_TIMEOUT_S = 600.0  # the others may still be loading
LEAVE_TIMEOUT_S = 5.0
_LOOK_S = 0.002  # between two looks for what the others say
_ONE_HOST = "127.0.0.1"
# Over NVLink it needs rights that not every host gives, and more than one process that uses it may hang.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

_ALIGNED = 256  # bytes: where a tensor begins in the memory of Copies


class Ranks(Protocol):
    """What one rank has of its group. `rank` is from 0 on, below `size`."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place of `x`, which is contiguous; `x` itself."""

    def all_gather(self, x: Tensor) -> Tensor:
        """`[size, *x.shape]`: the `x` of every rank, all of one shape, which is not `[]`."""

    def exchange(self, mine: T) -> list[T]:
        """Everybody's small host object, by rank. Takes milliseconds: for the start. Raises SetupError when
        one is gone."""

    def close(self) -> None:
        """Leave. A second call does nothing."""


class Memory(Protocol):
    """Memory of as many bytes on every rank; every rank can read and write that of all."""

    rank: int
    size: int

    def of(self, rank: int, shape: torch.Size, dtype: torch.dtype, at: int = 0) -> Tensor:
        """A rank's memory from byte `at` on. RuntimeError if that is more than it has."""

    def barrier(self) -> None:
        """What comes after this sees what all ranks did before their call of it."""


class Solo:
    """The only rank of its group. See Ranks."""

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
    symmetric: SymmetricBuffers | None = None  # on GPUs, for sums with a norm behind them

    def __init__(
        self, rank: int, size: int, store: TCPStore, *, ordered: bool, gone: Callable[[], str]
    ) -> None:
        """With `ordered` a sum adds up by rank, so that a number's bits do not depend on where in `x` it
        stands; it costs the bytes of all ranks. `gone` says why another rank is no more."""
        self.rank, self.size = rank, size
        self._gone = gone
        self._store = store
        self._ordered = ordered
        self._exchanges = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._ordered:
            return x.copy_(self.all_gather(x).sum(0))
        if self.one_shot is not None and self.one_shot.fits(x):
            return self.one_shot.all_reduce(x)
        torch.distributed.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.size, *x.shape)
        _call("all_gather_single", "all_gather_into_tensor", found.flatten(0, 1), x.contiguous())
        return found

    def exchange(self, mine: T) -> list[T]:
        self._exchanges += 1
        keys = [f"{self._exchanges}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(mine))  # type: ignore[arg-type]  # bytes, too
        return [pickle.loads(self._awaited(key)) for key in keys]

    def _awaited(self, key: str) -> bytes:
        give_up_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        while not self._store.check([key]):  # its own wait would go on when nobody will ever say it
            if why := self._gone():
                raise SetupError(why)
            if time.monotonic() > give_up_s:
                raise SetupError(
                    f"another rank has said nothing for {RENDEZVOUS_TIMEOUT_S:.0f} s: see its log"
                )
            time.sleep(_LOOK_S)
        return self._store.get(key)

    def close(self) -> None:
        if not torch.distributed.is_initialized():
            return
        self.one_shot = self.symmetric = None
        if torch.distributed.get_backend() != "nccl":
            torch.distributed.destroy_process_group()
            return
        gc.collect()  # NCCL ends after the last graph that sums, which may lie in some cycle
        # Orderly it would wait for the others.
        abort = torch.distributed.distributed_c10d._abort_process_group
        leaving = threading.Thread(target=abort, name="leave", daemon=True)
        leaving.start()
        leaving.join(LEAVE_TIMEOUT_S)
        if leaving.is_alive():
            log.warning("NCCL has not ended in %.0f s: it is left as it is", LEAVE_TIMEOUT_S)


def rendezvous(size: int) -> TCPStore:
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
    gone: Callable[[], str] = str,
) -> DistributedRanks:
    """Become rank `rank` of `size` on this host, with `device`. `store`: the leader's, or its port for the
    others; `sums`: there will be many short ones; `gone`: why another rank is no more, empty while all are.
    Returns when all are there. One group a process. Raises SetupError when one is gone."""
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
    ranks.exchange(None)  # all have come: torch would wait for one that is gone
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore("torch", store),
        rank=rank,
        world_size=size,
        device_id=device if on_gpu else None,
    )
    if on_gpu and size > 1 and sums:
        from services.executor.parallel.peer_memory import one_shot_all_reduce, symmetric_buffers

        found = one_shot_all_reduce(size, device)
        ranks.one_shot = found if all(ranks.exchange(found is not None)) else None
        buffers = None if ordered else symmetric_buffers(rank, size, device)
        ranks.symmetric = buffers if all(ranks.exchange(buffers is not None)) else None
    return ranks


def _call(newer: str, older: str, *given: Any, **more: Any) -> None:
    """Call torch.distributed's function by its newer name: the older one warns where there are both. Looked
    up at the call, for a torch that was built without it serves on one device."""
    call = getattr(distributed, newer, None) or getattr(distributed, older)
    call(*given, **more)


def _patience() -> timedelta:
    return timedelta(seconds=RENDEZVOUS_TIMEOUT_S)


class Collectives:
    """What ranks say to each other in the middle of a pass: into tensors that are there, on the current
    stream. A stream of its own may then carry it, and the tensors stay those of the stream that made them
    (services.executor.parallel.coroutines).

    Over a process group of torch.distributed, the default one unless told. All tensors are contiguous."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    def all_reduce(self, x: Tensor) -> None:
        """`x` becomes the sum over all ranks of their `x`."""
        distributed.all_reduce(x, group=self._group)

    def all_gather_into(self, out: Tensor, x: Tensor) -> None:
        """`out` `[size, *x.shape]`: everybody's `x`."""
        _call("all_gather_single", "all_gather_into_tensor", out.flatten(), x.flatten(), group=self._group)

    def all_gather_each(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        """all_gather_into for several."""
        for out, x in zip(outs, xs, strict=True):
            self.all_gather_into(out, x)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> None:
        """`out`: the sum over all ranks of their `x[rank]`; `x` is `[size, *out.shape]`."""
        _call("reduce_scatter_single", "reduce_scatter_tensor", out.flatten(), x.flatten(), group=self._group)


class PeerCopies:
    """What Collectives says, said by plain copies, in memory that all ranks can address. All tensors are
    contiguous.

        all-gather       all come │ lay out what I have │ all have │ take what the others laid out
        reduce-scatter   all come │ put each part into its owner's slots │ all have │ add up my slots

    Between GPUs of one host the copy engines carry a copy: it takes no processor from compute beside it,
    where a collective's kernel takes some, and a product that has a program for each processor then runs
    twice as long. "All come" stands first, so that nobody still reads what was said before, whatever that was
    and in whichever graph; a rank never writes what another one may be reading."""

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
        memory.barrier()
        for _, x, begin in all_of:
            memory.of(self.rank, x.shape, x.dtype, begin).copy_(x)
        memory.barrier()
        for peer in self._others():
            for out, x, begin in all_of:
                out[peer].copy_(memory.of(peer, x.shape, x.dtype, begin))
        for out, x, _ in all_of:
            out[self.rank].copy_(x)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> None:
        """`out`: the sum over all ranks, in their order, of their `x[rank]`; `x` is `[size, *out.shape]`."""
        memory = self._memory
        slots = memory.of(self.rank, x.shape, x.dtype)
        memory.barrier()
        slots[self.rank].copy_(x[self.rank])
        for peer in self._others():
            memory.of(peer, x.shape, x.dtype)[self.rank].copy_(x[peer])
        memory.barrier()
        torch.sum(slots, 0, out=out)

    def all_reduce(self, x: Tensor) -> None:
        """`x` becomes the sum over all ranks of their `x`. ValueError unless they can share its elements."""
        if x.numel() % self.size:
            raise ValueError(f"{x.numel()} elements for {self.size} ranks")
        parts = x.view(self.size, -1)
        mine = torch.empty_like(parts[0])
        self.reduce_scatter_into(mine, parts)
        self.all_gather_into(parts, mine)

    def _others(self) -> Iterator[int]:
        """From the next rank on, so that at any time each is written by one and read by one."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size
