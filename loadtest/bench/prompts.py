"""Random prompts of a given length: token ids, which make it exact, or words of about one token each."""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadtest.bench.asked import Prompt
from loadtest.clients import WORDS

FIRST_ID, LAST_ID = 300, 40_000  # past the special tokens and single bytes of common vocabularies


@dataclass(frozen=True, slots=True)
class Prompts:
    """Draws from one generator, so that a seed makes the same prompts again."""

    rng: random.Random
    chat: bool = False
    ids: tuple[int, int] = (FIRST_ID, LAST_ID)

    def make(self, tokens: int) -> Prompt:
        """In the form that was asked for."""
        return self.words(tokens) if self.chat else self.numbers(tokens)

    def after(self, prefix: Prompt, tokens: int) -> Prompt:
        """`prefix` and `tokens` more."""
        if isinstance(prefix, str):
            return f"{prefix} {self.words(tokens)}"
        return [*prefix, *self.numbers(tokens)]

    def numbers(self, tokens: int) -> list[int]:
        """Token ids."""
        return self.rng.choices(range(*self.ids), k=tokens)

    def words(self, tokens: int) -> str:
        """Text of so many common words."""
        return " ".join(self.rng.choices(WORDS, k=tokens))
