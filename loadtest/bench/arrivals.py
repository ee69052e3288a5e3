"""The times at which the requests of an open loop are sent, all drawn before the first is sent.

As in `vllm bench serve`: gaps are drawn from a gamma distribution with shape `burstiness` (1 is a Poisson
process, less is burstier, infinite is a fixed rate). Then all are scaled so that the last request is sent
after count / rate seconds with every seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate

SECOND_US = 1_000_000


def arrivals_us(count: int, rate: float, burstiness: float, seed: str) -> list[int]:
    """`count` times after the start, `rate` a second on average; all 0 where `rate` is infinite."""
    if math.isinf(rate):
        return [0] * count
    if math.isinf(burstiness):
        gaps = [1.0] * count
    else:
        rng = random.Random(seed)
        gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    ends = list(accumulate(gaps))
    scale = count / rate * SECOND_US / ends[-1] if ends else 0.0
    return [round(end * scale) for end in ends]


def surge(times_us: Sequence[int], factor: float) -> list[int]:
    """The same requests, the middle third of the gaps `factor` times as short: overload, and what is left
    of it afterwards."""
    gaps = [b - a for a, b in zip((0, *times_us), times_us, strict=False)]
    first, last = len(gaps) // 3, 2 * len(gaps) // 3
    return list(accumulate(round(g / factor) if first <= i < last else g for i, g in enumerate(gaps)))
