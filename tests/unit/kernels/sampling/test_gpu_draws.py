"""Draws of the sampler's kernel fit their distribution; the oracle itself by hand and by the reference."""

from __future__ import annotations

import pytest
import torch
from support.executor.draws import Filter, Sampler, chi_square, exact
from support.executor.gpu_side import DEVICE

from kernels.sampling import draw, keep_likely

FILTERS = [(1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 200, 0.95, 0.02)]
ON_GPU = DEVICE == "cuda"  # in the interpreter a draw takes a tenth of a second
VOCAB, ROWS, ROUNDS = (128_256, 1024, 128) if ON_GPU else (20, 2, 4)
UNLIKELY = 1e-4  # chance does not explain a smaller p


@pytest.mark.parametrize("wanted", FILTERS if ON_GPU else FILTERS[-1:])
def test_the_kernel_draws_from_the_exact_distribution(wanted: Filter) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    logits = logits.bfloat16()  # as the model gives them, with ties
    sampler = Sampler(logits.to(DEVICE), wanted, ROWS)
    seen, probabilities = sampler.seen(ROUNDS).cpu(), exact(logits, wanted)
    assert not seen[probabilities == 0].any()
    assert not ON_GPU or chi_square(seen, probabilities).p > UNLIKELY
    assert len(sampler.ids_of_one_seed(16 if ON_GPU else 1)) == 1


@pytest.mark.parametrize(
    ("wanted", "probabilities"),
    [
        ((1.0, 0, 1.0, 0.0), [0.4, 0.2, 0.2, 0.1, 0.1]),
        ((0.5, 0, 1.0, 0.0), [16 / 26, 4 / 26, 4 / 26, 1 / 26, 1 / 26]),
        ((1.0, 2, 1.0, 0.0), [0.5, 0.25, 0.25, 0.0, 0.0]),
        ((1.0, 0, 0.5, 0.0), [0.5, 0.25, 0.25, 0.0, 0.0]),
        ((1.0, 0, 0.3, 0.0), [1.0, 0.0, 0.0, 0.0, 0.0]),
        ((1.0, 3, 0.45, 0.0), [1.0, 0.0, 0.0, 0.0, 0.0]),  # 0.4 is 0.5 of what top-k leaves
        ((1.0, 0, 1.0, 0.3), [0.5, 0.25, 0.25, 0.0, 0.0]),
    ],
)
def test_probabilities_equal_ones_by_hand(wanted: Filter, probabilities: list[float]) -> None:
    logits = torch.tensor([4.0, 2.0, 2.0, 1.0, 1.0], dtype=torch.float64).log()
    assert exact(logits, wanted).tolist() == pytest.approx(probabilities, abs=1e-12)


@pytest.mark.parametrize("wanted", [(1.0, 20, 0.9, 0.01), (0.7, 0, 0.8, 0.0), (1.3, 300, 1.0, 0.05)])
def test_probabilities_are_the_references(wanted: Filter) -> None:
    temperature, top_k, top_p, min_p = wanted
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(2)) * 3
    columns = (torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    kept = keep_likely((logits - logits.max()) / temperature, *columns)[0].double().softmax(-1)
    assert (exact(logits[0], wanted) - kept).abs().max() < 1e-6


def test_chi_square_equals_one_by_hand() -> None:
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    fit = chi_square(torch.tensor([60, 40]), half)
    assert (fit.cells, fit.statistic) == (2, pytest.approx(4.0))
    assert fit.p == pytest.approx(0.0455002639)  # of the table of chi-square, one degree of freedom
    assert chi_square(torch.tensor([50, 50]), half).p == pytest.approx(1.0)


def test_chi_square_pools_rare_tokens_and_rejects_impossible_tokens() -> None:
    probabilities = torch.cat((torch.full((1000,), 0.0005), torch.tensor([0.5, 0.0]))).double()
    seen = torch.cat((torch.ones(1000, dtype=torch.int64), torch.tensor([1000, 0])))
    fit = chi_square(seen, probabilities)
    assert (fit.cells, fit.p) == (65, pytest.approx(1.0))  # 64 and the one that is not rare
    seen[-1] = 1
    assert chi_square(seen, probabilities).p == 0.0


@pytest.mark.parametrize(("temperature", "likely"), [(1.0, True), (1.05, False)])
def test_a_small_error_shows(temperature: float, likely: bool) -> None:
    """20,000 draws of the reference; with a temperature wrong by 5 % they do not fit."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 2
    parts = torch.arange(20_000).split(1000)
    drawn = torch.cat([draw(logits.expand(1000, -1), torch.full((1000,), 99), part) for part in parts])
    fit = chi_square(torch.bincount(drawn, minlength=300), exact(logits, (temperature, 0, 1.0, 0.0)))
    assert (fit.p > 0.01) == likely
