"""From how many tokens on two streams are quicker than one, as measured at start.

Both are measured at a few sizes. Halves of few tokens are slower (the weights are read twice, a talk is
mostly its latency), those of many are quicker, and between there is one size from which on it stays so.
"""

from __future__ import annotations

from collections.abc import Mapping

NEVER = 1 << 30
MARGIN = 0.98  # of the one stream's time: what is less is noise, and `off` is simpler


def crossover(times: Mapping[int, tuple[float, float]], margin: float = MARGIN) -> int:
    """The least number of tokens from which on two streams took less than `margin` of one's time wherever
    they were measured; NEVER if not even at the most. `times`: by tokens, one stream's and two streams'."""
    found = NEVER
    for tokens, (one, two) in sorted(times.items(), reverse=True):
        if two >= margin * one:
            break
        found = tokens
    return found
