"""The simulated engine beyond the contract: its tokens by an independent formula, its time."""

from __future__ import annotations

import time

import pytest
from plan_maker import PlanMaker, Row

from services.executor.sim import SimBackend, SimOptions


def token(seed: int, position: int, last: int, vocab: int) -> int:
    """Written out from the description: two rounds of SplitMix64's mixer over seed, place and input."""
    mixed = (seed ^ (position * 0x9E3779B97F4A7C15) ^ (last << 32)) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    return 256 + (mixed ^ (mixed >> 27)) % (vocab - 256)


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_the_next_token_is_a_hash_of_seed_place_and_the_one_before(seed: int) -> None:
    maker = PlanMaker(SimBackend(SimOptions(vocab=900, blocks=8, step_us=0)))
    maker.open(0, [300, 301, 302], seed=seed)
    ids = [maker.prefill({0: 3}).ids[0], *maker.decode({0: 4}, 5)[0]]
    last, wanted = 302, []
    for position in range(3, 9):
        last = token(seed, position, last, 900)
        wanted.append(last)
    assert ids == wanted


def test_control_tokens_are_never_drawn_and_a_tiny_vocabulary_works() -> None:
    for vocab, low in ((300, 256), (10, 9)):
        maker = PlanMaker(SimBackend(SimOptions(vocab=vocab, blocks=8, step_us=0)))
        maker.open(0, [1], seed=3)
        ids = [maker.prefill({0: 1}).ids[0], *maker.decode({0: 2}, 40)[0]]
        assert low <= min(ids) <= max(ids) < vocab


def test_a_step_takes_its_fixed_time_and_that_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept = 50.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "sleep", slept.append)
    maker = PlanMaker(SimBackend(SimOptions(blocks=8, step_us=2_000, token_us=10)))
    for slot in (0, 1):
        maker.open(slot, [300] * 20)
    plan = maker.plan([Row(0, 0, 20), Row(1, 0, 5)])
    maker.backend.forward(plan)
    now_s += 0.001
    maker.backend.sample(plan)
    assert slept == [pytest.approx((2_000 + 25 * 10) / 1e6 - 0.001)]
    maker.backend.forward(plan)
    now_s += 1.0  # sampled late: no wait is left
    maker.backend.sample(plan)
    assert len(slept) == 1
