"""Drafts by definition, and how many tokens a row keeps."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.drafts import LEAST, MOST, accept, propose


def by_definition(tokens: list[int], count: int) -> list[int]:
    """Try each earlier end, the last one first, with each length from the longest on."""
    for length in range(MOST, LEAST - 1, -1):
        for end in range(len(tokens) - 2, length - 2, -1):
            if tokens[end - length + 1 : end + 1] == tokens[len(tokens) - length :]:
                text = tokens[end + 1 :]
                return [text[i % len(text)] if i < length else -1 for i in range(count)]
    return [-1] * count


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1]),
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], [8, 1, 2]),  # of two matches of a length the last one
        ([5, 1, 2, 3, 7, 1, 2, 3, 4, 5, 1, 2, 3], [7, 1, 2]),  # the longer match
        ([8, 8, 8, 8], [8, 8, 8]),  # the text repeats from its end on
        ([3, 4, 3, 4, 3], [4, 3, 4]),
        ([1, 2, 3, 4, 2, 3], [4, 2, -1]),  # two tokens alike: two drafts
        ([1, 2, 3, 2], [-1, -1, -1]),  # one token alike is too few
        ([6], [-1, -1, -1]),
        ([], [-1, -1, -1]),
    ],
)
def test_drafts_follow_the_longest_match(tokens: list[int], drafts: list[int]) -> None:
    assert propose(torch.tensor(tokens, dtype=torch.int32), 3).tolist() == drafts
    assert by_definition(tokens, 3) == drafts


def test_reference_proposes_drafts_by_definition() -> None:
    chance = random.Random(1)
    for _ in range(300):
        tokens = chance.choices(range(chance.choice((2, 3, 9))), k=chance.randrange(40))
        assert propose(torch.tensor(tokens), 5).tolist() == by_definition(tokens, 5)


@pytest.mark.parametrize(
    ("answer", "drafts"),
    [
        ([7], [8, -1, -1]),  # the first token of the answer is enough
        ([1, 7, 8], [9, 5, -1]),
        ([4, 8], [-1, -1, -1]),  # one token of several is too few
        ([4, 8, 9, 5], [-1, -1, -1]),  # nothing follows there
    ],
)
def test_prediction_is_searched_for_the_tokens_of_the_answer(answer: list[int], drafts: list[int]) -> None:
    tokens, prediction = torch.tensor([3, 1, 2, *answer]), torch.tensor([6, 7, 8, 9, 5])
    assert propose(tokens, 3, prediction, 3).tolist() == drafts


def test_longer_match_among_the_tokens_beats_the_prediction() -> None:
    tokens, prediction = torch.tensor([5, 6, 7, 8, 4, 5, 6, 7]), torch.tensor([6, 7, 9, 9])
    assert propose(tokens, 2, prediction, 2).tolist() == [8, 4]
    assert propose(tokens, 2, prediction, 6).tolist() == [9, 9]  # the answer has two tokens


def test_a_row_keeps_tokens_up_to_the_first_that_is_no_draft_or_ends_it() -> None:
    chosen = torch.tensor([[4, 5, 6]] * 5 + [[-1, -1, 6], [4, 5, -1], [4, -1, 6]])
    ended = torch.zeros(8, 3, dtype=torch.int64)
    ended[3, 0] = ended[4, 1] = ended[5, 0] = ended[6, 2] = ended[7, 1] = 1
    drafts = torch.tensor([[4, 5], [4, 6], [5, 5], [4, 5], [4, 5], [-1, -1], [4, 5], [4, 5]])
    assert accept(chosen, ended, drafts).tolist() == [3, 2, 1, 1, 2, 1, 2, 1]
