"""Drafts from what a slot has: where its last tokens occur earlier, the tokens that followed them then.

    ... def area ( radius ) : ...  now again: def area (        drafts: radius ) :

The longest run of last tokens that occurs counts, and of its places the latest one. A text that repeats
itself goes on repeating: drafts beyond the last token continue with the first of them. A request with a
prediction finds its drafts there first: also after one token, as the answer most often begins as it does.

Nothing is kept between steps. A search takes about 2 us, and 1 us more for each 1,000 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from services.executor.engine import NO_DRAFT
from shared.messages import Ints, SlotOpen

LEAST = 3  # tokens that must occur earlier: after fewer the drafts are most often refused
LEAST_OF_PREDICTION = 2
MOST = 16  # tokens that are compared
WINDOW = 32_768  # of the last tokens: a search of more would delay the step

_Tokens = NDArray[np.int32]


class PromptDrafts:
    """See services.executor.engine.Drafter. Used by the device thread alone."""

    def __init__(self, tokens: Callable[[int], Ints]) -> None:
        """`tokens`: of a slot, the known ones so far, as an array of int32."""
        self._tokens = tokens
        self._predictions: dict[int, tuple[_Tokens, int]] = {}  # by slot, with the length of its prompt

    def open(self, opened: SlotOpen) -> None:
        self._predictions.pop(opened.slot, None)
        if opened.prediction:
            predicted = np.array(opened.prediction, np.int32)
            self._predictions[opened.slot] = predicted, opened.prompt_tokens

    def close(self, slot: int) -> None:
        self._predictions.pop(slot, None)

    def draft(self, slots: Sequence[int], most: int) -> _Tokens:
        drafts = np.full((len(slots), most), NO_DRAFT, np.int32)
        for row, slot in enumerate(slots):
            known = np.frombuffer(self._tokens(slot), np.int32)  # dropped before the array grows
            found, length = following(known[-WINDOW:], most, LEAST)
            if slot in self._predictions:
                predicted, prompt = self._predictions[slot]
                least = min(LEAST_OF_PREDICTION, len(known) - prompt)
                last = known[max(prompt, len(known) - MOST) :]
                likely, matched = following(last, most, least, text=predicted)
                found = likely if matched >= min(length, len(known) - prompt) and len(likely) else found
            drafts[row, : len(found)] = found
        return drafts


def following(last: _Tokens, most: int, least: int, text: _Tokens | None = None) -> tuple[_Tokens, int]:
    """Up to `most` tokens that follow the longest end of `last` in `text`, or earlier in `last` itself; and
    the length of that end. No tokens if it is shorter than `least`."""
    nothing = np.empty(0, np.int32)
    if not len(last) or least < 1:
        return nothing, 0
    own = text is None
    text = last if text is None else text
    ends = np.flatnonzero((last[:-1] if own else text) == last[-1])
    length = 1
    while len(ends) and length < min(MOST, len(last)):
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == last[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if not len(ends) or length < least:
        return nothing, 0
    rest = text[int(ends[-1]) + 1 :]
    if own and len(rest) < most:
        return np.resize(rest, most), length
    return rest[:most].copy(), length
