"""Policies of kind `place`: which of the executors that can run a unit now gets it.

Signature: (options: Sequence[Option]) -> Option; there is at least one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LOAD_TOKENS = 512  # of prefix hit that one running sequence outweighs; without it all requests with a common
# beginning pile up on one executor (Mooncake trace, four executors: TTFT p50 5.5 s instead of 0.6)


class Option(NamedTuple):
    """What an executor has for a unit. A tuple, since one is made at each admission."""

    source: str
    hit_tokens: int  # of its prompt, in this executor's prefix cache
    room_blocks: int  # free and promised to nobody
    running: int


def prefix(options: Sequence[Option]) -> Option:
    """Where most of its prompt is cached, less what runs there; among equals, where the most room is."""
    return max(options, key=lambda o: (o.hit_tokens - LOAD_TOKENS * o.running, o.room_blocks, o.source))


def room(options: Sequence[Option]) -> Option:
    """Where the most room is."""
    return max(options, key=lambda o: (o.room_blocks, -o.running, o.source))
