"""Reads an adapter to host memory, in the form that the products of a model take.

A product joins the projections of several modules, so the matrices of these are joined, too: of all layers,
with zeros where an adapter has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from kernels.lora import Adapted
from services.executor.adapters.peft import Folder, check_targets, modules_of, read_folder, refusal
from services.executor.checkpoint.weights import TensorNames, pairs_in_halves
from services.executor.model.description import Part, Projection, Shapes, Weight, describe


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in host memory: its matrices of all layers, by product."""

    digest: str
    rank: int
    products: Mapping[str, Adapted]

    def pinned(self) -> Adapter:
        """A copy in memory from which a GPU copies by itself."""
        pinned = {
            name: replace(each, a=each.a.pin_memory(), b=each.b.pin_memory())
            for name, each in self.products.items()
        }
        return replace(self, products=pinned)

    @property
    def size_bytes(self) -> int:
        return sum(each.a.nbytes + each.b.nbytes for each in self.products.values())


class AdapterReader:
    """Reads the adapters of one model; any thread may call it."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, most_rank: int) -> None:
        """`dtype`: of the values between products."""
        self._shapes, self._dtype, self._most_rank = shapes, dtype, most_rank
        self.weights = projections(shapes)

    def read(self, path: str) -> Adapter:
        """Read an adapter, on any thread. Raises BadRequest."""
        folder = read_folder(path, self._most_rank)
        try:
            tensors = load(folder.weights)
        except (SafetensorError, ValueError, KeyError) as error:
            raise refusal(f"its weights are not a whole safetensors file: {error}") from None
        names, found = TensorNames(self._shapes), modules_of(tensors)
        check_targets(
            found, _sizes(names, self.weights, self._shapes.layers), lambda n: tensors[n].shape, folder.rank
        )
        if not all(bool(each.isfinite().all()) for each in tensors.values()):
            raise refusal("it has numbers that are not finite")
        narrow = self._dtype == torch.bfloat16 or all(t.dtype == torch.bfloat16 for t in tensors.values())
        kind = torch.bfloat16 if narrow else torch.float32
        products: dict[str, Adapted] = {}
        read = {key: tensors[name].to(kind) for key, name in found.items()}
        for name, weight in self.weights.items():
            made = self._joined(weight, read, names, folder)
            products |= {} if made is None else {name: made}
        return Adapter(folder.digest, folder.rank, products)

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


def projections(shapes: Shapes) -> dict[str, Weight]:
    """The weights of the products, by name: those that are alike in all layers that have one."""
    operations = [op for layer in describe(shapes).layers for op in layer if isinstance(op, Projection)]
    every = {op.weight: None for op in operations}
    names = Counter(weight.name for weight in every)
    return {weight.name: weight for weight in every if names[weight.name] == 1}


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
