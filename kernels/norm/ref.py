"""RMS norm in torch (Zhang and Sennrich 2019, arXiv:1910.07467): the reference, and the CPU path.

`F.rms_norm` accumulates 16-bit inputs in float and rounds once at the end. Only on a GPU it is one kernel; on
a CPU it is the ops below plus copies and casts. Measured on a Zen 3 core, 22 rows of 576, with the sum: 42
us; the ops below 29 us, with the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension. Any leading shape."""
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return torch.mul(x, scale).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, and that sum: `[tokens, hidden]` each."""
    total = torch.add(x, residual)
    return rms_norm(total, weight, eps), total
