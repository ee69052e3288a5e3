"""Policies of kind `place`: which of the executors that can run a unit now gets it.

Signature: (options: Sequence[Option]) -> Option; there is at least one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """What an executor has for a unit."""

    source: str
    hit_tokens: int  # of its prompt, in this executor's prefix cache
    room_blocks: int  # free and promised to nobody
    running: int


def prefix(options: Sequence[Option]) -> Option:
    """Where most of its prompt is cached; among equals, where the most room is."""
    return max(options, key=lambda o: (o.hit_tokens, o.room_blocks, -o.running, o.source))


def room(options: Sequence[Option]) -> Option:
    """Where the most room is."""
    return max(options, key=lambda o: (o.room_blocks, -o.running, o.source))
