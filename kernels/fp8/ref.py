"""Fp8 rows in torch: the definition of what the GPU's kernels compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import FP8, FP8_MAX


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix: `numbers` `[rows, width]` in e4m3 times `scales` `[rows]`, float32. Contiguous."""

    numbers: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.numbers, self.scales


def quantise_rows(x: Tensor) -> Fp8Rows:
    """The rows of `x` `[rows, width]`, each with its largest magnitude as e4m3's largest number. A row of
    zeros has the scale 1."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, largest / FP8_MAX)
    return Fp8Rows((wide * (1.0 / scales)[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales)


def dequantise(x: Fp8Rows) -> Tensor:
    """`[rows, width]` float32."""
    return x.numbers.float() * x.scales[:, None]
