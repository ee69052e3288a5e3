"""SwiGLU in torch (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[tokens, 2 * width]`, gate first: `[tokens, width]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_by_row(gate_up: Tensor) -> Tensor:
    """The same, one row at a time: a row's bits do not depend on the other rows.

    The exponentials of the vector body and of the scalar tail of an eager op differ in the last bit, and the
    start of the tail depends on the number of rows and threads.
    """
    gate, up = gate_up.chunk(2, -1)
    return torch.stack([F.silu(row) for row in gate.unbind(0)]) * up
