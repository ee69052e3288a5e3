"""Rotary position embedding in torch (Su et al. 2021, arXiv:2104.09864), rotating halves.

    out[:half] = x[:half] * cos - x[half:] * sin
    out[half:] = x[half:] * cos + x[:half] * sin

The table holds [cos cos | -sin sin], so that the rotation is two products and a sum over whole rows. Products
and sum are separate ops on purpose: a fused multiply-add would round differently in the vector body and in
the scalar tail of an eager op, and a row's bits would depend on its index in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(inverse_frequencies: Tensor, positions: int, gain: float = 1.0) -> Tensor:
    """The rotation of every position: `[positions, 2, 2 * half]` in float32, cosines then signed sines.

    `inverse_frequencies` is `[half]` in float64: theta^(-2i/dim), scaled or not; 0 rotates nothing. `gain`
    multiplies what is rotated.
    """
    at = torch.arange(positions, dtype=torch.float64)
    angles = torch.outer(at, inverse_frequencies)
    gains = torch.ones_like(inverse_frequencies).masked_fill_(inverse_frequencies > 0, gain)
    cos, sin = angles.cos() * gains, angles.sin() * gains
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).float()


def apply_rope(x: Tensor, rotation: Tensor) -> Tensor:
    """`x` `[tokens, heads, head_dim]` rotated by `rotation` `[tokens, 2, head_dim]`, in float."""
    wide = x.float()
    low, high = wide.chunk(2, -1)
    cos, sin = rotation.unsqueeze(2).unbind(1)
    return (wide * cos).add_(torch.cat((high, low), -1).mul_(sin)).to(x.dtype)
