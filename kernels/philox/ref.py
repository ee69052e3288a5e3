"""Philox4x32-10 in torch (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Random numbers are a function of a key and a counter and have no state: a draw does not depend on the
batch, the slot, the step, or on what was drawn before. Words are those of Triton's
`tl.philox(seed, c0, c1, c2, c3)`: the key is the seed's low and high half.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MUL_A, _MUL_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: int) -> Tensor:
    """Word 0 of the block at counter (c0, c1, c2, 0) for key `seed`: uint32 values in int64.

    `seed`, `c0` and `c1` are int64 and broadcast together; a seed is the bits of a uint64.
    """
    low, high = seed & _MASK, (seed >> 32) & _MASK
    x0, x1, x2, x3 = c0 & _MASK, c1 & _MASK, torch.full_like(c0, c2), torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        a, b = x0 * _MUL_A, x2 * _MUL_B  # wraps past 2^63, but the 64 bits are right
        x0, x1, x2, x3 = (b >> 32) & _MASK ^ x1 ^ low, b & _MASK, (a >> 32) & _MASK ^ x3 ^ high, a & _MASK
        low, high = (low + _KEY_A) & _MASK, (high + _KEY_B) & _MASK
    return x0


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float32 from uint32 words: -log(-log(u)), u the middle of 2^23 equal cells."""
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
