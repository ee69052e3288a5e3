"""The sizes of the requests of a random workload. The flags have the names of `vllm bench serve`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens."""

    prompts: int = 100  # requests; conversations of a chat
    input_len: int = 256
    output_len: int = 64
    range_ratio: float = 0.0  # lengths are uniform in length * (1 -/+ this)
    prefix_len: int = 0
    prefixes: int = 8  # different ones, in turn
    long_len: int = 2_048  # of the long prompts beside a chat
    long_every: int = 16
    turns: int = 4
    think_s: float = 0.0
    length_scale: float = 1.0  # of recorded lengths
    block_tokens: int = 16  # of the server's prefix cache, which finds whole blocks

    def drawn(self, rng: random.Random, tokens: int) -> int:
        """A length around `tokens`."""
        return rng.randint(
            max(math.floor(tokens * (1 - self.range_ratio)), 1),
            max(math.ceil(tokens * (1 + self.range_ratio)), 1),
        )

    def scaled(self, tokens: float) -> int:
        """A recorded length as it is sent."""
        return max(round(tokens * self.length_scale), 1)
