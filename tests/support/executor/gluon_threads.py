"""Runs kernels.attention.hopper on a CPU in float32: a group of warps is a thread, shared memory and barriers
are objects, and an asynchronous operation is done at once.

So it shows what is computed and that no group waits for ever, not that results of asynchronous operations are
waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import FP8, hopper

_WAIT_S = 60
_JITTED = (
    "_rows_of", "_copy_tile", "_fetch", "_widen", "_fetch_narrow", "_clear", "_softmax", "_step", "_compute",
    "_barriers",
)  # fmt: skip


@dataclass
class Pointer:
    """Elements of a flat tensor."""

    memory: Tensor
    at: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        self.changed, self.phase, self.count, self.arrivals, self.missing = threading.Condition(), 0, 0, 0, 0

    def step(self, arrivals: int, more: int) -> None:
        with self.changed:
            self.arrivals += arrivals
            self.missing += more
            assert self.arrivals <= self.count, "more arrivals than a phase has"
            if self.arrivals == self.count and not self.missing:
                self.phase, self.arrivals = self.phase + 1, 0
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: (self.phase & 1) != parity, _WAIT_S), "waits for ever"


class Shared:
    """A part of shared memory: full of NaN at first."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.shape = getattr(held, "shape", ())

    def index(self, i: Any) -> Any:
        return self.held[int(i)] if isinstance(self.held, list) else Shared(self.held[int(i)])

    def slice(self, first: int, count: int) -> Shared:
        return Shared(self.held[first : first + count])

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.held.permute(order))

    def load(self, layout: object) -> Tensor:
        found: Tensor = self.held.clone()
        return found

    def store(self, values: Tensor) -> None:
        self.held.copy_(values)


def _allocate(dtype: object, shape: list[int], layout: object) -> Shared:
    if dtype is torch.int64:
        return Shared([Barrier() for _ in range(shape[0])])
    return Shared(torch.full([int(size) for size in shape], torch.nan))


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    at = torch.as_tensor(pointer.at)
    if mask is None:
        return pointer.memory[at]
    mask = mask.expand(at.shape)
    return torch.where(mask, pointer.memory[torch.where(mask, at, 0)], other)


def _store(pointer: Pointer, values: Tensor, mask: Tensor | None = None) -> None:
    at = torch.as_tensor(pointer.at)
    inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.expand(at.shape)
    pointer.memory[at[inside]] = values[inside]


def _copy(kv: Tensor, place: list[Any], arrived: Barrier, part: Shared) -> None:
    row, column = int(place[0]), int(place[1])
    count, width = part.held.shape
    found = torch.zeros(count, width)
    rows = kv[row : row + count, column : column + width]
    found[: len(rows)] = rows
    part.held.copy_(found)
    arrived.step(0, -(1 if kv.dtype == FP8 else 2) * count * width)


def _product(a: Any, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Tensor:
    left = a.held if isinstance(a, Shared) else a
    return left @ b.held + (acc if use_acc else 0.0)


def _specialize(groups: list[Any], warps: object, registers: object) -> None:
    flaws: list[BaseException] = []

    def run(group: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            group(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised below
            flaws.append(error)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if flaws:
        raise flaws[0]


def _either(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: choose(torch.as_tensor(a), torch.as_tensor(b))


def run_in_threads(patch: pytest.MonkeyPatch) -> None:
    """Replace what the kernel is written in, until `patch` ends; its sums are float32, its inputs too."""
    program: dict[str, int] = {}
    layouts = ("SliceLayout", "NVMMADistributedLayout", "BlockedLayout", "DotOperandLayout")
    kept = {name: getattr(hopper.gl, name) for name in layouts}
    language = SimpleNamespace(
        **kept, bfloat16=torch.float32, float8e4nv=FP8, float32=torch.float32, int64=torch.int64,
        static_range=range,
        program_id=lambda axis: program["head" if axis == 0 else "tile"],
        load=_load, store=_store, where=torch.where, exp2=torch.exp2, zeros_like=torch.zeros_like,
        minimum=_either(torch.minimum), maximum=_either(torch.maximum),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        arange=lambda first, end, layout: torch.arange(first, int(end)),
        zeros=lambda shape, dtype, layout: torch.zeros(shape),
        full=lambda shape, value, dtype, layout: torch.full(shape, value),
        convert_layout=lambda x, layout: x,
        inline_asm_elementwise=lambda text, constraints, args, dtype, is_pure, pack: args[0].to(dtype),
        allocate_shared_memory=_allocate, warp_specialize=_specialize,
    )  # fmt: skip
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: None, init=lambda bar, count: setattr(bar, "count", count),
        wait=lambda bar, phase: bar.wait(int(phase)), expect=lambda bar, size: bar.step(1, size),
        arrive=lambda bar, count: bar.step(count, 0),
    )  # fmt: skip
    attend = hopper._attend.fn

    class Launch:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            def launch(query: Tensor, kv: Any, *more: Any, num_warps: int, **sizes: Any) -> None:
                arguments = [Pointer(x.view(-1)) if isinstance(x, Tensor) else x for x in (query, *more)]
                for program["tile"] in range(grid[1]):
                    for program["head"] in range(grid[0]):
                        attend(arguments[0], kv.base.view(kv.shape), *arguments[1:], **sizes)

            return launch

    for name in _JITTED:
        patch.setattr(hopper, name, getattr(hopper, name).fn)
    patch.setattr(hopper, "gl", language)
    patch.setattr(hopper, "mbarrier", barriers)
    patch.setattr(  # Triton's own refuses float32 here
        hopper, "TensorDescriptor", lambda base, shape, *more: SimpleNamespace(base=base, shape=shape)
    )
    patch.setattr(hopper, "tma", SimpleNamespace(async_copy_global_to_shared=_copy))
    patch.setattr(hopper, "fence_async_shared", lambda: None)
    patch.setattr(hopper, "_thread_barrier", lambda: None)
    patch.setattr(hopper, "warpgroup_mma", _product)
    patch.setattr(hopper, "warpgroup_mma_wait", lambda count, deps: deps[0] if len(deps) == 1 else deps)
    patch.setattr(hopper, "_attend", Launch())
