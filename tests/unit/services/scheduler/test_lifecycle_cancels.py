"""A cancel is for the request that was there when it was sent, not for the next one with its id."""

from __future__ import annotations

from dataclasses import replace

from support.scheduler.world import World

from services.scheduler.lifecycle import TOMBSTONE_US
from services.scheduler.load_shedding import OVERTAKE_US
from services.scheduler.state.requests import Arrived, Ticked
from shared.messages import Cancel

CANCEL = Cancel(tenant="public", request="a")


def served(world: World) -> None:
    assert [r.code for r in world.rejected if r.code == 499] == []
    world.run()
    world.assert_answers("a")


def test_a_cancel_that_crosses_a_refusal_is_not_for_the_retry() -> None:
    world = World()
    world.ask("a", [5, 6], 3, received_wall_us=7)  # 503: there is no executor
    world.handle(Arrived("client", CANCEL))
    world.add_engine()
    world.ask("a", [5, 6], 3, received_wall_us=8)
    served(world)


def test_cancel_passed_on_by_a_service_comes_after_its_request() -> None:
    """A tokenizer has given up, and the request never came here."""
    world = World()
    world.add_engine()
    world.handle(Arrived("tokenizer.t1", CANCEL))
    world.ask("a", [5, 6], 3)
    served(world)


def test_a_cancel_is_not_for_a_request_that_came_to_its_tokenizer_later() -> None:
    """Every scheduler receives it; the retry comes to another than the one that had the request."""
    world = World()
    world.add_engine()
    world.handle(Arrived("client", CANCEL))
    world.tick(10_000_000)
    world.ask("a", [5, 6], 3, waited_us=10_000_000 - OVERTAKE_US - 1_000)
    served(world)


def test_a_cancel_waits_for_a_request_that_is_still_in_a_queue() -> None:
    world = World()
    world.add_engine()
    world.handle(Arrived("client", CANCEL))
    world.tick(TOMBSTONE_US - 1_000)
    world.ask("a", [5, 6], 3, waited_us=TOMBSTONE_US - 1_000)
    assert [r.code for r in world.rejected] == [499]
    world.handle(Arrived("client", Cancel(tenant="public", request="b")))
    world.tick(TOMBSTONE_US)
    world.handle(Ticked())
    assert not world.scheduler.state.tombstones


def test_service_that_gives_up_sends_the_error_that_its_client_got() -> None:
    """It may get the end from here, and no client has cancelled anything."""
    world = World()
    world.add_engine()
    world.ask("a", [5, 6], 3)
    world.handle(Arrived("tokenizer.t1", replace(CANCEL, code=503, message="no scheduler answers")))
    closes = [reader.closed for reader in world.readers_of("a")]
    assert [(close.code, close.message) for close in closes if close is not None] == [
        (503, "no scheduler answers")
    ]
