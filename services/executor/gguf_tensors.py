"""The tensors of a GGUF file, as float32.

The directory is read here and not through `gguf.GGUFReader`, which first wraps every string of the
vocabulary and takes seconds (measured: 2.8 s for 49k tokens).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from services.executor.dequantize import dequantize
from shared.errors import SetupError
from shared.gguf_metadata import read_header

_DEFAULT_ALIGNMENT_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]  # slowest dimension first, as torch has it
    kind: GGMLQuantizationType
    start_bytes: int
    size_bytes: int


class GgufTensors:
    """A mapped GGUF file: `metadata`, and tensors by name."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises SetupError on a damaged file or an unknown tensor type."""
        self._path = path
        self.metadata, start = read_header(path)
        self._data = np.memmap(path, mode="r", dtype=np.uint8)
        self._view = self._data.data
        try:
            self._entries = self._directory(start)
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise SetupError(f"{path} is not a whole GGUF file ({error}); pull the model again") from error

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._entries)

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return int(self._data.size)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor as they lie in the file."""
        entry = self._entry(name)
        return self._data[entry.start_bytes : entry.start_bytes + entry.size_bytes]

    def read(self, name: str) -> Tensor:
        """A tensor, dequantised. Raises SetupError when there is none or its type cannot be read."""
        entry = self._entry(name)
        try:
            return dequantize(self.raw(name), entry.kind, entry.shape)
        except NotImplementedError as error:  # how the gguf library says that it cannot read a type
            raise SetupError(
                f"{self._path}: tensor {name!r} has type {entry.kind.name}, not supported"
            ) from error

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise SetupError(f"{self._path} has no tensor {name!r}: incomplete, or of another architecture")
        return self._entries[name]

    def _directory(self, at: int) -> dict[str, _Entry]:
        count = struct.unpack_from("<Q", self._view, 8)[0]
        parsed: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, at = self._string(at)
            (dimensions,) = struct.unpack_from("<I", self._view, at)
            *shape, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", self._view, at + 4)
            parsed.append((name, tuple(reversed(shape)), kind, offset))
            at += 4 + 8 * dimensions + 12
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES))
        base = -(-at // alignment) * alignment
        return {name: self._checked(shape, kind, base + offset) for name, shape, kind, offset in parsed}

    def _checked(self, shape: tuple[int, ...], kind: int, start: int) -> _Entry:
        quantisation = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        size = int(np.prod(shape)) // block * block_bytes
        if start + size > self._data.size:
            raise ValueError("a tensor runs past the end")
        return _Entry(shape, quantisation, start, size)

    def _string(self, at: int) -> tuple[str, int]:
        (size,) = struct.unpack_from("<Q", self._view, at)
        return bytes(self._view[at + 8 : at + 8 + size]).decode(), at + 8 + size
