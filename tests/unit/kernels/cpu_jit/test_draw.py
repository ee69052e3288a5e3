"""The draw of a CPU is the definition's: the same tokens from the same seeds, in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu_jit.draw import draw
from kernels.sampling import GROUP_TOKENS
from kernels.sampling import draw as defined

ROWS = 24
INFINITE = -torch.inf


def inputs(vocab: int, spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, temperatures, seeds of any sign, positions."""
    chance = torch.Generator().manual_seed(vocab)
    logits = torch.randn(ROWS, vocab, generator=chance) * spread
    heat = torch.rand(ROWS, generator=chance) * 2 + 0.05
    seeds = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=chance)
    return logits, heat, seeds, torch.randint(0, 2**31, (ROWS,), generator=chance)


@pytest.mark.parametrize("vocab", [1, 7, GROUP_TOKENS, 1000, 49_152, 49_160])
@pytest.mark.parametrize("left", ["all", "few", "the last"])
def test_draw_gives_the_tokens_of_the_definition(vocab: int, left: str) -> None:
    logits, heat, seeds, positions = inputs(vocab, 3.0)
    if left == "few":
        logits[:, 1::3] = INFINITE
    elif left == "the last":
        logits[:, :-1] = INFINITE
    best = logits.amax(-1)
    found = draw(logits, best, heat, seeds, positions)
    wanted = defined((logits - best.unsqueeze(1)) / heat.unsqueeze(1), seeds, positions)
    assert found.tolist() == wanted.tolist()


def test_a_token_does_not_depend_on_the_rows_beside_it() -> None:
    logits, heat, seeds, positions = inputs(5000, 1.0)
    best = logits.amax(-1)
    together = draw(logits, best, heat, seeds, positions)
    alone = [
        int(draw(*(column[row : row + 1] for column in (logits, best, heat, seeds, positions))))
        for row in range(ROWS)
    ]
    assert together.tolist() == alone
    assert len(set(alone)) > ROWS // 2


def test_the_coldest_row_takes_its_largest_logit_and_draws_among_equal_ones() -> None:
    logits = torch.full((ROWS, 600), 5.0)
    logits[:, [3, 599]] = 9.0
    best, cold = logits.amax(-1), torch.full((ROWS,), 1e-6)
    found = draw(logits, best, cold, torch.arange(ROWS), torch.full((ROWS,), 4))
    assert {*found.tolist()} == {3, 599}


@pytest.mark.parametrize("flaw", [torch.nan, torch.inf, INFINITE])
def test_a_row_that_is_not_finite_changes_no_other_row(flaw: float) -> None:
    logits, heat, seeds, positions = inputs(1000, 1.0)
    clean = draw(logits, logits.amax(-1), heat, seeds, positions)
    logits[5] = flaw
    found = draw(logits, logits.amax(-1), heat, seeds, positions)
    assert 0 <= found[5] < 1000
    assert [*found[:5], *found[6:]] == [*clean[:5], *clean[6:]]
