"""The baselines: what each decides, and what it asks of the scheduler around it."""

from __future__ import annotations

import pytest

from loadtest import policies
from services.scheduler.state.policies import BatchingView, OffloadView, Policy, StepShare, parse


@pytest.mark.parametrize(
    ("view", "share"),
    [(BatchingView(3, 2, 0), StepShare(False, "whole")), (BatchingView(3, 0, 0), StepShare(True, "whole"))],
)
def test_a_static_batch_computes_all_its_prompts_first(view: BatchingView, share: StepShare) -> None:
    assert policies.static(view) == share


def test_reservation_policies_reserve_these_blocks() -> None:
    sizes = [(3, 20, 4), (4, 20, 4), (20, 20, 4)]
    assert [policies.greedy(*size) for size in sizes] == [1, 2, 5]
    assert [policies.by_chunk(*size) for size in [*sizes, (3_000, 4_000, 16)]] == [1, 2, 5, 64]


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("pressed", [True, False])
def test_offload_policy_decides_about_a_block(paused: bool, pressed: bool) -> None:
    view = OffloadView(paused, pressed, idle=True, chance_pm=1_000, copy_us=100, recompute_us=101)
    assert policies.recompute(view) == policies.forget(view) == "drop"
    assert policies.swap(view) == ("copy" if paused else "drop" if pressed else "keep")


@pytest.mark.parametrize(
    ("text", "traits"),
    [
        ("batching=loadtest.policies:static", {"closed"}),
        ("reservation=loadtest.policies:greedy", {"greedy"}),
        ("reservation=loadtest.policies:by_chunk", {"greedy"}),
        ("victim=loadtest.policies:least_computed", set()),
        ("tier=loadtest.policies:swap", {"leaves"}),
        ("tier=loadtest.policies:recompute", {"no_tiers"}),
        ("tier=loadtest.policies:forget", {"no_tiers", "forgets"}),
    ],
)
def test_traits_equal_the_functions_traits(text: str, traits: set[str]) -> None:
    policy, plain = parse(text), Policy()
    names = ("fair", "closed", "greedy", "looks_ahead", "no_tiers", "forgets", "leaves", "ahead")
    changed = {name for name in names if getattr(policy, name) != getattr(plain, name)}
    assert changed == traits | ({"ahead"} if text.startswith("tier=") else set())
