"""The files of a model while they are read: a change under a reader is an error, never other weights.

    load    the states of all files before and after it are the same, or the start fails (`check_unchanged`)
    steps   rows that stay in a file are read by pread; if its state is another one after that, so may be its
            bytes, and all rows are summed again (`RowsInFile`)

A mapping would not do for steps: where a file was cut off, or its disk fails, the kernel ends the process
(SIGBUS). The kernel changes the time of a file before a writer's bytes can be read, so the look comes last.
A file whose name was given to another one is the same file for those that have it open.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from services.executor.checkpoint.stored import Cut, Dense, Stored
from services.executor.engine import EngineGone
from shared.errors import SetupError

_PIECE_BYTES = 1 << 20
_READ = (".safetensors", ".json", ".jinja")  # files of a model's folder; others may change
_CURE = "give a new model a name of its own, or rename it over the old one"


class FileState(NamedTuple):
    """What changes when a file is written or another one takes its name. Not its mode or its links."""

    name: str
    device: int
    inode: int
    written_ns: int
    size_bytes: int


FileStates = tuple[FileState, ...]
ValuesOf = Callable[[NDArray[np.uint8]], Tensor]  # the numbers of rows, from their bytes


def states_of(path: Path) -> FileStates:
    """The states of a model's file, or of those of its folder that are read; without those that are gone."""
    found, inside = [], path.is_dir()
    for each in sorted(file for file in path.iterdir() if file.suffix in _READ) if inside else [path]:
        try:
            found.append(_state(each.name, each.stat()))
        except OSError:  # gone, or a link to nothing: the reader of the model names it
            continue
    return tuple(found)


def check_unchanged(path: Path, before: FileStates) -> None:
    """Raise SetupError if the files of the model at `path` have changed since `before`."""
    if changed := {each.name for each in {*states_of(path)} ^ {*before}}:
        where = path / min(changed) if path.is_dir() else path
        raise SetupError(f"{where} has changed while it was loaded; wait until it is whole, or {_CURE}")


class OpenFile:
    """A file of weights, mapped for the load alone; rows of it are read later."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path, self._file = path, path.open("rb")
        self._state = _state(path.name, os.fstat(self._file.fileno()))

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
        if (now := _state(self._path.name, os.fstat(self._file.fileno()))) != self._state:
            if not unharmed():
                raise self.gone("written to")
            self._state = now

    def gone(self, how: str) -> EngineGone:
        """The error for a file that is not what was loaded."""
        return EngineGone(f"the model's file {self._path} was {how} while it was served: {_CURE}")


@dataclass(frozen=True, slots=True)
class FileMatrix:
    """Where a matrix of `rows` of a type is in a file."""

    file: OpenFile
    start_bytes: int
    rows: int
    row_bytes: int
    kind: Kind

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


def _state(name: str, about: os.stat_result) -> FileState:
    return FileState(name, about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size)
