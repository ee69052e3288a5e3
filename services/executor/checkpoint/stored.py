"""A weight as a checkpoint stores it: each format is a class, and engines choose a product for it.

Only `loaded` reads: before it a weight is a place in a file, so that a rank reads no more than its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Indices `begin` to `end` of a weight along dimension `dim`."""

    dim: int
    begin: int
    end: int


class Stored(Protocol):
    """A matrix `[out, in]`, a vector, or experts' matrices `[experts, out, in]`. What a format does not do in
    a way of its own is done with its plain numbers."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def values(self) -> Tensor:
        """As plain numbers of `shape`."""

    @property
    def data(self) -> tuple[Tensor, ...]:
        """What is in memory, for digests and sizes."""
        return (self.values,)

    def rows(self, order: Tensor) -> Stored:
        """The rows at the indices `order`."""
        return Dense.of(self.values[order])

    def cut(self, cut: Cut) -> Stored:
        """That part."""

    def join(self, below: Sequence[Stored]) -> Stored:
        """This weight and others of the same width, below each other."""
        return Dense.of(torch.cat([self.values, *(each.values for each in below)])) if below else self

    def scaled(self, factors: Tensor) -> Stored:
        """Times powers of two that broadcast: `[rows, 1]` or `[columns]`."""
        return Dense.of(self.values * factors)

    def loaded(self, dtype: torch.dtype, device: torch.device) -> Stored:
        """In the memory of `device`, for a computation in `dtype`; it keeps no memory of a larger whole."""

    def for_rows(self) -> Stored:
        """This weight for `rows` alone: what can be read again from a file takes no memory."""
        return self


@dataclass(frozen=True, slots=True)
class Dense(Stored):
    """Plain numbers. `source[slice, ...]` reads them: a tensor, or a tensor in a file."""

    source: Any
    ranges: tuple[range, ...]  # of the source, by dimension

    @classmethod
    def of(cls, source: Any, shape: Sequence[int] | None = None) -> Dense:
        """All of a source of `shape`; None: of a tensor's own."""
        return cls(source, tuple(map(range, source.shape if shape is None else shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))

    @property
    def values(self) -> Tensor:
        if isinstance(self.source, Tensor) and self.source.shape == self.shape:
            return self.source
        values: Tensor = self.source[tuple(slice(each.start, each.stop) for each in self.ranges)]
        return values

    def cut(self, cut: Cut) -> Dense:
        before, after = self.ranges[: cut.dim], self.ranges[cut.dim + 1 :]
        return Dense(self.source, (*before, self.ranges[cut.dim][cut.begin : cut.end], *after))

    def loaded(self, dtype: torch.dtype, device: torch.device) -> Dense:
        if not isinstance(self.source, Tensor):
            return Dense.of(in_memory(self.values, device, dtype))
        values = self.values.to(device=device, dtype=dtype)
        part = values.numel() < self.source.numel()
        return Dense.of(values.clone() if part and values._is_view() else values)


def in_memory(read: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """What was read from a file, in the memory of `device`. safetensors gives views of a mapping: a file that
    is written to, or cut off, would change the weights, or end the process."""
    found = read.to(device=device, dtype=dtype or read.dtype)
    return found.clone() if found is read else found
