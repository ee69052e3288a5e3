"""Matrix products with the weights on a GPU: the quickest for so many rows, or the same bits for any."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.matmul.fixed import layout_of, matmul_fixed
from kernels.matmul.gpu import matmul
from kernels.swiglu.gpu import swiglu
from services.executor.cuda.tuning import DeviceTuning, Layouts


class Products(Protocol):
    """`x @ weight.T + bias` of `x` `[rows, inner]` and `weight` `[width, inner]`: `[rows, width]`; or, unless
    it is asked for `whole`, `[splits, rows, width]` in float32, to be added up by what reads it."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, whole: bool = False
    ) -> Tensor: ...


def products_of(tuning: DeviceTuning, device: torch.device) -> Products:
    """The products that a device's layouts ask for."""
    if tuning.by_row:
        return _by_row(tuning, torch.cuda.get_device_properties(device).multi_processor_count)
    return _quick(tuning)


def gated(product: Products, layouts: Layouts, x: Tensor, gate_up: Tensor, *, chained: bool) -> Tensor:
    """`silu(gate) * up` of the joined product, in one kernel where its layout says so."""
    chosen = layouts.product(gate_up.shape[0], gate_up.shape[1], len(x))
    if chosen is not None and chosen.gated and x.dtype == torch.bfloat16:
        return matmul(x, gate_up, chosen)
    return swiglu(product(x, gate_up), x.dtype, chained=chained)


def _quick(tuning: DeviceTuning) -> Products:
    """The library's product, or a kernel of ours where that is faster."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, whole: bool = False) -> Tensor:
        rows = len(x)
        chosen = tuning.of(rows).product(weight.shape[0], weight.shape[1], rows)
        split = chosen is not None and whole and chosen.splits > 1
        if chosen is None or split or bias is not None or x.dtype != torch.bfloat16:
            return F.linear(x, weight, bias)
        return matmul(x, weight, chosen)

    return product


def _by_row(tuning: DeviceTuning, processors: int) -> Products:
    """A row's bits depend on neither the number of rows nor its place in them."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, whole: bool = False) -> Tensor:
        return matmul_fixed(x, weight, bias, layout_of(len(x), weight.shape[0], processors, tuning.fixed))

    return product
