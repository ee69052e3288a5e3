"""The adapters of an engine of a CPU: which one is in which place, and what a step's rows need of them.

    place   0     1        2 ...          slot ──SlotOpen──▶ place     0: no adapter
    line    none  A, B …   A, B …         a step: the line of each row's slot, by product; None: no adapter

A place is a line of addresses: an adapter in host memory is where its rows read it. A place changes between
two steps, on the device thread, so a step has one adapter in each place.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kernels.cpu_jit
from kernels.lora import Adapted, adapt
from services.executor.adapters.reading import Adapter, AdapterReader, projections
from services.executor.model.description import Shapes, Weight
from shared.messages import SlotOpen

if kernels.cpu_jit.available():
    from kernels.cpu_jit.thread_team import Call
    from kernels.lora.cpu import COLUMNS, MOST_LOW, adapt_call, line_of

Lines = NDArray[np.int64]  # [rows, COLUMNS] of a product; without Numba [rows], places
ByProduct = Mapping[str, Lines]


class Places:
    """See services.executor.engine.Adapters."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, places: int, most_rank: int, slots: int) -> None:
        """`dtype`: of the values between products."""
        self.count = places
        self._reader = AdapterReader(shapes, dtype, most_rank)
        self.read, self._weights = self._reader.read, self._reader.weights
        self.held: list[Adapter | None] = [None] * (places + 1)
        self._of_slot = np.zeros(slots, np.int64)
        width = COLUMNS if kernels.cpu_jit.available() else 1
        self._lines = {name: np.zeros((places + 1, width), np.int64) for name in self._weights}
        self._products = {name: Product(self, name, weight) for name, weight in self._weights.items()}

    def product(self, weight: Weight) -> Product | None:
        """The adapters' part of the product with this weight; None: no adapter has one."""
        return self._products.get(weight.name)

    def bind(self, place: int, adapter: Adapter | None) -> None:
        """Put an adapter into a place, between two steps."""
        self.held[place] = adapter
        for name, lines in self._lines.items():
            lines[place] = 0
            adapted = adapter.products.get(name) if adapter is not None else None
            if adapted is not None:
                lines[place] = line_of(adapted) if kernels.cpu_jit.available() else place

    def open(self, opened: SlotOpen) -> None:
        """The rows of a slot have the adapter in its place."""
        self._of_slot[opened.slot] = opened.adapter

    def reset(self) -> None:
        """Empty all places."""
        for place in range(1, self.count + 1):
            self.bind(place, None)

    def rows(self, slots: NDArray[np.int64], padding: int) -> ByProduct | None:
        """The lines of a step whose token rows are of these slots; None if none has an adapter."""
        places = self._of_slot[slots]
        if not places.any():
            return None
        places = np.pad(places, (0, padding)) if padding else places
        return {name: lines[places] for name, lines in self._lines.items()}


class Product:
    """The adapters' part of one product, in all layers."""

    def __init__(self, places: Places, name: str, weight: Weight) -> None:
        self._places, self._name = places, name
        self._bounds = np.array([0, *accumulate(part.shape[0] for part in weight.parts)], np.int64)

    def add(self, x: Tensor, out: Tensor, rows: ByProduct, layer: int) -> None:
        """Add to `out` `[rows, out]` what the adapters of the rows of `x` add in this layer."""
        if kernels.cpu_jit.available():
            self.call(x.contiguous(), out, rows, layer).run()
            return
        found = [self._places.held[place] for place in rows[self._name][:, 0]]
        matrices = [each.products.get(self._name) if each is not None else None for each in found]
        of_layer = [each and Adapted(each.a[layer], each.b[layer], each.scale) for each in matrices]
        adapt(x, out, self._bounds.tolist(), of_layer)

    def call(self, x: Tensor, out: Tensor, rows: ByProduct, layer: Any) -> Call:
        """The same as a call of machine code, for one layer or an array of all."""
        return adapt_call(x, out, rows[self._name], self._bounds, layer)


def build(shapes: Shapes, dtype: torch.dtype, places: int, most_rank: int, slots: int) -> Places:
    """The places of an engine."""
    if kernels.cpu_jit.available():
        most = max(len(weight.parts) for weight in projections(shapes).values())
        most_rank = min(most_rank, MOST_LOW // most)
    return Places(shapes, dtype, places, most_rank, slots)
