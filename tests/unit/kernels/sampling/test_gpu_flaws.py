"""The sampler's kernels and rows whose logits are not finite: they end without a token, and alone."""

from __future__ import annotations

import math

import pytest
import torch
from support.executor.draws import slot_table
from support.executor.gpu_side import DEVICE, normal, words

from kernels.sampling import INVALID
from kernels.sampling.gpu import Choices, choose, mask_room, scratch

LEAST = 1.1754944e-38
FILTERS = [
    (0, 0, 1, 0), (1, 0, 1, 0), (0.7, 5, 1, 0), (1, 40, 0.9, 0.01), (1.3, 0, 0.8, 0), (1, 0, 1, 0.1),
    (1, 300, 0.99, 0), (LEAST, 3, LEAST, 1),
]  # fmt: skip
VOCAB = 1000


def chosen(logits: torch.Tensor, numbers: range) -> tuple[list[int], list[int], list[int], list[int]]:
    """Ids and done of rows with FILTERS, over and over; last tokens and done of their slots. Seeds and
    positions are by the numbers of the rows."""
    rows = len(logits)
    table = slot_table((FILTERS * rows)[:rows], DEVICE)
    seeds = torch.tensor([*numbers], device=DEVICE) * 77
    last, done = words(*[9] * rows), words(*[0] * rows)
    stops = torch.full((rows, 4), -1, dtype=torch.int32, device=DEVICE)
    found = torch.full((2, rows), -9, dtype=torch.int32, device=DEVICE)
    masks = words(*[0] * rows), mask_room(rows, VOCAB, logits.device)
    choices = Choices(table, seeds, words(*[1000] * rows), stops, last, done, *masks)
    slots, positions = words(*range(rows)), words(*(10 + number for number in numbers))
    choose(logits, slots, positions, choices, scratch(rows, VOCAB, logits.device), found)
    return found[0].tolist(), found[1].tolist(), last.tolist(), done.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flawed_rows_end_without_a_token_under_any_filters(dtype: torch.dtype) -> None:
    size = len(FILTERS)
    logits = (normal(5 * size, VOCAB) * 3).to(dtype)
    logits[0 * size : 1 * size, 700] = math.nan
    logits[1 * size : 2 * size, 999] = math.inf
    sound = slice(2 * size, 3 * size)
    alone = chosen(logits[sound], range(2 * size, 3 * size))
    assert alone[1] == [0] * size
    logits[3 * size : 4 * size] = math.nan
    logits[4 * size :] = -math.inf
    wanted = [-1] * (2 * size) + alone[0] + [-1] * (2 * size)
    flawed = [token < 0 for token in wanted]
    ids, ended, last, done = chosen(logits, range(5 * size))
    assert ids == wanted
    assert ended == [INVALID * flaw for flaw in flawed]
    assert last == [max(token, 0) for token in wanted]
    assert done == [int(flaw) for flaw in flawed]


def test_the_smallest_filters_leave_the_likeliest_token() -> None:
    logits = normal(len(FILTERS), VOCAB)
    assert chosen(logits, range(len(FILTERS)))[0][-1] == int(logits[-1].argmax())
