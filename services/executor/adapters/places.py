"""The adapters of an engine of a CPU: which one is in which place, and what a step's rows need of them.

    place   0     1        2 ...          slot ──SlotOpen──▶ place     0: no adapter
    line    none  A, B …   A, B …         a step: the line of each row's slot, by product; None: no adapter

A place is a line of addresses: an adapter in host memory is where its rows read it. A place changes between
two steps, on the device thread, so a step has one adapter in each place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

import kernels.cpu_jit
from kernels.lora import Adapted, adapt
from services.executor.adapters.peft import Folder, check_targets, modules_of, read_folder, refusal
from services.executor.checkpoint.weights import TensorNames, pairs_in_halves
from services.executor.model.description import Part, Projection, Shapes, Weight, describe
from shared.messages import SlotOpen

if kernels.cpu_jit.available():
    from kernels.cpu_jit.thread_team import Call
    from kernels.lora.cpu import COLUMNS, MOST_LOW, adapt_call, line_of

Lines = NDArray[np.int64]  # [rows, COLUMNS] of a product; without Numba [rows], places
ByProduct = Mapping[str, Lines]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in host memory: its matrices of all layers, by product."""

    digest: str
    rank: int
    products: Mapping[str, Adapted]

    @property
    def size_bytes(self) -> int:
        return sum(each.a.nbytes + each.b.nbytes for each in self.products.values())


class Places:
    """See services.executor.engine.Adapters."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, places: int, most_rank: int, slots: int) -> None:
        """`dtype`: of the values between products."""
        self.count, self.most_rank = places, most_rank
        self._shapes, self._dtype = shapes, dtype
        self._weights = _projections(shapes)
        self.held: list[Adapter | None] = [None] * (places + 1)
        self._of_slot = np.zeros(slots, np.int64)
        width = COLUMNS if kernels.cpu_jit.available() else 1
        self._lines = {name: np.zeros((places + 1, width), np.int64) for name in self._weights}
        self._products = {name: Product(self, name, weight) for name, weight in self._weights.items()}

    def product(self, weight: Weight) -> Product | None:
        """The adapters' part of the product with this weight; None: no adapter has one."""
        return self._products.get(weight.name)

    def read(self, path: str) -> Adapter:
        """Read an adapter, on any thread. Raises BadRequest."""
        folder = read_folder(path, self.most_rank)
        try:
            tensors = load(folder.weights)
        except (SafetensorError, ValueError, KeyError) as error:
            raise refusal(f"its weights are not a whole safetensors file: {error}") from None
        names, found = TensorNames(self._shapes), modules_of(tensors)
        check_targets(
            found, _sizes(names, self._weights, self._shapes.layers), lambda n: tensors[n].shape, folder.rank
        )
        if not all(bool(each.isfinite().all()) for each in tensors.values()):
            raise refusal("it has numbers that are not finite")
        narrow = self._dtype == torch.bfloat16 or all(t.dtype == torch.bfloat16 for t in tensors.values())
        kind = torch.bfloat16 if narrow else torch.float32
        products: dict[str, Adapted] = {}
        read = {key: tensors[name].to(kind) for key, name in found.items()}
        for name, weight in self._weights.items():
            made = self._joined(weight, read, names, folder)
            products |= {} if made is None else {name: made}
        return Adapter(folder.digest, folder.rank, products)

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

    def _joined(
        self, weight: Weight, read: Mapping[tuple[str, str], Tensor], names: TensorNames, folder: Folder
    ) -> Adapted | None:
        """The matrices of all layers for one product; None if no layer has one."""
        layers, rank, order = self._shapes.layers, folder.rank, pairs_in_halves(self._shapes)
        begins = [0, *accumulate(part.shape[0] for part in weight.parts)]
        a = b = None
        for layer in range(layers):
            for i, part in enumerate(weight.parts):
                module, rows = _module(names, part, layer)
                if (module, "lora_A") not in read:
                    continue
                down, up = read[module, "lora_A"], read[module, "lora_B"][rows]
                if a is None or b is None:
                    a = down.new_zeros(layers, len(weight.parts) * rank, down.shape[1])
                    b = down.new_zeros(layers, rank, begins[-1])
                if part.name in ("q", "k") and len(order):
                    up = up[torch.arange(len(up)).view(-1, len(order))[:, order].flatten()]
                a[layer, i * rank : (i + 1) * rank] = down
                b[layer, :, begins[i] : begins[i + 1]] = up.T
        return None if a is None or b is None else Adapted(a, b, folder.scale)


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
        most = max(len(weight.parts) for weight in _projections(shapes).values())
        most_rank = min(most_rank, MOST_LOW // most)
    return Places(shapes, dtype, places, most_rank, slots)


def _projections(shapes: Shapes) -> dict[str, Weight]:
    """The weights of the products, by name: alike in all layers that have one."""
    operations = [op for layer in describe(shapes).layers for op in layer if isinstance(op, Projection)]
    return {op.weight.name: op.weight for op in operations}


def _module(names: TensorNames, part: Part, layer: int) -> tuple[str, slice]:
    """The linear layer with a part, and its rows there."""
    tensor, cut = names.tensor_of(part, layer)
    return tensor.removesuffix(".weight"), slice(None) if cut is None else slice(cut.begin, cut.end)


def _sizes(names: TensorNames, weights: Mapping[str, Weight], layers: int) -> dict[str, Sequence[int]]:
    """The shape of each linear layer that may have an adapter, by name."""
    every = names.sizes()
    modules = {
        _module(names, part, layer)[0]
        for weight in weights.values()
        for part in weight.parts
        for layer in range(layers)
    }
    return {module: every[f"{module}.weight"] for module in modules if f"{module}.weight" in every}
