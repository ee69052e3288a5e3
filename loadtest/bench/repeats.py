"""How many tokens of each prompt of a trace an endless prefix cache would have.

A prompt is a list of named pieces. Equal names stand for equal tokens and, as Mooncake's hash ids do, for
equal tokens before them. A cache keeps whole blocks, and the last token of a prompt is always computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Piece = tuple[str, int]  # name, tokens


def pieces(names: Sequence[str], tokens: int, piece_tokens: int) -> list[Piece]:
    """A prompt of `tokens` tokens from the named pieces. What is left over is one more piece, named by the
    last."""
    made: list[Piece] = []
    left = tokens
    for name in names:
        made.append((name, min(piece_tokens, left)))
        left -= made[-1][1]
    return [each for each in (*made, (f"{names[-1]} rest", left)) if each[1]]


@dataclass(slots=True)
class Known:
    """The pieces of the prompts so far, and the most tokens that one of them had of each."""

    block_tokens: int
    _most: dict[str, int] = field(default_factory=dict)

    def add(self, prompt: Sequence[Piece]) -> int:
        """The tokens of this prompt in whole blocks that an earlier one begins with, too."""
        shared = self._shared(prompt)
        for name, tokens in prompt:
            self._most[name] = max(self._most.get(name, 0), tokens)
        whole = sum(tokens for _, tokens in prompt)
        return max(min(shared, whole - 1), 0) // self.block_tokens * self.block_tokens

    def _shared(self, prompt: Sequence[Piece]) -> int:
        shared = 0
        for name, tokens in prompt:
            known = min(self._most.get(name, 0), tokens)
            shared += known
            if known < tokens:
                break
        return shared
