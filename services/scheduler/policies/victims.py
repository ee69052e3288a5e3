"""Policies of kind `victim`: who is paused first when blocks are short.

Cost rules brought no goodput over this one in simulation, and were worse in one scenario of three; what
removed stalls was admission that keeps room for growth (growth.py).
Signature: (candidates: list[Sequence]) -> list[Sequence], the first victim first.
"""

from __future__ import annotations

from services.scheduler.records import Sequence


def least_computed(candidates: list[Sequence]) -> list[Sequence]:
    """Of the lowest class, whose loss costs least to compute again."""
    return sorted(candidates, key=lambda s: (-s.request.level, s.computed, -s.request.arrival_us, -s.seq))


def latest(candidates: list[Sequence]) -> list[Sequence]:
    """The latest arrival of the lowest class."""
    return sorted(candidates, key=lambda s: (-s.request.level, -s.request.arrival_us, -s.seq))
