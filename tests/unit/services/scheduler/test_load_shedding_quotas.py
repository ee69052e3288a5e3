"""A tenant over its quota is refused with a time; its usage is counted."""

from __future__ import annotations

from support.scheduler.world import World

from services.scheduler.state.counters import MAX_TENANTS, OTHERS, Counters, TenantUsage
from services.scheduler.state.requests import QuotasChanged
from shared.messages import Usage


def limited(*quotas: tuple[str, int, int]) -> World:
    world = World()
    world.add_engine()
    world.handle(QuotasChanged(quotas))
    return world


def test_requests_over_the_quota_wait_their_minute() -> None:
    world = limited(("acme", 2, 0))
    for i in range(3):
        world.ask(f"r{i}", [5, 6], 2, tenant="acme")
    world.ask("other", [5, 6], 2, tenant="bob")
    (refused,) = world.rejected
    assert (refused.request, refused.code) == ("r2", 429)
    assert refused.message == "the quota of 'acme', 2 requests a minute, is used up: try again in 30.0 s"
    assert 29_000 < refused.retry_after_ms <= 30_000
    assert world.scheduler.state.counters.rejected == {429: 1}
    world.run()
    world.tick(refused.retry_after_ms * 1000)
    world.ask("r3", [5, 6], 2, tenant="acme")
    assert world.accepted[-1] == "r3"


def test_tokens_of_prompt_and_answer_count() -> None:
    world = limited(("acme", 0, 10))
    world.ask("r0", [5, 6, 7], 7, tenant="acme")
    world.run()
    world.ask("r1", [5], 1, tenant="acme")
    (refused,) = world.rejected
    assert "10 tokens a minute" in refused.message


def test_a_resend_of_a_running_request_costs_nothing() -> None:
    world = limited(("acme", 1, 0))
    world.ask("r", [5, 6], 2, tenant="acme")
    world.ask("r", [5, 6], 2, tenant="acme")
    assert world.rejected == []
    assert world.accepted == ["r", "r"]


def test_usage_is_counted_by_tenant_at_the_end() -> None:
    world = limited()
    world.ask("a", [5, 6, 7], 4, tenant="acme", n=2)
    assert world.scheduler.state.counters.usage == {}
    world.run()
    world.ask("b", [5, 6, 7] * 4, 1, tenant="acme")
    world.run()
    world.ask("b2", [5, 6, 7] * 4, 1, tenant="acme")
    world.ask("c", [5], 2, tenant="bob")
    world.run()
    usage = world.scheduler.state.counters.usage
    assert usage == {"acme": TenantUsage(3, 27, 8, 10), "bob": TenantUsage(1, 1, 0, 2)}


def test_invented_tenants_are_counted_together() -> None:
    counters = Counters()
    for i in range(MAX_TENANTS + 5):
        counters.add_usage(f"t{i}", Usage(prompt_tokens=3, completion_tokens=2))
    assert len(counters.usage) == MAX_TENANTS + 1
    assert counters.usage[OTHERS] == TenantUsage(5, 15, 0, 10)
