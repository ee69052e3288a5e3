"""Fair shares: the counters, and what two backlogged clients get at 10:1 request rates."""

from __future__ import annotations

import pytest
from support.scheduler.world import World

from services.scheduler.state import requests, waiting_queue
from services.scheduler.state.policies import Policy
from services.scheduler.state.state import Limits
from services.scheduler.state.waiting_queue import INPUT_WEIGHT, OUTPUT_WEIGHT, VirtualTokenCounter
from shared.messages import Rejected

A, B = ("a", 1), ("b", 1)
PROMPT, OUTPUT, SLOTS = 12, 10, 4


def test_tokens_are_weighed() -> None:
    served = VirtualTokenCounter()
    served.charge_input(A, 10)
    served.charge_output(A, 3)
    assert (served.get(A), served.get(B)) == (16, 0)


def test_service_of_a_tenant_in_one_class_counts_in_all() -> None:
    served = VirtualTokenCounter()
    served.charge_input(("a", 0), 10)
    served.charge_output(("a", 2), 3)
    assert [served.get(("a", level)) for level in range(3)] == [16, 16, 16]
    served.lift(("b", 0), 100)  # but a client that comes back is lifted then
    assert [served.get(("b", level)) for level in range(3)] == [100, 0, 0]


def test_a_client_that_comes_back_has_no_credit() -> None:
    served = VirtualTokenCounter()
    served.charge_input(A, 100)
    served.lift(B, 100)
    assert served.get(B) == 100
    served.charge_input(B, 50)
    served.lift(B, 120)
    assert served.get(B) == 150, "but it loses nothing"


def test_forgotten_client_counts_as_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_queue, "MAX_CLIENTS", 2)
    served = VirtualTokenCounter()
    served.lift(A, 100)
    served.charge_input(B, 500)
    served.lift(("c", 1), 100)
    assert set(served.counters) == {"b", "c"}
    assert served.get(A) == 100
    served.charge_output(A, 1)
    assert served.get(A) == 102


def test_clients_that_are_ahead_of_the_others_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sends one request, and is served less than the one before: none of them is ever below the
    floor."""
    monkeypatch.setattr(waiting_queue, "MAX_CLIENTS", 10)
    served = VirtualTokenCounter()
    for i in range(100):
        served.lift((f"c{i:02}", 1), None)
        served.charge_input((f"c{i:02}", 1), 1_000 - i)
        assert len(served.counters) <= 11
    assert served.get(("c00", 1)) == 1_000, "the client that was served most is forgotten last"


def worst_gap(rank: str) -> int:
    """The largest difference of what two clients were served while both had requests waiting."""
    slo = requests.parse("interactive=0/50/0,standard=0/50/0,batch=0/50/0")
    world = World(Limits(policy=Policy(order=rank), classes=slo))
    world.add_engine(slots=SLOTS, blocks=64)
    for i in range(220):
        tenant = "b" if i % 11 == 10 else "a"
        world.ask(f"{tenant}{i}", [7 + i, *range(PROMPT - 1)], OUTPUT, tenant=tenant)
    worst = 0
    while {group.request.tokenized.tenant for group in world.scheduler.state.waiting} == {"a", "b"}:
        worst = max(worst, abs(weighed(world, "a") - weighed(world, "b")))
        world.deliver()
    return worst


def weighed(world: World, tenant: str) -> int:
    """What a client was served, from its readers: prompts that have brought a token, and tokens."""
    readers = [r for r in world.readers.values() if r.opened.tenant == tenant and r.tokens]
    return sum(INPUT_WEIGHT * PROMPT + OUTPUT_WEIGHT * len(reader.tokens) for reader in readers)


def test_two_backlogged_clients_are_served_alike() -> None:
    """2 * max(w_in * L_in, w_out * M), Sheng et al. 2024, theorem 4.4; M: the tokens of a full batch."""
    bound = 2 * max(INPUT_WEIGHT * PROMPT, OUTPUT_WEIGHT * SLOTS * (PROMPT + OUTPUT))
    assert worst_gap("vtc") <= bound
    assert worst_gap("fcfs") > 3 * bound


def test_client_that_waits_past_the_limit_of_its_class_gets_a_time_to_retry() -> None:
    slo = requests.parse("standard=5/50/0")
    world = World(Limits(classes=slo))
    world.add_engine(slots=1)
    for i in range(40):
        world.ask(f"r{i}", [5, i], 30)
    while not world.scheduler.is_idle:
        world.deliver()
        world.tick(100)
        for group in world.scheduler.state.waiting:
            assert world.now_us - group.request.arrival_us <= 5_000 + 1_000  # a tick, and events of it
    closed = [r.closed for r in world.readers.values() if r.closed is not None]
    refused = [close for close in closed if close.code]
    assert {(close.code, close.final) for close in refused} == {(429, 0)}
    assert all(close.retry_after_ms >= 1_000 for close in refused)
    assert len(closed) == 40
    assert 0 < len(refused) < 40
    world.run()
    world.assert_idle()


def test_a_rejected_request_holds_nothing() -> None:
    world = World(Limits(max_waiting=1))
    world.add_engine(slots=1)
    for name in ("runs", "waits"):
        world.ask(name, [5, 6], 9)
    state = world.scheduler.state
    pool = state.executors["e1"].pool

    def held() -> tuple[object, ...]:
        return (set(state.requests), set(state.sequences), len(state.waiting), state.waiting.queued_tokens,
                list(state.deadlines.heap), pool.free_blocks, pool.reserved, len(pool.free_slots),
                dict(state.waiting.served.counters), state.next_seq)  # fmt: skip

    before = held()
    world.ask("refused", [5, 7], 9)
    assert [(type(r), r.code, r.retry_after_ms) for r in world.rejected] == [(Rejected, 429, 1_000)]
    assert held() == before
