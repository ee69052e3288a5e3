"""A logits processor that waits, row after row: what a plugin costs that computes."""

from __future__ import annotations

from services.executor.sampling.logits_processors import Wait


class WaitInTurn(Wait):
    """Like Wait, but one row after the other: it says that it computes."""

    waits = False
