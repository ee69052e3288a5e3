"""Where the tests of GPU kernels run, and their small random tensors with odd ends."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU in Triton's interpreter
LAYERS, BLOCK, KV_HEADS, HEADS, DIM, BLOCKS = 2, 8, 3, 9, 24, 40


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def shuffled(rows: int) -> torch.Tensor:
    """Block tables `[rows, BLOCKS / rows]` in which each block occurs once."""
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1))
    return order.view(rows, -1).int().to(DEVICE)


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
