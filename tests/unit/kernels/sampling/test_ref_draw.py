"""Noise and draws: Philox against known answers, and the two-level draw against exact probabilities."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.sampling import GROUP_TOKENS, draw, gumbel, keep_likely, philox

MASK = 0xFFFFFFFF


def philox_by_hand(key: tuple[int, int], counter: tuple[int, int, int, int]) -> int:
    """The paper's rounds with Python's integers."""
    (k0, k1), (x0, x1, x2, x3) = key, counter
    for _ in range(10):
        a, b = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & MASK, (a >> 32) ^ x3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return x0


def test_the_oracle_has_the_known_answers_of_random123() -> None:
    assert philox_by_hand((0, 0), (0, 0, 0, 0)) == 0x6627E8D5
    assert philox_by_hand((MASK, MASK), (MASK, MASK, MASK, MASK)) == 0x408F276D
    assert (
        philox_by_hand((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
        == 0xD16CFE09
    )


@pytest.mark.parametrize("seed", [0, 1, 0x299F31D0A4093822, (1 << 64) - 1, 1 << 63])
def test_philox_is_the_papers_for_every_counter(seed: int) -> None:
    c0 = torch.tensor([0, 1, 255, 49151, MASK])
    c1 = torch.tensor([0, 7, 8191, 1 << 20, 12345])
    signed = torch.tensor([(seed ^ (1 << 63)) - (1 << 63)])
    for c2 in (0, 1):
        wanted = [
            philox_by_hand((seed & MASK, seed >> 32), (a, b, c2, 0))
            for a, b in zip(c0.tolist(), c1.tolist(), strict=True)
        ]
        assert philox(signed, c0, c1, c2).tolist() == wanted


def test_gumbel_noise_is_finite_at_both_ends_and_right_between() -> None:
    ends = gumbel(torch.tensor([0, MASK]))
    assert ends.tolist() == pytest.approx(
        [-math.log(-math.log(2.0**-24)), -math.log(-math.log1p(-(2.0**-24)))], rel=1e-5
    )
    middle = gumbel(torch.tensor([1 << 31]))
    assert middle.item() == pytest.approx(-math.log(math.log(2)), abs=1e-5)


@pytest.mark.parametrize("vocab", [5, GROUP_TOKENS, GROUP_TOKENS + 1, 3 * GROUP_TOKENS - 7])
def test_draws_follow_softmax(vocab: int) -> None:
    """Chi-square over the 40 likeliest tokens and the rest together, at the 1e-6 level."""
    draws = 20_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    parts = torch.arange(draws).split(500)  # small enough to stay in the cache
    found = torch.cat([draw(logits.expand(500, -1), torch.full((500,), 99), part) for part in parts])
    exact = logits.double().softmax(-1)
    order = exact.argsort(descending=True)
    seen = torch.bincount(found, minlength=vocab).double()[order]
    wanted = exact[order] * draws
    cells = min(40, vocab - 1)
    seen = torch.cat((seen[:cells], seen[cells:].sum()[None]))
    wanted = torch.cat((wanted[:cells], wanted[cells:].sum()[None]))
    statistic = ((seen - wanted) ** 2 / wanted).sum().item()
    # Wilson-Hilferty: the cube root of chi-square over its degrees is near normal.
    spread = 2 / (9 * cells)
    deviation = ((statistic / cells) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert deviation < 4.75


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(16, 777, generator=torch.Generator().manual_seed(4))
    seeds, positions = torch.arange(16) * 7 - 50, torch.arange(16) + 3
    together = draw(logits, seeds, positions)
    for i in range(16):
        assert draw(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1]).item() == together[i]
    assert draw(logits.flip(0), seeds.flip(0), positions.flip(0)).tolist() == together.flip(0).tolist()
    assert not torch.equal(draw(logits, seeds, positions + 1), together)
    assert not torch.equal(draw(logits, seeds + 1, positions), together)


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((2000, 600), -torch.inf)
    logits[:, [3, 599]] = torch.tensor([0.0, 0.5])
    assert set(draw(logits, torch.zeros(2000).long(), torch.arange(2000)).tolist()) == {3, 599}


@pytest.mark.parametrize("filtered", [False, True])
def test_another_rounding_of_the_sums_changes_no_draw_of_thousands(filtered: bool) -> None:
    """A kernel and torch, or two devices, sum in another order. Against sums in float64 none of these draws
    changes, so rounding changes less than one draw of a thousand."""
    random = torch.Generator().manual_seed(6)
    logits = torch.randn(4000, 1000, generator=random) * 3
    seeds = torch.randint(-(2**62), 2**62, (4000,), generator=random)
    exact = logits.double()
    if filtered:
        columns = [torch.full((4000,), value) for value in (40.0, 0.9, 0.01)]
        logits, exact = (
            keep_likely(logits, *columns),
            keep_likely(exact, *(each.double() for each in columns)),
        )
    positions = torch.arange(4000)
    assert int((draw(logits, seeds, positions) != draw(exact, seeds, positions)).sum()) == 0
