"""The chance that a block is used again: by tenant, by tokens, for a bounded number of tenants."""

from __future__ import annotations

from services.scheduler.state.reuse import MOST_TENANTS, PRIOR_PM, Reuse


def test_chance_is_the_prior_of_a_tenant_without_prompts() -> None:
    assert Reuse().chance_pm("new") == PRIOR_PM
    assert Reuse().mean_pm == Reuse().most_pm == PRIOR_PM


def test_chance_of_a_tenant_does_not_move_with_the_prompts_of_another() -> None:
    reuse = Reuse()
    for _ in range(100):
        reuse.add("agents", 39_000, 40_000)
        reuse.add("chats", 0, 700)
    assert 970 <= reuse.chance_pm("agents") <= 975
    assert reuse.chance_pm("chats") <= 10
    assert reuse.most_pm == reuse.chance_pm("agents")


def test_chance_counts_tokens_not_prompts() -> None:
    reuse = Reuse()
    for _ in range(100):
        reuse.add("both", 40_000, 40_000)
        reuse.add("both", 0, 400)
    assert reuse.chance_pm("both") > 980


def test_chance_follows_a_change_within_sixteen_prompts() -> None:
    reuse = Reuse()
    for _ in range(100):
        reuse.add("t", 1_000, 1_000)
    for _ in range(16):
        reuse.add("t", 0, 1_000)
    assert 300 < reuse.chance_pm("t") < 400  # (15/16)^16


def test_tenants_are_bounded_and_the_silent_one_is_forgotten() -> None:
    reuse = Reuse()
    for number in range(MOST_TENANTS):
        reuse.add(f"t{number}", 0, 10_000)
    reuse.add("t0", 0, 10_000)
    reuse.add("another", 0, 10_000)
    assert len(reuse.tenants) == MOST_TENANTS
    assert "t0" in reuse.tenants
    assert reuse.chance_pm("t1") == PRIOR_PM
