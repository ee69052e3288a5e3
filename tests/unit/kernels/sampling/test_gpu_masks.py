"""Masks in the sampler's kernels: as if the logits of forbidden tokens had been minus infinity."""

from __future__ import annotations

import math

import pytest
import torch
from support.executor.draws import slot_table
from support.executor.gpu_side import DEVICE, normal, words

from kernels.sampling import INVALID
from kernels.sampling.gpu import Choices, choose, mask_room, scratch

FILTERS = [
    (0, 0, 1, 0), (1, 0, 1, 0), (0.7, 5, 1, 0), (1, 40, 0.9, 0.01), (1.3, 0, 0.8, 0), (1, 0, 1, 0.1),
    (1, 300, 0.99, 0),
]  # fmt: skip
VOCAB = 1000
ROWS = 2 * len(FILTERS)
SLOTS = ROWS + 3
OF_ROW = [(5 * row + 2) % SLOTS for row in range(ROWS)]  # a slot for each row, in no order


def chosen(logits: torch.Tensor, allowed: dict[int, torch.Tensor]) -> list[list[int]]:
    """Ids and done of rows with FILTERS, two rows each, after masks of those rows; the masks of other slots
    allow nothing."""
    masked, masks = words(*[0] * SLOTS), mask_room(SLOTS, VOCAB, logits.device)
    for row, bits in allowed.items():
        spare = torch.ones(8 * masks.shape[1] - VOCAB, dtype=torch.bool)  # have no meaning
        each = torch.cat([bits.cpu(), spare]).view(-1, 8).int() << torch.arange(8)
        masks[OF_ROW[row]] = each.sum(1).to(torch.uint8)
        masked[OF_ROW[row]] = 1
    table = torch.zeros(SLOTS, len(slot_table(FILTERS[:1], DEVICE)[0]), device=DEVICE)
    table[OF_ROW] = slot_table([each for each in FILTERS for _ in range(2)], DEVICE)
    found = torch.full((2, ROWS), -9, dtype=torch.int32, device=DEVICE)
    choices = Choices(
        table, torch.arange(SLOTS, device=DEVICE) * 77, words(*[1000] * SLOTS),
        torch.full((SLOTS, 4), -1, dtype=torch.int32, device=DEVICE), words(*[9] * SLOTS),
        words(*[0] * SLOTS), masked, masks,
    )  # fmt: skip
    room = scratch(ROWS, VOCAB, logits.device)
    choose(logits, words(*OF_ROW), words(*range(10, 10 + ROWS)), choices, room, found)
    return found.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masked_rows_get_the_token_of_masked_logits_and_others_stay(dtype: torch.dtype) -> None:
    logits = (normal(ROWS, VOCAB) * 3).to(dtype)
    some = torch.rand(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.1
    some[4], some[6], some[8] = False, False, True
    some[4, VOCAB - 1] = some[6, [0, 31, 32, 255, 256]] = True
    allowed = {row: some[row] for row in range(ROWS) if row % 2 == 0}  # every filter, with and without
    forbidden = ~some
    forbidden[1::2] = False
    by_torch = logits.masked_fill(forbidden, -math.inf)
    wanted = chosen(by_torch.clone(), {})
    assert wanted != chosen(logits.clone(), {})
    changed = logits.clone()
    changed[0, ~some[0]] = math.nan  # a mask hides a flaw, too
    assert chosen(changed, allowed) == wanted
    assert all(some[row, wanted[0][row]] for row in allowed)
    assert torch.equal(changed, by_torch)


def test_row_ends_without_a_token_when_its_mask_allows_nothing() -> None:
    logits = normal(ROWS, VOCAB)
    ids, done = chosen(logits, {3: torch.zeros(VOCAB, dtype=torch.bool)})
    assert (ids[3], done[3]) == (-1, INVALID)
    assert [*done[:3], *done[4:]] == [0] * (ROWS - 1)
