"""The values of GGUF's types of tensors, and rows that stay in their file while it is served.

Rows are read by pread: if the file's state is another one after that, so may be its bytes, and all rows are
summed again (`RowsInFile`). A mapping would not do: where a file was cut off, or its disk fails, the kernel
ends the process (SIGBUS). The kernel changes the time of a file before a writer's bytes can be read, so the
look comes last. A file whose name was given to another one is the same file for those that have it open.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GgmlType
from gguf.quants import dequantize as gguf_dequantize
from numpy.typing import NDArray
from torch import Tensor

from services.executor.checkpoint.stored import CURE, Cut, Dense, Stored, state_of
from services.executor.engine import EngineGone

_PIECE_BYTES = 1 << 20
ValuesOf = Callable[[NDArray[np.uint8]], Tensor]  # the numbers of rows, from their bytes


def dequantize(raw: NDArray[np.uint8], kind: GgmlType, shape: tuple[int, ...]) -> Tensor:
    """The values of a tensor of `shape`, float32. Raises the gguf library's NotImplementedError for a type
    that it cannot read; the caller adds the file and the tensor.

    The gguf library's NumPy code is the reference, and serves every type outside FAST. FAST has the types
    of common small models in torch, bit-equal and on all threads: 0.3 s where NumPy takes 2 s, for 135M
    parameters on 2 cores. Layouts: ggml-common.h of llama.cpp."""
    if kind == GgmlType.F32:
        return torch.from_numpy(raw.view(np.float32).copy()).view(shape)
    if kind in FAST:
        return FAST[kind](torch.from_numpy(raw.copy())).view(shape)
    return torch.from_numpy(gguf_dequantize(raw.reshape(math.prod(shape[:-1]), -1), kind)).view(shape)


def _float16s(blocks: Tensor, count: int) -> Tensor:
    """The first `count` float16 numbers of each block as float32."""
    return blocks[:, : 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """32 values of 4 bits per block of 16 bytes, low nibbles first: `nibble * scale + offset`."""
    values = torch.empty(packed.shape[0], 32)
    torch.mul(packed & 15, scale, out=values[:, :16])
    torch.mul(packed >> 4, scale, out=values[:, 16:])
    return values.add_(offset)


def _q4_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 18)  # scale f16, 16 bytes of nibbles around 8
    scale = _float16s(blocks, 1)
    return _nibbles(blocks[:, 2:], scale, scale * -8)


def _q4_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 20)  # scale f16, least value f16, 16 bytes of nibbles
    scale, least = _float16s(blocks, 2).chunk(2, -1)
    return _nibbles(blocks[:, 4:], scale, least)


def _q8_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 34)  # scale f16, 32 int8
    return blocks[:, 2:].view(torch.int8) * _float16s(blocks, 1)


def _f16(raw: Tensor) -> Tensor:
    return raw.view(torch.float16).float()


def _bf16(raw: Tensor) -> Tensor:
    return raw.view(torch.bfloat16).float()


FAST = {  # others are read with the gguf library
    GgmlType.F16: _f16, GgmlType.BF16: _bf16, GgmlType.Q4_0: _q4_0, GgmlType.Q4_1: _q4_1,
    GgmlType.Q8_0: _q8_0,
}  # fmt: skip


class OpenFile:
    """A file of weights, mapped for the load alone; rows of it are read later."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path, self._file = path, path.open("rb")
        self._state = state_of(path.name, os.fstat(self._file.fileno()))

    def mapped(self) -> NDArray[np.uint8]:
        """Its bytes. Raises ValueError for an empty file."""
        return np.memmap(self._file, mode="r", dtype=np.uint8)

    def read(self, into: NDArray[np.uint8], start_bytes: int) -> None:
        """Fill an array with the bytes from an offset on. Raises EngineGone if they are not there."""
        try:
            size = os.preadv(self._file.fileno(), [into.data], start_bytes)
        except OSError as error:
            raise EngineGone(f"the model's file {self._path} cannot be read any more ({error})") from error
        if size != into.nbytes:
            raise self.gone("cut off")

    def check(self, unharmed: Callable[[], bool]) -> None:
        """Ask whether what was loaded is `unharmed` if the file was written to. Raises EngineGone if not."""
        if (now := state_of(self._path.name, os.fstat(self._file.fileno()))) != self._state:
            if not unharmed():
                raise self.gone("written to")
            self._state = now

    def gone(self, how: str) -> EngineGone:
        """The error for a file that is not what was loaded."""
        return EngineGone(f"the model's file {self._path} was {how} while it was served: {CURE}")


@dataclass(frozen=True, slots=True)
class FileMatrix:
    """Where a matrix of `rows` of a type is in a file."""

    file: OpenFile
    start_bytes: int
    rows: int
    row_bytes: int
    kind: GgmlType

    def read(self, order: Sequence[int]) -> NDArray[np.uint8]:
        """The rows at the indices `order`, `[len(order), row_bytes]`. Raises EngineGone."""
        found = np.empty((len(order), self.row_bytes), np.uint8)
        for row, at in zip(found, order, strict=True):
            self.file.read(row, self.start_bytes + at * self.row_bytes)
        return found

    def summed(self) -> int:
        """A checksum of all rows: 30 ms for 30 MB. Raises EngineGone."""
        found, rows = 0, max(1, _PIECE_BYTES // self.row_bytes)
        for first in range(0, self.rows, rows):
            piece = np.empty(min(rows, self.rows - first) * self.row_bytes, np.uint8)
            self.file.read(piece, self.start_bytes + first * self.row_bytes)
            found = zlib.crc32(piece.data, found)
        return found


@dataclass(frozen=True, slots=True)
class RowsInFile(Stored):
    """See Stored. A matrix of which rows alone are read, from its file."""

    matrix: FileMatrix
    dtype: torch.dtype
    values_of: ValuesOf
    sum: int  # of the matrix, as it was loaded

    @classmethod
    def of(cls, matrix: FileMatrix, dtype: torch.dtype, values_of: ValuesOf) -> RowsInFile:
        return cls(matrix, dtype, values_of, matrix.summed())

    @property
    def shape(self) -> tuple[int, ...]:
        columns, size = GGML_QUANT_SIZES[self.matrix.kind]
        return self.matrix.rows, self.matrix.row_bytes // size * columns

    @property
    def values(self) -> Tensor:
        return self.rows(torch.arange(self.matrix.rows)).values

    def rows(self, order: Tensor) -> Stored:
        """See Stored. Raises EngineGone if the rows of the file have changed."""
        matrix, raw = self.matrix, self.matrix.read(order.tolist())
        matrix.file.check(lambda: matrix.summed() == self.sum)
        return Dense.of(self.values_of(raw).to(self.dtype))

    def cut(self, cut: Cut) -> Stored:
        return Dense.of(self.values).cut(cut)

    def loaded(self, dtype: torch.dtype, device: torch.device) -> Stored:
        return Dense.of(self.values).loaded(dtype, device)
