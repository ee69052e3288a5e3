"""Requests wait for their turn with the stamp of their arrival."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.virtual_loop import FakeClock

from services.tokenizer import intake
from services.tokenizer.actor import can_follow_grammars, loads
from services.tokenizer.core import Fail
from services.tokenizer.intake import Arrival, Arrivals, PendingRequest, TenantQueue
from services.tokenizer.prepare import Origin
from services.tokenizer.queries import refusal_spans
from shared.actor.membership import Peers
from shared.errors import Overloaded, Unavailable
from shared.messages import Heartbeat
from shared.nats import subjects
from shared.nats.interface import Delivery


async def test_one_each_turn_stamped_on_arrival() -> None:
    clock, taken = FakeClock(), list[tuple[str, int]]()

    def take(pending: PendingRequest) -> None:
        clock.advance(1_000)  # what a request costs
        taken.append((pending.delivery.data.decode(), pending.received_us))

    box = TenantQueue(take)
    for name in "abc":
        box.put(asked("t", name, clock.now_us()))
    assert taken == [("a", 1_000_000)]
    assert len(box) == 2
    await asyncio.sleep(0)
    assert taken[1:] == [("b", 1_001_000)]
    await box.drain()
    assert taken[2:] == [("c", 1_001_000)]
    box.put(asked("t", "d", clock.now_us()))
    assert taken[3:] == [("d", 1_003_000)]


async def test_tenants_are_taken_in_turn() -> None:
    taken: list[str] = []
    box = TenantQueue(lambda pending: taken.append(pending.delivery.data.decode()))
    for name in ("a1", "a2", "a3", "a4", "b1", "b2"):
        box.put(asked(name[0], name))
    await box.drain()
    assert taken == ["a1", "a2", "b1", "a3", "b2", "a4"]


async def test_overload_refuses_tenants_that_have_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING", 4)
    box = TenantQueue(lambda pending: None)
    for name in ("at once", "1", "2", "3", "4"):
        box.put(asked("many", name))
    with pytest.raises(Overloaded, match="4 requests wait for this tokenizer, 4 of them yours"):
        box.put(asked("many", "5"))
    for name in ("1", "2"):
        box.put(asked("few", name))
    with pytest.raises(Overloaded, match="6 requests wait for this tokenizer, 2 of them yours"):
        box.put(asked("few", "3"))
    box.put(asked("new", "1"))


async def test_invented_tenant_names_raise_the_bound_at_most_to_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING", 4)
    box = TenantQueue(lambda pending: None)
    box.put(asked("at once", "0"))
    for i in range(8):
        box.put(asked(f"t{i}", "1"))
    with pytest.raises(Overloaded, match="8 requests wait for this tokenizer, 0 of them yours"):
        box.put(asked("new", "1"))


async def test_a_tenant_that_crowds_the_scheduler_is_passed_over() -> None:
    taken, crowds = list[str](), {"a"}
    box = TenantQueue(lambda pending: taken.append(pending.delivery.data.decode()), crowds.__contains__)
    for name in ("a1", "a2", "b1", "b2"):
        box.put(asked(name[0], name))
    while len(taken) < 2:
        await asyncio.sleep(0)
    assert taken == ["b1", "b2"]
    crowds.clear()
    await box.drain()
    assert taken == ["b1", "b2", "a1", "a2"]


async def test_burst_is_read_by_tenants_in_turn_and_copies_last() -> None:
    seen: list[tuple[str, int, bool]] = []
    clock = FakeClock()

    def see(arrival: Arrival) -> None:
        seen.append((arrival.delivery.data.decode(), arrival.received_us, arrival.copied))

    arrivals = Arrivals(see, clock.now_us)
    for name in ("a1", "a2", "a3", "b1"):
        arrivals.on_copy(asked(name[0], name).delivery)
        arrivals.on_request(asked(name[0], name).delivery)
        clock.advance(5)
    assert seen == [("a1", 1_000_000, False)]
    assert len(arrivals) == 3
    await arrivals.drain()
    assert [(name, copied) for name, _, copied in seen] == [
        *((name, False) for name in ("a1", "a2", "b1", "a3")),
        *((name, True) for name in ("a1", "a2", "a3", "b1")),
    ]
    assert seen[2][1] == 1_000_015
    arrivals.on_request(asked("a", "alone").delivery)
    assert seen[-1][0] == "alone"


async def test_mailbox_is_bounded_when_messages_arrive_faster_than_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING", 3)
    monkeypatch.setattr(intake, "MAX_COPIES", 3)
    seen: list[str] = []
    arrivals = Arrivals(lambda arrival: seen.append(arrival.delivery.data.decode()), lambda: 0)
    for i in range(6):
        arrivals.on_request(asked("a", str(i)).delivery)
    assert (seen, len(arrivals)) == (["0", "4", "5"], 3)
    for i in range(10, 15):
        arrivals.on_copy(asked("a", str(i)).delivery)
    assert seen[3:] == ["10", "11"]
    await arrivals.drain()
    assert seen[5:] == ["1", "2", "3", "12", "13", "14"]


def asked(tenant: str, body: str, now_us: int = 0) -> PendingRequest:
    delivery = Delivery(subjects.generate(tenant, "m"), body.encode())
    return PendingRequest(delivery, key=0, received_us=now_us, received_wall_us=0)


def executor_beat(actor: str, model: str, load: tuple[tuple[str, int], ...]) -> Heartbeat:
    return Heartbeat(
        kind="executor", actor=actor, host_id="h", state="ready", interval_us=1, model=model, load=load
    )


@pytest.mark.parametrize(
    ("reported", "follows"),
    [([], True), ([0], False), ([0, 0], False), ([0, 1], True), ([0, None], True)],
)
def test_grammars_are_refused_if_no_executor_can_follow_them(
    reported: list[int | None], follows: bool
) -> None:
    peers = Peers()
    for number, grammars in enumerate(reported):
        load = () if grammars is None else (("grammars", grammars),)
        peers.update(1, executor_beat(f"e{number}", "m", load), 0)
    peers.update(1, executor_beat("o", "other", (("grammars", 1),)), 0)
    assert can_follow_grammars(peers, "m") is follows


@pytest.mark.parametrize(
    ("state", "model", "loading"),
    [("starting", "", True), ("starting", "m", True), ("starting", "other", False), ("ready", "m", False)],
)
def test_an_executor_that_starts_may_load_the_model(state: str, model: str, loading: bool) -> None:
    peers = Peers()
    peers.update(1, replace(executor_beat("e", model, ()), state=state), 0)
    peers.update(1, replace(executor_beat("s", "m", ()), kind="scheduler", state="starting"), 0)
    assert loads(peers, "m").loading is loading


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
