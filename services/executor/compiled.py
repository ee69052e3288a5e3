"""The operators of a layer in kernels compiled for this CPU. Needs Numba."""

from __future__ import annotations

from torch import Tensor

from kernels.paged_attention.cpu import attend_decode, can_attend
from kernels.rms_norm.cpu import add_rms_norm
from kernels.rope.cpu import rotate_and_write
from kernels.swiglu.cpu import swiglu
from services.executor.batch import DecodeGroup

__all__ = ["CompiledOperators", "can_attend"]


class CompiledOperators:
    """See services.executor.operators.Operators."""

    ragged = True

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def rotate_and_write(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
        return rotate_and_write(x, rotation, kv, rows, heads)

    def attend_decode(self, query: Tensor, kv: Tensor, layer: int, group: DecodeGroup) -> Tensor:
        return attend_decode(query, kv, layer, group.tables, group.lengths)
