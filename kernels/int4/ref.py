"""Matrices in 4 bits in torch: the definition of what the GPU's kernels compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IN_WORD = 8  # numbers in an int32, the first one in the lowest bits
MIDDLE = 8  # the number that stands for zero in a symmetric matrix


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """A matrix `[rows, columns]`. Element `[i, j]` is `(number - zero) * scale` of group `j // group`, where
    numbers and zeros are 0 to 15: `numbers` `[rows, columns / 8]` int32, `scales` `[rows, groups]`, `zeros`
    `[rows, groups]` uint8; None: MIDDLE. Contiguous."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.numbers), self.numbers.shape[1] * IN_WORD

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.shape[1] // self.scales.shape[1]

    def all_zeros(self) -> Tensor:
        """The zeros, also of a symmetric matrix."""
        return torch.full_like(self.scales, MIDDLE, dtype=torch.uint8) if self.zeros is None else self.zeros


def pack(numbers: Tensor) -> Tensor:
    """Numbers of 0 to 15 `[..., n]` to int32 `[..., n / 8]`; `n` is a multiple of 8."""
    found = torch.zeros(
        *numbers.shape[:-1], numbers.shape[-1] // IN_WORD, dtype=torch.int32, device=numbers.device
    )
    for place in range(IN_WORD):
        found |= numbers[..., place::IN_WORD].int() << 4 * place
    return found


def unpack(words: Tensor) -> Tensor:
    """The other way: `[..., n / 8]` int32 to `[..., n]` uint8."""
    places = [(words >> 4 * place & 15).to(torch.uint8) for place in range(IN_WORD)]
    return torch.stack(places, -1).flatten(-2)


def dequantise(x: Int4Groups) -> Tensor:
    """`[rows, columns]` float32."""
    numbers = unpack(x.numbers).view(*x.scales.shape, x.group)
    centred = numbers.float() - x.all_zeros()[..., None].float()
    return (centred * x.scales[..., None].float()).flatten(1)


def quantise_groups(x: Tensor, group: int) -> Int4Groups:
    """The rows of `x` `[rows, columns]`, symmetric, rounded to nearest: the largest magnitude of a group is 7
    or -7. `group` divides the columns. A group of zeros has the scale 1."""
    wide = x.float().view(len(x), -1, group)
    largest = wide.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, largest / (MIDDLE - 1)).to(x.dtype)
    numbers = (wide / scales[..., None].float()).round_().clamp_(1 - MIDDLE, MIDDLE - 1) + MIDDLE
    return Int4Groups(pack(numbers.to(torch.uint8).flatten(1)), scales)


def product(x: Tensor, weight: Int4Groups) -> Tensor:
    """`x @ weight.T` of `x` `[rows, columns]`, in its dtype, with the weight rounded to that dtype."""
    return x @ dequantise(weight).to(x.dtype).T
