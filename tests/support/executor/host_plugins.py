"""Logits processors as users would write them, for tests through all services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Breaks:
    """Raises at the token number `at`."""

    def __init__(self, args: dict[str, Any], prompt_tokens: Sequence[int]) -> None:
        self._at = args["at"]

    def process(self, generated: Sequence[int], logits: Tensor) -> Tensor:
        if len(generated) == self._at:
            raise RuntimeError("no more words")
        return logits
