"""Columns: per-row integers and floats as arrays, which the wire carries as raw bytes."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    IntArray = array[int]
    FloatArray = array[float]
else:  # array.array cannot be subscripted before Python 3.12
    IntArray = FloatArray = array

FEW = 16  # values; more are packed at a third of what it costs `array` to parse each
Ints = Annotated[IntArray, "i"]  # int32 column, little-endian bytes on the wire
Longs = Annotated[IntArray, "q"]  # int64 column
Floats = Annotated[FloatArray, "f"]  # float32 column


def ints(values: Iterable[int] = ()) -> Ints:
    """An int32 column. Raises OverflowError for a value that does not fit."""
    if type(values) is list and len(values) > FEW:
        try:
            return array("i", struct.pack(f"{len(values)}i", *values))
        except struct.error:
            return array("i", values)  # which says what is wrong
    return array("i", values)


def longs(values: Iterable[int] = ()) -> Longs:
    """An int64 column."""
    return array("q", values)


def floats(values: Iterable[float] = ()) -> Floats:
    """A float32 column."""
    return array("f", values)
