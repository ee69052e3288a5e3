"""Requests that arrive before their model has an executor."""

from __future__ import annotations

import dataclasses

import pytest
from support.scheduler.world import World

from services.scheduler import lifecycle
from services.scheduler.reports import status
from services.scheduler.state import requests
from services.scheduler.state.requests import Arrived, PeerDraining
from services.scheduler.state.state import Limits
from shared.messages import Cancel, Close, Tokenized, ints

WAIT_US = 120_000_000
PROMPT = [5, 6, 7]
WAITS = Limits(cold_start_wait_us=WAIT_US, classes=requests.parse("standard=60000/100/0"))


def closed(world: World, request: str) -> Close:
    (reader,) = world.readers_of(request)
    assert reader.closed is not None
    return reader.closed


def test_request_is_refused_at_once_without_the_setting() -> None:
    world = World()
    world.ask("a", PROMPT, 4)
    assert [(r.code, r.retry_after_ms) for r in world.rejected] == [(503, 1_000)]
    world.assert_idle()


def test_a_request_waits_for_an_executor_and_is_served() -> None:
    """Longer than the limit of its class, which begins when the executor joins."""
    world = World(WAITS)
    world.ask("a", PROMPT, 4)
    world.ask("b", PROMPT, 4, n=2)
    assert world.accepted == ["a", "b"]
    state = world.scheduler.state
    assert status.awaiting_executor(state) == dict(status.load(state))["waiting"] == 2
    world.tick(WAIT_US - 1_000_000)
    assert not any(reader.closed for reader in world.readers.values())
    world.add_engine()
    assert status.awaiting_executor(state) == 0
    world.run()
    world.assert_answers("a")
    world.assert_answers("b")
    world.assert_idle()


def test_the_limit_of_the_class_holds_from_the_join_on() -> None:
    world = World(WAITS)
    world.ask("a", PROMPT, 30)
    world.ask("b", PROMPT, 4)
    world.tick(WAIT_US - 1_000_000)
    world.add_engine(slots=1)
    world.tick(59_000_000)
    assert world.readers_of("b")[0].closed is None
    world.tick(1_000_000)
    assert closed(world, "b").code == 429


@pytest.mark.parametrize("timeout_us", [WAIT_US * 2, WAIT_US // 2])
def test_the_wait_ends_with_503_or_at_the_deadline(timeout_us: int) -> None:
    world = World(WAITS)
    world.ask("a", PROMPT, 4, timeout_us=timeout_us)
    end_us = min(timeout_us, WAIT_US)
    world.tick(end_us - 1_000)
    assert world.readers_of("a")[0].closed is None
    world.tick(1_000)
    close, refused = closed(world, "a"), timeout_us > WAIT_US
    assert (close.code, close.retry_after_ms) == ((503, 1_000) if refused else (408, 0))
    assert world.scheduler.state.counters.rejected == ({503: 1} if refused else {})
    world.assert_idle()


@pytest.mark.parametrize("generated", [0, 1])
def test_a_waiting_request_of_a_dead_scheduler_waits_here(generated: int) -> None:
    """One with tokens is refused: its detokenizer looks for another scheduler."""
    world = World(WAITS)
    taken = Tokenized(
        request="a", attempt=2, tenant="public", model="m", inbox="inbox.a", timeout_us=10**9, max_tokens=4,
        tokens=ints([*PROMPT, *[9] * generated]), generated=ints([generated]), reasons=("",), age_us=5_000,
    )  # fmt: skip
    world.asked["a"] = dataclasses.replace(taken, tokens=ints(PROMPT))
    world.handle(Arrived("detokenizer.d1", taken))
    assert [r.code for r in world.rejected] == [503] * generated
    world.tick(WAIT_US - 1_000_000)
    world.add_engine()
    world.run()
    if not generated:
        world.assert_answers("a")
    world.assert_idle()


@pytest.mark.parametrize("drains", [False, True])
def test_requests_wait_when_the_last_executor_is_gone(drains: bool) -> None:
    """What it computed goes on with the next one; what had not begun waits as long as a new request."""
    world = World(WAITS)
    world.add_engine(slots=1)
    world.ask("ran", PROMPT, 12)
    world.ask("next", PROMPT, 4)
    world.ask("last", PROMPT, 4)
    world.deliver()
    world.tick(50_000_000)
    if drains:
        world.handle(PeerDraining("executor", "e1"))
    world.crash("e1")
    world.ask("new", PROMPT, 4)
    assert status.awaiting_executor(world.scheduler.state) == 4
    world.handle(Arrived(lifecycle.CLIENT, Cancel(tenant="public", request="last")))
    assert closed(world, "last").code == 499
    world.tick(WAIT_US - 1_000_000)
    world.add_engine("e2")
    world.run()
    for request in ("ran", "next", "new"):
        world.assert_answers(request)
    world.assert_idle()


def test_requests_that_have_begun_wait_until_their_own_deadline() -> None:
    world = World(WAITS)
    world.add_engine(slots=1)
    world.ask("ran", PROMPT, 12)
    world.ask("next", PROMPT, 4)
    world.deliver()
    world.crash("e1")
    world.tick(WAIT_US)
    assert closed(world, "next").code == 503
    assert world.readers_of("ran")[0].closed is None
    world.tick(10**9)
    assert closed(world, "ran").code == 408
    world.assert_idle()


def test_a_full_queue_refuses_and_a_cancelled_request_leaves_it() -> None:
    world = World(Limits(cold_start_wait_us=WAIT_US, max_waiting=2))
    for request in "abc":
        world.ask(request, PROMPT, 4)
    assert [(r.request, r.code) for r in world.rejected] == [("c", 429)]
    world.handle(Arrived(lifecycle.CLIENT, Cancel(tenant="public", request="a")))
    assert closed(world, "a").code == 499
    world.ask("d", PROMPT, 4)
    world.add_engine()
    world.run()
    world.assert_answers("b")
    world.assert_answers("d")
    world.assert_idle()


def test_whether_a_request_fits_is_checked_when_an_executor_joins() -> None:
    world = World(WAITS)
    world.ask("long", PROMPT, 4_000)
    world.ask("open", PROMPT, 4_000, open_end=True)
    world.ask("unknown", [5, 1_000], 4)
    world.ask("many", PROMPT, 4, n=5)
    world.add_engine(max_context=20)
    for request in ("long", "unknown", "many"):
        assert {reader.closed.code for reader in world.readers_of(request) if reader.closed} == {400}, request
    world.run()
    assert [len(reader.tokens) for reader in world.readers_of("open")] == [20 - len(PROMPT)]
    world.assert_idle()


def test_a_request_accepted_for_a_larger_executor_waits_for_one() -> None:
    """A smaller one that joins first does not make it a bad request."""
    world = World(WAITS)
    world.add_engine(max_context=64)
    world.ask("a", PROMPT, 12)
    world.ask("big", PROMPT, 50)
    world.crash("e1")
    world.add_engine("small", max_context=20)
    world.run()
    assert world.readers_of("big")[0].closed is None
    world.add_engine("large", max_context=64)
    world.run()
    world.assert_answers("big")
    world.assert_idle()
