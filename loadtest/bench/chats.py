"""Conversations of several turns: each request repeats the earlier turns with the answers as they came."""

from __future__ import annotations

from loadtest.bench.asked import Conversation, Turn
from loadtest.bench.prompts import Prompts
from loadtest.bench.shape import Shape


def multi_turn(shape: Shape, prompts: Prompts) -> list[Conversation]:
    """chat: `turns` messages of `input_len` words after a system text of `prefix_len` words that all
    share. Always text: an answer goes back as text."""
    system = prompts.words(shape.prefix_len)

    def turn(number: int) -> Turn:
        tokens, output = (shape.drawn(prompts.rng, n) for n in (shape.input_len, shape.output_len))
        return Turn(prompts.words(tokens), output, f"turn {number + 1}")

    return [
        Conversation(
            tuple(turn(number) for number in range(shape.turns)),
            system=system,
            think_us=round(shape.think_s * 1e6),
        )
        for _ in range(shape.prompts)
    ]
