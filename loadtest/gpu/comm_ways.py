"""The ways in which loadtest.gpu.comm runs a model: the kind of collectives, their share of the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from loadtest.gpu.comm_memory import HostMemory
from loadtest.gpu.comm_model import Talks
from loadtest.gpu.comm_times import all_say
from services.executor.cuda.comm_overlap import BARRIER_PROCESSORS, nccl_of_few_blocks
from services.executor.cuda.comm_overlap import BLOCKS as LIMIT
from services.executor.parallel.coroutines import Collective, ForwardPass, run_interleaved
from services.executor.parallel.ranks import Memory, PeerCopies

Together = Callable[[Sequence[ForwardPass]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class How:
    """`leave_processors_free`: processors that the products leave free."""

    talks: Talks
    spare: int = 0


def run_in_turn(forward_passes: Sequence[ForwardPass]) -> list[Tensor]:
    """As `run_interleaved`, without overlap."""

    def start(forward_pass: int, collective: Collective) -> Callable[[], object]:
        collective()
        return lambda: None

    return run_interleaved(forward_passes, start)


class GroupTalks:
    """What ranks say in a process group of torch.distributed; None: the default one."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    def all_reduce(self, x: Tensor) -> None:
        distributed.all_reduce(x, group=self._group)

    def all_gather_into(self, out: Tensor, x: Tensor) -> None:
        _call("all_gather_single", "all_gather_into_tensor", out.flatten(), x.flatten(), group=self._group)

    def all_gather_each(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        for out, x in zip(outs, xs, strict=True):
            self.all_gather_into(out, x)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> None:
        _call("reduce_scatter_single", "reduce_scatter_tensor", out.flatten(), x.flatten(), group=self._group)


def _call(newer: str, older: str, *given: Any, **more: Any) -> None:
    """Call torch.distributed's function by its newer name, where there is one: the older one warns then."""
    call = getattr(distributed, newer, None) or getattr(distributed, older)
    call(*given, **more)


class Silent:
    """Ranks that say nothing: a rank gets its own part of what it would get, so that numbers stay numbers."""

    def __init__(self, group: GroupTalks) -> None:
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, x: Tensor) -> None:
        return

    def all_gather_into(self, out: Tensor, x: Tensor) -> None:
        if x.dtype == torch.int32:  # routes: as if all had these, so that the experts have as much to do
            out.copy_(x.expand_as(out))
        else:
            out[self.rank].copy_(x)

    def all_gather_each(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        for out, x in zip(outs, xs, strict=True):
            self.all_gather_into(out, x)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x[self.rank])


def offered(group: GroupTalks, device: torch.device, most_bytes: int) -> dict[str, How]:
    """By name; `most_bytes` that ranks say at once by copies, 0: they do not. `on…` in halves, the others
    not."""
    silent = Silent(group)
    ways = {"off": How(group), "silent": How(silent), "on": How(group)}
    if device.type == "cuda":
        limited = GroupTalks(nccl_of_few_blocks().group)
        ways |= {f"on {LIMIT}": How(limited), f"on {LIMIT} spared": How(limited, LIMIT)}
    copies = _copies(group, device, most_bytes) if most_bytes else None
    if copies is not None:
        ways |= {
            "off copy": How(copies),
            "on copy": How(copies),
            "on copy spared": How(copies, BARRIER_PROCESSORS),
        }
    return ways | {"on silent": How(silent)}


class Way:
    """A pass, as a graph on a GPU. Keeps what the graph reads."""

    graph: Any = None

    def __init__(
        self, run: Callable[[Together, Tensor], None], together: Together, out: Tensor, spare: int
    ) -> None:
        """`run` writes to the tensor it gets."""
        self._run, self._together, self.out, self._spare = run, together, out, spare
        self()

    def capture(self, pool: Any) -> None:
        """From now on replay a graph."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self()
        self.graph = graph
        self()
        torch.cuda.synchronize()

    def directly(self, together: Together) -> None:
        """Without a graph."""
        with _spare(self._spare):
            self._run(together, self.out)

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.directly(self._together)


def _spare(count: int) -> contextlib.AbstractContextManager[None]:
    if not count or not torch.cuda.is_available():
        return contextlib.nullcontext()
    from services.executor.cuda.comm_overlap import leave_processors_free

    return leave_processors_free(count)


def _copies(group: GroupTalks, device: torch.device, most_bytes: int) -> PeerCopies | None:
    """None, on all ranks, where one has no such memory or hears something else than its group says."""
    heard, copies = False, None
    try:
        copies = PeerCopies(_memory(device, most_bytes))
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        print(f"rank {group.rank}: no copies: {error}", flush=True)
    if not all_say(copies is not None, device) or copies is None:
        return None
    try:
        heard = _same(copies, group, device)
    except RuntimeError as error:
        print(f"rank {group.rank}: copies failed: {error}", flush=True)
    if all_say(heard, device):
        return copies
    if group.rank == 0:
        print("copies say something else than collectives", flush=True)
    return None


def _memory(device: torch.device, most_bytes: int) -> Memory:
    if device.type == "cpu":
        return HostMemory(most_bytes)
    from services.executor.parallel.peer_memory import PeerMemory

    return PeerMemory(most_bytes, device)


def _same(copies: PeerCopies, group: GroupTalks, device: torch.device) -> bool:
    """Whether copies say what collectives say, of whole numbers, a few times."""
    heard = []
    for turn in range(3):
        x = torch.full((group.size, 64, 32), float(group.rank + turn), device=device)
        for talks in (copies, group):
            out, part = x.new_empty(group.size, *x.shape), torch.empty_like(x[0])
            talks.all_gather_into(out, x)
            talks.reduce_scatter_into(part, x)
            heard.append(torch.cat([out.flatten(), part.flatten()]))
    return all(torch.equal(one, other) for one, other in zip(heard[::2], heard[1::2], strict=True))
