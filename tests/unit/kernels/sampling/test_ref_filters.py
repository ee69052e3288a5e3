"""Filters against transformers' logits processors, penalties against their definitions in float64."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import transformers

from kernels.sampling import keep_likely, penalize

VOCAB = 3000
SETTINGS = [
    (top_k, top_p, min_p)
    for top_k, top_p, min_p in product((0, 1, 20, 300, VOCAB, VOCAB + 5), (1.0, 0.95, 0.5, 1e-6), (0.0, 0.05))
    if (top_k, top_p, min_p) != (0, 1.0, 0.0)
]


def random_logits(rows: int, scale: float) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(int(scale * 10))) * scale


def kept_by_transformers(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    scores = logits.double()
    if top_k:
        scores = transformers.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = transformers.TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0:
        scores = transformers.MinPLogitsWarper(min_p)(None, scores)
    return scores > -torch.inf


@pytest.mark.parametrize(
    "scale", [0.1, 1.0, 4.0]
)  # flat: everything must be sorted; peaked: the first 256 do
def test_filters_keep_what_transformers_keeps_row_by_row_settings_mixed(scale: float) -> None:
    logits = random_logits(len(SETTINGS), scale)
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*SETTINGS, strict=True))
    kept = keep_likely(logits, top_k, top_p, min_p)
    for row, setting in enumerate(SETTINGS):
        wanted = kept_by_transformers(logits[row : row + 1], *setting)[0]
        found = kept[row] > -torch.inf
        # One token may fall either way where a float32 sum meets top_p.
        assert (found != wanted).sum() <= (1 if setting[1] < 1 else 0), setting
        assert torch.equal(kept[row][found], logits[row][found])


def test_ties_stay_or_go_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    kept = keep_likely(logits, torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert kept.tolist() == [[2.0, 1.0, 1.0, -torch.inf]]


def kept_by_definition(logits: torch.Tensor, top_p: float) -> list[bool]:
    """A token stays while the tokens likelier than it have less than `top_p` of the mass."""
    mass = np.exp(logits.numpy().astype(np.float64) - float(logits.max()))
    mass /= mass.sum()
    return [bool(mass[(logits > each).numpy()].sum() < np.float32(top_p)) for each in logits]


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.62, 0.9, 0.999])
def test_top_p_by_bins_is_top_p_by_definition(top_p: float) -> None:
    spread = torch.randn(400, generator=torch.Generator().manual_seed(3)) * 2
    rows = {
        "all equal": torch.zeros(400),
        "ties": (spread * 4).round() / 4,
        "within one bin": spread * 1e-4,
        "far below the bins": torch.cat((spread[:3], spread[3:] - 60)),
        "banned": spread.masked_fill(torch.arange(400) % 3 == 0, -torch.inf),
    }
    logits = torch.stack(list(rows.values()))
    off = torch.zeros(len(rows))
    kept = keep_likely(logits, off.long(), torch.full((len(rows),), top_p), off)
    for (name, row), found in zip(rows.items(), kept, strict=True):
        wanted = torch.tensor(kept_by_definition(row, top_p)) & (row > -torch.inf)
        assert torch.equal(found > -torch.inf, wanted), name


def test_min_p_alone_is_relative_to_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.06, 0.04]]).log()
    kept = keep_likely(logits, torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.1]))
    assert (kept > -torch.inf).tolist() == [[True, True, True, False]]


def test_repetition_penalty_is_transformers() -> None:
    logits = random_logits(1, 3.0)
    tokens = torch.randint(VOCAB, (1, 200), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(1, VOCAB, dtype=torch.bool).scatter_(1, tokens, True)
    found = penalize(
        logits, seen, torch.zeros(1, VOCAB, dtype=torch.int32), *torch.tensor([[1.3], [0.0], [0.0]])
    )
    assert torch.equal(found, transformers.RepetitionPenaltyLogitsProcessor(1.3)(tokens, logits.clone()))


def test_presence_and_frequency_are_openais_formula() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, each row with its own strengths."""
    logits = random_logits(3, 2.0)
    counts = torch.randint(4, (3, VOCAB), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    strengths = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.0, 0.25], [1.0, -1.5, 1.75]])
    found = penalize(logits, counts > 0, counts, *strengths.unbind(1))
    times = counts.numpy().astype(np.float64)
    presence, frequency = (strengths[:, i : i + 1].numpy().astype(np.float64) for i in (1, 2))
    wanted = logits.numpy().astype(np.float64) - times * frequency - (times > 0) * presence
    np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=2e-6)
