"""Drafts from a slot's own tokens and from a prediction, against a search by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from services.executor.engine import NO_DRAFT
from services.executor.speculation.prompt_drafts import (
    LEAST,
    MOST,
    WINDOW,
    PromptDrafts,
    following,
    is_repeated,
)
from shared.messages import SlotOpen, ints


def by_hand(tokens: Sequence[int], most: int) -> tuple[list[int], int]:
    """The tokens after the latest place of the longest end that occurs earlier; repeated at the end."""
    for length in range(min(MOST, len(tokens) - 1), LEAST - 1, -1):
        end = list(tokens[-length:])
        for at in range(len(tokens) - 1 - length, -1, -1):
            if list(tokens[at : at + length]) == end:
                known = list(tokens)
                for nth in range(min(most, length)):
                    known.append(known[at + length + nth])
                return known[len(tokens) :], length
    return [], 0


@pytest.mark.parametrize("vocab", [1, 2, 3, 4])
def test_following_finds_what_a_search_by_hand_does(vocab: int) -> None:
    dice = random.Random(vocab)
    found = 0
    for _ in range(200):
        tokens = [dice.randrange(vocab) for _ in range(dice.randint(1, 60))]
        drafts, length = following(np.array(tokens, np.int32), 5, LEAST)
        assert (drafts.tolist(), length if len(drafts) else 0) == by_hand(tokens, 5)
        assert is_repeated(ints(tokens)) == bool(len(drafts))
        found += bool(len(drafts))
    assert found > 20


def drafts_of(tokens: list[int], prompt: int, prediction: list[int], most: int = 4) -> list[int]:
    known = ints(tokens)
    drafter = PromptDrafts(lambda slot: known)
    drafter.open(
        SlotOpen(
            slot=3,
            generation=1,
            seq=1,
            prompt_tokens=prompt,
            tokens=ints(tokens[:prompt]),
            prediction=ints(prediction),
        )
    )
    (row,) = drafter.draft([3], most).tolist()
    known.append(1)  # no view of it is kept
    return [token for token in row if token != NO_DRAFT]


def test_prediction_is_followed_from_the_first_token_on() -> None:
    assert drafts_of([1, 2, 50], 2, [50, 51, 52, 53, 54, 55]) == [51]
    assert drafts_of([1, 2, 50, 51], 2, [50, 51, 52, 53, 54, 55]) == [52, 53]


def test_prediction_is_followed_again_after_an_edit() -> None:
    assert drafts_of([1, 2, 50, 99, 52, 53], 2, [50, 51, 52, 53, 54, 55]) == [54, 55]


def test_prediction_loses_against_a_longer_end() -> None:
    own = [7, 8, 9, 10, 11, 12]
    assert drafts_of([*own, 60, 7, 8, 9, 10], 6, [9, 10, 70, 71]) == [11, 12, 60, 7]


def test_drafter_finds_nothing_in_a_text_without_repetition() -> None:
    assert drafts_of([*range(40)], 20, []) == []


def test_close_forgets_the_prediction_of_a_slot() -> None:
    known = ints([1, 50])
    drafter = PromptDrafts(lambda slot: known)
    opened = SlotOpen(
        slot=0, generation=1, seq=1, prompt_tokens=1, tokens=ints([1]), prediction=ints([50, 51])
    )
    drafter.open(opened)
    assert drafter.draft([0], 1).tolist() == [[51]]
    drafter.close(0)
    assert drafter.draft([0], 1).tolist() == [[NO_DRAFT]]


def test_is_repeated_looks_at_whole_tokens_alone() -> None:
    shifted = [0x01000000, 0x02000000, 0x00000003]  # its bytes from the fourth on are those of 1, 2
    assert not is_repeated(ints([*shifted, 9, 1, 2]))
    assert is_repeated(ints([1, 2, *shifted, 9, 1, 2]))
    assert not is_repeated(ints([5]))
    assert not is_repeated(ints([5, 5]))
    assert is_repeated(ints([5, 5, 5]))


def test_is_repeated_leaves_a_text_full_of_the_bytes_of_two_tokens_to_the_search_of_tokens() -> None:
    """66816 is 00 05 01 00 in bytes, 261 is 05 01 00 00: a search of bytes would stop at each token."""
    for others, tries_are_left in ((3, True), (50, False)):
        tokens = ints([*[66_816] * others, 261, 261])
        assert is_repeated(tokens) != tries_are_left
        drafter = PromptDrafts(lambda slot, tokens=tokens: tokens)
        assert drafter.draft([0], 1).tolist() == [[NO_DRAFT]]


def test_is_repeated_looks_no_farther_back_than_drafts_are_taken_from() -> None:
    between = range(10, 10 + WINDOW)
    assert not is_repeated(ints([1, 2, *between, 1, 2]))
    assert is_repeated(ints([1, 2, *between[:-10], 1, 2]))
