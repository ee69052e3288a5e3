"""What tests of kernels compare with, in torch, and no engine computes so."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantised import Fp8Rows, dequantise_rows


def write_rows(kv: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """The slot mapping in rows of `[kv_head * head_dim]`: `[layer, K|V, tokens]`."""
    _, layers, two, block_tokens, _, _ = kv.shape
    planes = torch.arange(layers * two, device=kv.device).view(layers, two, 1)
    return (blocks * (layers * two) + planes) * block_tokens + offsets


def fp8_product(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` of `x` `[rows, inner]` and `weight` `[width, inner]`: `[rows, width]` float32."""
    found = dequantise_rows(x) @ dequantise_rows(weight).T
    return found if bias is None else found + bias.float()
