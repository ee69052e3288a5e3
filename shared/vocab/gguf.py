"""The key-value header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The gguf library wraps each string of a vocabulary in NumPy views and takes ten times as long, seconds. This
reader walks the header once and builds plain Python values. The executor reads the tensors.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

from shared.errors import SetupError
from shared.vocab.files import unreadable

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def read_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key of the file. Arrays become lists. Raises SetupError on a damaged file."""
    return read_header(path)[0]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The metadata, and the byte offset of the tensor directory. Raises like `read_metadata`."""
    about = path.stat()
    metadata, end = _header(path, (about.st_ino, about.st_mtime_ns, about.st_size))
    return dict(metadata), end


def forget() -> None:
    """Free what is kept for the next reader of the same file: 10 MB of strings for 49k tokens."""
    _header.cache_clear()


@lru_cache(maxsize=1)  # an executor needs it three times, and a vocabulary takes a tenth of a second
def _header(path: Path, version: tuple[int, ...]) -> tuple[dict[str, Any], int]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            metadata = cursor.header()
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise unreadable(path, "a whole GGUF file", error) from error
    except SetupError as error:
        raise SetupError(f"{path} {error.message}") from error
    if (kind := metadata.get("general.type", "model")) != "model":
        raise SetupError(f"{path}: this GGUF file is of type {kind!r}, not a model: give a model")
    if metadata.get("split.count", 0) > 1:  # only the first part has the other keys
        raise SetupError(
            f"{path}: this GGUF file is one part of several, which is not supported; join them with "
            "`llama-gguf-split --merge` and give the result"
        )
    return metadata, cursor.at


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def header(self) -> dict[str, Any]:
        magic, version = self._data[:4], _U32.unpack_from(self._data, 4)[0]
        if magic == b"GGUF" and version and version & 0xFFFF == 0:
            raise SetupError(
                "is a GGUF file of big-endian order, which is not supported; give the usual one, or turn a "
                "copy around with `gguf-convert-endian FILE little`"
            )
        if magic == b"GGUF" and version == 1:
            raise SetupError(
                "is a GGUF file of version 1, which is not supported; give one of version 2 or 3"
            )
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it starts with {magic!r} and version {version}, not with b'GGUF' and 2 or 3")
        count = _U64.unpack_from(self._data, 16)[0]  # after the tensor count
        self.at = 24
        return {self._string(): self._value(self._u32()) for _ in range(count)}

    def _u32(self) -> int:
        self.at += 4
        return int(_U32.unpack_from(self._data, self.at - 4)[0])

    def _u64(self) -> int:
        self.at += 8
        return int(_U64.unpack_from(self._data, self.at - 8)[0])

    def _string(self) -> str:
        size = self._u64()
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise ValueError("a string runs past the end")
        return self._data[start : self.at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._u32(), self._u64()
            return self._strings(count) if inner == _STRING else self._scalars(inner, count)
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        code = "B" if kind == _BOOL else _SCALARS[kind]
        column: array[Any] = array(code)
        size = count * column.itemsize
        column.frombytes(self._data[self.at : self.at + size])
        if len(column) != count:
            raise ValueError("an array runs past the end")
        self.at += size
        return [bool(v) for v in column] if kind == _BOOL else column.tolist()

    def _strings(self, count: int) -> list[str]:
        # The two long arrays (tokens, merges) take nearly all the time: one tight loop with local names.
        data, unpack, at = self._data, _U64.unpack_from, self.at
        out = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            out.append(data[start:at].decode())
        if at > len(data):
            raise ValueError("a string array runs past the end")
        self.at = at
        return out
