"""Measured values as plain data: what a service counts, before anything is sent anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Attributes = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """A number now: of a counter, which only grows, or of a gauge."""

    name: str
    value: float
    unit: str  # UCUM: "1", "s", "{token}"
    attributes: Attributes = ()
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram since the start: `counts[i]` values in (bounds[i-1], bounds[i]], the last above all."""

    name: str
    bounds: Sequence[float]
    counts: Sequence[int]
    total: float
    unit: str
    attributes: Attributes = ()


Readings = Sequence[Reading | Spread]
