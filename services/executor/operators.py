"""What a layer does between its matrix products, on a CPU: in torch's operators, or in kernels of our own.

The kernels do in one pass what torch does in several, and attention reads the blocks where they lie: 2 to 8
times faster. Torch's operators are what they mean (kernels/*/ref.py), and stay for what the kernels cannot
do: KV in fp8, odd head sizes, deterministic mode (whose bits are those of the operators), no Numba.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

import kernels.cpu
from kernels.kv_blocks import write_kv
from kernels.paged_attention import attend_decode
from kernels.rms_norm import add_rms_norm
from kernels.rope import apply_rope
from kernels.swiglu import swiglu, swiglu_by_row
from services.executor.batch import Batch, DecodeGroup
from services.executor.kv_cache import KvCache
from services.executor.ranks import Ranks
from services.executor.shapes import Shapes

if TYPE_CHECKING:
    from services.executor.layers import Layer

log = logging.getLogger("headrace.executor")


class Operators(Protocol):
    """See the torch functions of the same names for what they do."""

    ragged: bool  # tokens of decode rows and of chunks go into one group, whatever their lengths

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """May put the sum into `residual`."""

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

    def rotate_and_write(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
        """Of `x` `[tokens, heads + 2 * kv_heads, head_dim]`, queries, keys and values, rotate queries and
        keys by `rotation`; store keys and values at `rows` `[K|V, tokens]` of `write_rows`. The queries."""

    def attend_decode(self, query: Tensor, kv: Tensor, layer: int, group: DecodeGroup) -> Tensor: ...


class LayersInOne(Protocol):
    """All layers of a model."""

    def __call__(
        self, normed: Tensor, residual: Tensor, rotation: Tensor, batch: Batch, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """From the norm of the first layer's input, and that input, to those behind the last: `[tokens,
        hidden]` each, which may take the place of what is given."""


class TorchOperators:
    """See Operators. With `deterministic` a row's result does not depend on the other rows."""

    ragged = False

    def __init__(self, *, deterministic: bool = False) -> None:
        self._swiglu = swiglu_by_row if deterministic else swiglu

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self._swiglu(gate_up)

    def rotate_and_write(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
        kv_heads = (x.shape[1] - heads) // 2
        rotated = apply_rope(x[:, : heads + kv_heads], rotation)
        query, key = torch.split(rotated, [heads, kv_heads], 1)
        write_kv(kv, rows, key, x[:, heads + kv_heads :])
        return query

    def attend_decode(self, query: Tensor, kv: Tensor, layer: int, group: DecodeGroup) -> Tensor:
        assert group.mask is not None, "not ragged"
        return attend_decode(query, kv, layer, group.tables, group.mask)


def operators(cache: KvCache, *, deterministic: bool) -> Operators:
    """The fastest there are over this cache."""
    on_cpu = cache.tensor.device.type == "cpu"
    if on_cpu and cache.activations == cache.tensor.dtype and not deterministic:
        if not kernels.cpu.available():
            log.warning("no Numba: torch's operators compute attention and norms, several times slower")
            return TorchOperators()
        from services.executor.compiled import CompiledOperators, can_attend

        if can_attend(cache.tensor):
            return CompiledOperators()
    return TorchOperators(deterministic=deterministic)


def layers_in_one(
    layers: Sequence[Layer], shapes: Shapes, norm: Tensor, kinds: Operators, ranks: Ranks
) -> LayersInOne | None:
    """A faster way through all layers, if there is one; `norm` follows the last."""
    if not isinstance(kinds, TorchOperators) and ranks.size == 1:
        from services.executor.compiled_layers import compiled_layers

        return compiled_layers(layers, shapes, norm)
    return None
