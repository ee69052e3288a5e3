"""Micro-batches A and B: which half a sequence belongs to, where steps alternate.

A sequence keeps its half, so that its rows meet the same others. The halves are kept even by the KV they
read, plus a constant for the row: where they are uneven the longer one sets the pace of both.
"""

from __future__ import annotations

from services.scheduler.records import Sequence
from services.scheduler.state import Executor

ROW_TOKENS = 256  # a row costs about as much as reading so many tokens of context
UNEVEN_PM = 150


def balance(executor: Executor, half: int, ready: list[Sequence]) -> list[Sequence]:
    """The rows of the half that is planned now, after the last ones have moved over if it is too heavy.
    Those sit this step out."""
    mine, other = weights(executor.running)[:: -1 if half else 1]
    excess = (mine - other) // 2
    if excess * 2000 <= (mine + other) * UNEVEN_PM:
        return ready
    stay = list(ready)
    while len(stay) > 1 and excess >= (weight := _weight(stay[-1])):
        moved = stay.pop()
        moved.half = 1 - half
        executor.halves[half] -= 1
        executor.halves[1 - half] += 1
        excess -= weight
    return stay


def weights(running: list[Sequence]) -> tuple[int, int]:
    """What a step of A and a step of B would read."""
    both = [0, 0]
    for sequence in running:
        both[sequence.half] += _weight(sequence)
    return both[0], both[1]


def _weight(sequence: Sequence) -> int:
    return sequence.computed + ROW_TOKENS
