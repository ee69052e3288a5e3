"""Weights in fp8 (e4m3) on a GPU: from a checkpoint in fp8, or quantised at load (`--dtype fp8`).

    in a file    plain numbers, or `InFp8`: e4m3 with a scale for the tensor, each row, or each block
    in memory    `ScaledFp8`: e4m3 with a scale for each row (output channel), which the products take

The projections of attention and of dense MLPs are in fp8; embedding, norms, biases and head stay plain. With
any other dtype a checkpoint in fp8 is dequantised at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.attention import FP8
from kernels.fp8 import Fp8Rows, dequantise, quantise_rows
from services.executor.checkpoint.stored import Cut, Dense, Stored
from services.executor.model.description import HEADS, KV_HEADS, WIDTH, Part
from shared.errors import SetupError

LEAST_CAPABILITY = (9, 0)  # before it torch's product with a scale for each row may hang (pytorch#177651)
_MULTIPLE = 16  # of both sizes of a weight, for torch's product
# Blocks of a row get one scale if their own scales differ by less: e4m3 has 2^14 between its largest number
# and its smallest with all bits, so each block still has 2^10.
_SPREAD = 16.0


@dataclass(frozen=True, slots=True)
class ScaledFp8(Stored):
    """See Stored. A matrix in the memory of a device."""

    matrix: Fp8Rows
    dtype: torch.dtype  # of `values`

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    @property
    def values(self) -> Tensor:
        return dequantise(self.matrix).to(self.dtype)

    @property
    def data(self) -> tuple[Tensor, ...]:
        return self.matrix.numbers, self.matrix.scales

    def rows(self, order: Tensor) -> ScaledFp8:
        return replace(self, matrix=Fp8Rows(self.matrix.numbers[order], self.matrix.scales[order]))

    def cut(self, cut: Cut) -> ScaledFp8:
        part = slice(cut.begin, cut.end)
        if cut.dim == 0:
            return replace(self, matrix=Fp8Rows(self.matrix.numbers[part], self.matrix.scales[part]))
        return replace(self, matrix=Fp8Rows(self.matrix.numbers[:, part].contiguous(), self.matrix.scales))

    def join(self, below: Sequence[Stored]) -> Stored:
        """See Stored. Plain numbers if one of them is plain."""
        found = [self.matrix]
        for each in below:
            if not isinstance(each, ScaledFp8):
                return Dense.of(self.values).join(below)
            found.append(each.matrix)
        numbers, scales = (
            torch.cat([getattr(each, name) for each in found]) for name in ("numbers", "scales")
        )
        return replace(self, matrix=Fp8Rows(numbers, scales)) if below else self

    def scaled(self, factors: Tensor) -> ScaledFp8:
        """See Stored. With factors of columns the largest one goes into the scales: the numbers can only
        shrink, and lose bits where they become subnormal."""
        numbers, scales = self.matrix.numbers, self.matrix.scales
        if factors.dim() == 2:
            return replace(self, matrix=Fp8Rows(numbers, scales * factors[:, 0].float()))
        largest = factors.float().max()
        return replace(
            self, matrix=Fp8Rows((numbers.float() * (factors / largest)).to(FP8), scales * largest)
        )

    def loaded(self, dtype: torch.dtype, device: torch.device) -> ScaledFp8:
        numbers, scales = (each.to(device) for each in self.data)
        return ScaledFp8(Fp8Rows(numbers, scales), dtype)


@dataclass(frozen=True, slots=True)
class InFp8(Stored):
    """See Stored. A matrix in a file of e4m3 with `scales` `[rows / block rows, columns / block columns]`
    float32 of the whole tensor; `block` may be the whole tensor, or a row. `name` is for errors."""

    name: str
    numbers: Dense
    scales: Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def values(self) -> Tensor:
        return self._values(torch.device("cpu"))

    @property
    def data(self) -> tuple[Tensor, ...]:
        return self.numbers.values, self.scales

    def cut(self, cut: Cut) -> InFp8:
        return replace(self, numbers=self.numbers.cut(cut))

    def loaded(self, dtype: torch.dtype, device: torch.device) -> Dense:
        return Dense.of(self._values(device).to(dtype))

    def in_fp8(self, dtype: torch.dtype, device: torch.device) -> ScaledFp8:
        """With a scale for each row: as they are in the file, or quantised again from blocks. Raises
        SetupError for blocks in a row whose scales differ too much for one scale."""
        scales = self._scales()
        if scales.shape[1] == 1:
            numbers = self.numbers.loaded(FP8, device).values.contiguous()
            return ScaledFp8(Fp8Rows(numbers, scales[:, 0].contiguous().to(device)), dtype)
        least = torch.where(scales == 0, torch.inf, scales).amin(1)  # blocks of zeros may have any scale
        worst = (scales.amax(1) / least).max().item()
        if worst >= _SPREAD:
            raise SetupError(
                f"tensor {self.name!r} has blocks of {self.block[0]} x {self.block[1]} with scales that vary "
                f"by a factor of {worst:.0f} in one row: one scale a row would lose small numbers; use dtype "
                "bf16, which dequantises them"
            )
        return ScaledFp8(quantise_rows(self._values(device)), dtype)

    def _scales(self) -> Tensor:
        """The scales of each row and the blocks of its columns: `[rows, blocks]`."""
        down, across = ([*range(each.start, each.stop, 1)] for each in self.numbers.ranges)
        columns = sorted({column // self.block[1] for column in across})
        return self.scales[torch.tensor(down, dtype=torch.int64) // self.block[0]][:, columns]

    def _values(self, device: torch.device) -> Tensor:
        scales = self._scales().to(device)
        if scales.shape[1] > 1:
            across = self.numbers.ranges[1]
            blocks = torch.arange(across.start, across.stop, device=device) // self.block[1]
            scales = scales[:, blocks - blocks[0]]
        return self.numbers.values.to(device).float() * scales


def part_in_fp8(part: Part, stored: Stored, dtype: torch.dtype, device: torch.device) -> Stored:
    """A part of a weight in the memory of `device`, in fp8 if it is a matrix of a layer that products can
    read so. Raises SetupError as `InFp8.in_fp8`."""
    fits = len(stored.shape) == 2 and not any(size % _MULTIPLE for size in stored.shape)
    if part.units not in (HEADS, KV_HEADS, WIDTH) or not fits:
        return stored.loaded(dtype, device)
    if isinstance(stored, InFp8):
        return stored.in_fp8(dtype, device)
    return ScaledFp8(quantise_rows(stored.loaded(dtype, device).values), dtype)
