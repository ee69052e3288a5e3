"""Matrices in 4 bits, or in 8 as files of 5 to 8 bits have them, in torch: the definition of what the GPU's
kernels compute.

Fp8 rows in torch: the definition of what the GPU's kernels compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import FP8, FP8_MAX

IN_WORD = 8  # numbers in an int32, the first one in the lowest bits
MIDDLE = 8  # the number that stands for zero in a symmetric matrix
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three low bits; the fourth is the sign


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """A matrix `[rows, columns]`. Element `[i, j]` is `(number - zero) * scale` of group `j // group`:
    `numbers` `[rows, columns * bits / 32]` int32, of 4 bits or of 8; `scales` `[rows, groups]`; `zeros`
    `[rows, groups]` uint8, or float32 for zeros between two numbers; None: the middle. With `e2m1` a number
    of 4 bits is a floating point number itself, its scale a power of two, and there are no zeros.
    Contiguous."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bits: int = 4
    e2m1: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.numbers), self.numbers.shape[1] * 32 // self.bits

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.shape[1] // self.scales.shape[1]

    def all_zeros(self) -> Tensor:
        """The zeros, also of a symmetric matrix."""
        if self.zeros is not None:
            return self.zeros
        return torch.full_like(self.scales, 1 << self.bits - 1, dtype=torch.uint8)

    def in_bytes(self, group: int) -> Int4Groups:
        """The same elements in 8 bits, with groups of so many columns, which divide its own. Not of e2m1."""
        if (self.bits, self.group) == (8, group):
            return self
        assert not self.e2m1, "a floating point number is none of 8 bits"
        numbers, zeros = unpack(self.numbers, self.bits), self.zeros
        if zeros is None:
            numbers += (1 << 7) - (1 << self.bits - 1)
        times = self.group // group
        scales = self.scales.repeat_interleave(times, 1)
        zeros = None if zeros is None else zeros.float().repeat_interleave(times, 1)
        return Int4Groups(pack(numbers, 8), scales, zeros, 8)


def pack(numbers: Tensor, bits: int = 4) -> Tensor:
    """Numbers of `bits` `[..., n]` to int32 `[..., n * bits / 32]`, which are whole words."""
    each = 32 // bits
    found = torch.zeros(
        *numbers.shape[:-1], numbers.shape[-1] // each, dtype=torch.int32, device=numbers.device
    )
    for place in range(each):
        found |= numbers[..., place::each].int() << bits * place
    return found


def unpack(words: Tensor, bits: int = 4) -> Tensor:
    """The other way, uint8."""
    most = (1 << bits) - 1
    places = [(words >> bits * place & most).to(torch.uint8) for place in range(32 // bits)]
    return torch.stack(places, -1).flatten(-2)


def widen_e2m1(numbers: Tensor) -> Tensor:
    """The floating point numbers that `numbers` of 0 to 15 stand for, float32."""
    return torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=numbers.device)[numbers.int()]


def dequantise(x: Int4Groups) -> Tensor:
    """`[rows, columns]` float32."""
    numbers = unpack(x.numbers, x.bits).view(*x.scales.shape, x.group)
    centred = widen_e2m1(numbers) if x.e2m1 else numbers.float() - x.all_zeros()[..., None].float()
    return (centred * x.scales[..., None].float()).flatten(1)


def quantise_groups(x: Tensor, group: int) -> Int4Groups:
    """The rows of `x` `[rows, columns]`, symmetric, rounded to nearest: the largest magnitude of a group is 7
    or -7. `group` divides the columns. A group of zeros has the scale 1."""
    wide = x.float().view(len(x), -1, group)
    largest = wide.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, largest / (MIDDLE - 1)).to(x.dtype)
    numbers = (wide / scales[..., None].float()).round_().clamp_(1 - MIDDLE, MIDDLE - 1) + MIDDLE
    return Int4Groups(pack(numbers.to(torch.uint8).flatten(1)), scales)


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


def dequantise_rows(x: Fp8Rows) -> Tensor:
    """`[rows, width]` float32."""
    return x.numbers.float() * x.scales[:, None]
