"""Drafts from what a slot has: where its last tokens occur earlier, the tokens that followed them then.

    ... def area ( radius ) : ...  now again: def area (        drafts: radius ) :

The longest run of last tokens that occurs counts, and of its places the latest one. It has as many drafts
as tokens, since a short run is most often chance: a copy has 2, 5, then 8 drafts in its first steps. A text
that repeats itself goes on repeating: drafts beyond the last token continue with the first of them. A request
with a prediction finds its drafts there first, also after one token: most often the answer begins like it.
What a grammar hardly leaves open, such as the names in an object, comes before both. A longer end that occurs
in other answers of its tenant (answers.py) has its drafts there.

Nothing is kept between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from services.executor.engine import NO_DRAFT, Forced
from services.executor.speculation.answers import LEAST as LEAST_ELSEWHERE
from services.executor.speculation.answers import Answers
from shared.messages import Ints, SlotOpen

LEAST = 2  # tokens that must occur earlier: after one the drafts are most often refused
MOST = 16  # tokens that are compared
TRIES = 8  # of a search of bytes, each less than that of all tokens
WINDOW = 32_768  # of the last tokens: a search of more would delay the step

_Tokens = NDArray[np.int32]


class PromptDrafts:
    """See services.executor.engine.Drafter. Used by the device thread alone."""

    def __init__(self, tokens: Callable[[int], Ints], forced: Forced | None = None) -> None:
        """`tokens`: of a slot, the known ones so far, in int32. `forced`: see `speculation_of`."""
        self._tokens, self._forced = tokens, forced
        self._answers, self._opened = Answers(), dict[int, SlotOpen]()
        self._predictions: dict[int, tuple[_Tokens, int]] = {}  # by slot, with the length of its prompt

    def open(self, opened: SlotOpen) -> None:
        self._predictions.pop(opened.slot, None)
        self._opened.pop(opened.slot, None)
        if self._forced is not None and opened.tenant:
            self._opened[opened.slot] = opened
        if opened.prediction:
            predicted = np.array(opened.prediction, np.int32)
            self._predictions[opened.slot] = predicted, opened.prompt_tokens

    def close(self, slot: int) -> None:
        self._predictions.pop(slot, None)
        if (opened := self._opened.pop(slot, None)) is not None:
            tokens, prompt = self._tokens(slot), opened.prompt_tokens
            if len(tokens) > prompt:
                self._answers.add(opened.tenant, np.array(tokens[max(prompt - MOST, 0) :], np.int32))

    def draft(self, slots: Sequence[int], most: int) -> _Tokens:
        drafts = np.full((len(slots), most), NO_DRAFT, np.int32)
        for row, slot in enumerate(slots):
            if self._forced is not None and (forced := self._forced(slot, most)):
                drafts[row, : len(forced)] = forced
                continue
            others = None
            if slot in self._opened:
                end = np.array(self._tokens(slot)[-MOST:], np.int32)
                others = self._answers.of(self._opened[slot].tenant, end)
            if others is None and slot not in self._predictions and not is_repeated(self._tokens(slot)):
                continue
            known = np.frombuffer(self._tokens(slot), np.int32)  # dropped before the array grows
            found, length = following(known[-WINDOW:], most, LEAST)
            if slot in self._predictions:
                predicted, prompt = self._predictions[slot]
                least = min(LEAST, len(known) - prompt)
                last = known[max(prompt, len(known) - MOST) :]
                likely, matched = following(last, most, least, text=predicted)
                found = likely if matched >= min(length, len(known) - prompt) and len(likely) else found
            if others is not None:
                likely, matched = following(known[-MOST:], most, LEAST_ELSEWHERE, text=others)
                found = likely if matched > length else found
            drafts[row, : len(found)] = found
        return drafts


def is_repeated(tokens: Ints) -> bool:
    """Whether the last LEAST tokens occur earlier, or may. It takes less time than `following`, and most rows
    of most steps have no drafts."""
    data = tokens[-WINDOW:].tobytes()
    size = tokens.itemsize
    end, last = len(data) - size, data[-LEAST * size :]
    for _ in range(TRIES):
        at = data.rfind(last, 0, end)
        if at <= 0 or at % size == 0:
            return at >= 0
        end = at + len(last) - 1  # the bytes are in two tokens
    return True  # a text can have such bytes everywhere: `following` decides


def following(last: _Tokens, most: int, least: int, text: _Tokens | None = None) -> tuple[_Tokens, int]:
    """Up to `most` tokens that follow the longest end of `last` in `text`, or earlier in `last` itself, no
    more than that end has; and its length. No tokens if it is shorter than `least`."""
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
    rest, most = text[int(ends[-1]) + 1 :], min(most, length)
    if own and len(rest) < most:
        return np.resize(rest, most), length
    return rest[:most].copy(), length
