"""The adapters of an engine of a GPU: matrices of all places on the device, and the place of each slot.

A place is copied to from pinned host memory on the stream of the steps: those that were queued before have
the adapter before it. Which rows have an adapter is read on the device, so a step that is queued ahead needs
nothing of the host; the host only chooses between the graphs with adapters and those without.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.lora.gpu import PlacedMatrices, adapt
from services.executor.adapters.reading import Adapter, AdapterReader, projections
from services.executor.model.description import Shapes
from shared.messages import SlotOpen

_RANK = 16  # a place has a multiple of it


def size_bytes(shapes: Shapes, dtype: torch.dtype, places: int, most_rank: int) -> int:
    """The device memory of so many places."""
    rank, numbers = _padded(most_rank), 0
    for weight in projections(shapes).values():
        width, height = weight.parts[0].shape[1], sum(part.shape[0] for part in weight.parts)
        numbers += rank * (len(weight.parts) * width + height)
    return places * shapes.layers * numbers * dtype.itemsize


class DevicePlaces:
    """See services.executor.engine.Adapters."""

    def __init__(
        self,
        shapes: Shapes,
        dtype: torch.dtype,
        places: int,
        most_rank: int,
        slots: int,
        device: torch.device,
    ) -> None:
        """`slots`: with the spare one of padding rows."""
        self.count, self._rank = places, _padded(most_rank)
        self._reader = AdapterReader(shapes, dtype, most_rank)
        self.held: list[Adapter | None] = [None] * (places + 1)
        self._on_host = np.zeros(slots, np.int32)
        self._of_slot = torch.zeros(slots, dtype=torch.int32, device=device)
        self._scales = torch.zeros(places, device=device)
        self._placed: dict[str, PlacedMatrices] = {}
        for name, weight in projections(shapes).items():
            ends = [*accumulate(part.shape[0] for part in weight.parts)]
            rows, width = len(ends) * self._rank, weight.parts[0].shape[1]
            a = torch.zeros(places, shapes.layers, rows, width, dtype=dtype, device=device)
            b = torch.zeros(places, shapes.layers, self._rank, ends[-1], dtype=dtype, device=device)
            bounds = ends[0], ends[min(1, len(ends) - 1)]
            self._placed[name] = PlacedMatrices(a, b, self._scales, bounds)

    def read(self, path: str) -> Adapter:
        """Read an adapter, on any thread, to pinned memory. Raises BadRequest."""
        adapter = self._reader.read(path)
        if self._of_slot.is_cuda:
            adapter = adapter.pinned()
        return adapter

    @torch.inference_mode()
    def bind(self, place: int, adapter: Adapter | None) -> None:
        """Put an adapter into a place, in the order of the device's queue."""
        self.held[place] = adapter
        for name, placed in self._placed.items():
            a, b = placed.a[place - 1], placed.b[place - 1]
            a.zero_()
            b.zero_()
            found = adapter.products.get(name) if adapter is not None else None
            if found is None:
                continue
            for segment in range(placed.segments):
                rows = slice(segment * self._rank, segment * self._rank + found.rank)
                own = slice(segment * found.rank, (segment + 1) * found.rank)
                a[:, rows].copy_(found.a[:, own], non_blocking=True)
            b[:, : found.rank].copy_(found.b, non_blocking=True)
            self._scales[place - 1].fill_(found.scale)

    def open(self, opened: SlotOpen) -> None:
        """The rows of a slot have the adapter in its place."""
        if self._on_host[opened.slot] != opened.adapter:
            self._on_host[opened.slot] = opened.adapter
            self._of_slot[opened.slot].fill_(opened.adapter)

    def reset(self) -> None:
        """No slot has a place; the next binds replace the matrices."""
        self.held = [None] * (self.count + 1)
        self._on_host[:] = 0
        self._of_slot.zero_()

    def is_any_in(self, slots: Iterable[int]) -> bool:
        """Whether one of these slots has an adapter."""
        return bool(self._on_host[[*slots]].any())

    def add(self, name: str, layer: int, x: Tensor, out: Tensor, slots: Tensor) -> None:
        """Add to the product `out` of `x` what the adapters of its rows add; `slots` of the rows."""
        adapt(x, out, self._placed[name], layer, slots, self._of_slot)


def _padded(rank: int) -> int:
    return -(-rank // _RANK) * _RANK


def build(
    shapes: Shapes, dtype: torch.dtype, places: int, most_rank: int, slots: int, device: torch.device
) -> DevicePlaces:
    """The places of an engine of a GPU."""
    return DevicePlaces(shapes, dtype, places, most_rank, slots, device)
