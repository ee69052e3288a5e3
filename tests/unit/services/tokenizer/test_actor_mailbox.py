"""Requests wait for their turn with the stamp of their arrival."""

from __future__ import annotations

import asyncio

import pytest

from services.tokenizer import actor
from services.tokenizer.actor import Mailbox
from services.tokenizer.core import Fail
from services.tokenizer.prepare import Origin
from services.tokenizer.queries import refusal_spans
from shared.clock import FakeClock
from shared.errors import Overloaded, Unavailable
from shared.nats.interface import Delivery


async def test_one_each_turn_stamped_on_arrival() -> None:
    clock, taken = FakeClock(), list[tuple[str, int]]()

    def take(delivery: Delivery, received_us: int, received_wall_us: int) -> None:
        clock.advance(1_000)  # what a request costs
        assert received_us == received_wall_us - FakeClock(0).wall_us()
        taken.append((delivery.subject, received_us))

    box = Mailbox(clock, take)
    for name in "abc":
        box.put(Delivery(name, b""))
    assert taken == [("a", 1_000_000)]
    assert len(box) == 2
    await asyncio.sleep(0)
    assert taken[1:] == [("b", 1_001_000)]
    await box.drain()
    assert taken[2:] == [("c", 1_001_000)]
    box.put(Delivery("d", b""))
    assert taken[3:] == [("d", 1_003_000)]


async def test_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "MAX_WAITING", 1)
    box = Mailbox(FakeClock(), lambda delivery, *stamps: None)
    box.put(Delivery("a", b""))
    box.put(Delivery("b", b""))
    with pytest.raises(Overloaded, match="1 requests wait for this tokenizer"):
        box.put(Delivery("c", b""))


def test_the_spans_of_a_refusal() -> None:
    origin = Origin("t", 1_000, 1_020, "0" * 16, tokenized=True)
    fail = Fail("in", "r", Unavailable("draining"), "trace", origin)
    spans = refusal_spans(fail, "m", 1_500, "tokenizer.a")
    assert [(s.name, s.start_us, s.end_us, s.parent) for s in spans] == [
        ("chat m", 1_000, 1_500, None),
        ("received", 1_000, 1_020, 0),
        ("waiting for a scheduler", 1_020, 1_500, 0),
    ]
    assert (spans[0].error, spans[0].attributes["error.type"]) == ("draining", "unavailable")
    assert spans[0].attributes["component"] == "tokenizer.a"
