"""An actor's mailbox: incarnations, lost and damaged messages, what is too long, a peer that comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.actor_fleet import INTERVAL_US, Fleet, Recorder, cancel, watched_fleet
from support.memory_bus import MemoryBus

from shared import codec
from shared.actor.mailbox import ANNOUNCEMENTS, REANNOUNCE_HEARTBEATS, RETIRED_US
from shared.actor.membership import MISSED_HEARTBEATS
from shared.codec import Envelope
from shared.errors import PayloadTooLarge
from shared.messages import Accepted, Heartbeat, Message, Open, Resend, StreamReset, ints
from shared.nats.interface import BusFault


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with watched_fleet() as fleet:
        yield fleet


async def test_a_new_incarnation_is_announced_before_its_messages(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    fleet.put(Envelope("scheduler.s", 5, 1, cancel("a")))
    fleet.put(Envelope("scheduler.s", 6, 1, cancel("b")))
    fleet.put(Envelope("scheduler.s", 5, 2, cancel("late")))
    await fleet.broker.settle()
    assert [t for t in actor.events if t[0] in ("receive", "restart")] == [
        ("receive", "a"),
        ("restart", "scheduler.s"),
        ("receive", "b"),
    ]
    assert runtime.mailbox.epoch_of("scheduler.s") == 6
    assert runtime.mailbox.epoch_of("scheduler.nobody") == 0


async def test_a_heartbeat_of_a_new_incarnation_announces_it_as_well_and_only_once(fleet: Fleet) -> None:
    actor = Recorder()
    await fleet.started(actor)
    await fleet.started(Recorder("scheduler"), "s")
    again = await fleet.started(Recorder("scheduler"), "s")
    fleet.put(Envelope("scheduler.s", again.mailbox.epoch, 1, cancel("a")))
    old = Heartbeat(kind="scheduler", actor="s", host_id="h", state="draining")
    fleet.outside.publish("hr.f.beat.scheduler.s", codec.encode(Envelope("scheduler.s", 1, 0, old)))
    await fleet.broker.settle()
    assert actor.of("restart") == ["scheduler.s"]
    assert actor.of("receive") == ["a"]
    assert actor.of("peer").count("scheduler.s draining") == 0


async def test_messages_outside_a_stream_need_no_order(fleet: Fleet) -> None:
    actor = Recorder()
    await fleet.started(actor)
    fleet.put(Envelope("client.c", 1, 0, cancel("a")))
    fleet.put(Envelope("client.c", 1, 0, cancel("a")))
    await fleet.broker.settle()
    assert actor.of("receive") == ["a", "a"]


async def test_junk_in_the_mailbox_is_counted_and_dropped(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = await fleet.started(Recorder())
    fleet.outside.publish("hr.f.executor.a.in.Junk", b"junk")
    parts = list(codec.split(long_open()))
    fleet.put(Envelope("scheduler.s", 1, 1, parts[1]))
    await fleet.broker.settle()
    assert runtime.mailbox.wire_errors == 2
    assert "dropped 4 bytes on hr.f.executor.a.in.Junk" in caplog.text
    assert "dropped a message of scheduler.s: part 1 of Open does not follow" in caplog.text


async def test_halves_of_two_messages_are_never_joined(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    first, second = codec.split(long_open())
    fleet.put(Envelope("scheduler.s", 1, 1, first))
    fleet.put(Envelope("scheduler.s", 1, 0, StreamReset(next_seq=4, lost=True)))
    fleet.put(Envelope("scheduler.s", 1, 4, second))
    fleet.put(Envelope("scheduler.s", 1, 5, cancel("next")))
    await fleet.broker.settle()
    assert actor.of("lost") == ["scheduler.s"]
    assert actor.of("receive") == ["next"]
    assert runtime.mailbox.wire_errors == 1


async def test_returning_peer_gets_the_announcement_of_its_stream_again(fleet: Fleet) -> None:
    """The lost tail and all its announcements were lost: without another, the loss would stay unknown."""
    sender = await fleet.started(Recorder("scheduler"), "s")
    actor = Recorder()
    receiver = await fleet.started(actor)
    sender.mailbox.send("executor.a", cancel("one"))
    await fleet.broker.settle()
    fleet.broker.drop("hr.f.executor.a.in.*", times=1 + ANNOUNCEMENTS)
    sender.mailbox.send("executor.a", cancel("two"))
    for _ in range(MISSED_HEARTBEATS + 1):
        fleet.clock.advance(INTERVAL_US)
        sender.send_heartbeat()
        await fleet.broker.settle()
        sender.upkeep()
        receiver.upkeep()
    await fleet.broker.settle()
    assert (actor.of("receive"), actor.of("lost")) == (["one"], [])
    receiver.send_heartbeat()
    await fleet.broker.settle()
    fleet.clock.advance(INTERVAL_US)
    sender.upkeep()
    await fleet.broker.settle()
    assert (actor.of("receive"), actor.of("lost")) == (["one"], ["scheduler.s"])


def long_open() -> Message:
    return Open(seq=1, request="r", attempt=0, tenant="t", model="m", inbox="i", tokens=ints(range(20_000)))


async def test_a_message_over_the_limit_is_refused_before_it_takes_a_number(fleet: Fleet) -> None:
    sender = await fleet.started(Recorder("scheduler"), "s")
    receiver = Recorder()
    await fleet.started(receiver)
    with pytest.raises(PayloadTooLarge):
        sender.mailbox.send("executor.a", Accepted(tenant="t", request="r" * 16_000_000, attempt=0))
    sender.mailbox.send("executor.a", cancel("next"))
    await fleet.broker.settle()
    assert receiver.of("receive") == ["next"]


async def test_a_source_that_vanished_long_ago_is_forgotten(fleet: Fleet) -> None:
    runtime = await fleet.started(Recorder())
    fleet.put(Envelope("scheduler.s", 5, 1, cancel("a")))
    await fleet.broker.settle()
    fleet.clock.advance(RETIRED_US)
    runtime.mailbox.upkeep()
    assert runtime.mailbox.epoch_of("scheduler.s") == 5
    fleet.clock.advance(1)
    runtime.mailbox.upkeep()
    assert runtime.mailbox.epoch_of("scheduler.s") == 0


async def test_stream_to_a_long_vanished_peer_is_forgotten_and_its_numbers_go_on(fleet: Fleet) -> None:
    """One comes back after all, and one is new: neither takes what is sent for something it knows."""
    sender = await fleet.started(Recorder("scheduler"), "s")
    gone, again, new = Recorder(), Recorder(), Recorder()
    runtimes = [await fleet.started(actor, name) for actor, name in ((gone, "gone"), (again, "again"))]
    for name, count in (("gone", 5), ("again", 3)):
        for i in range(count):
            sender.mailbox.send(f"executor.{name}", cancel(f"{name}{i}"))
    await fleet.broker.settle()
    fleet.clock.advance(INTERVAL_US * (MISSED_HEARTBEATS + 1) + RETIRED_US)
    sender.mailbox.peers.expire(fleet.clock.now_us())
    sender.mailbox.upkeep()
    assert not sender.mailbox._outbound
    await fleet.started(new, "new")
    runtimes[1].send_heartbeat()
    for name in ("again", "new"):
        sender.mailbox.send(f"executor.{name}", cancel("later"))
    await fleet.broker.settle()
    assert (again.of("receive"), again.of("lost")) == (
        ["again0", "again1", "again2", "later"],
        ["scheduler.s"],
    )
    assert (new.of("receive"), new.of("lost")) == (["later"], [])


async def test_a_resend_for_a_stream_that_never_was_is_answered_with_nothing(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    got: list[str] = []
    await fleet.outside.subscribe("hr.f.scheduler.s.in.*", lambda d: got.append(d.subject))
    fleet.put(Envelope("scheduler.s", 5, 0, Resend(first_seq=4)))
    await fleet.broker.settle()
    runtime.mailbox.forget("scheduler.nobody")
    assert got == []


@pytest.mark.parametrize("cut", ["sender", "receiver"])
async def test_a_tail_lost_with_its_announcements_is_repaired_on_reconnecting(fleet: Fleet, cut: str) -> None:
    """A broker that hangs for a while before it dies takes all of them along."""
    actor, sender = Recorder(), Recorder("scheduler")
    receiving = await fleet.started(actor)
    sending = await fleet.started(sender, "s")
    sending.mailbox.send("executor.a", cancel("one"))
    await fleet.broker.settle()
    fleet.broker.drop("hr.f.executor.a.in.*", times=1 + ANNOUNCEMENTS)
    sending.mailbox.send("executor.a", cancel("two"))
    for _ in range(2 * ANNOUNCEMENTS):
        await all_beat(fleet)
    assert actor.of("receive") == ["one"]
    bus = {"sender": sending, "receiver": receiving}[cut].bus
    assert isinstance(bus, MemoryBus)
    bus.report(BusFault("reconnected", "back"))
    await all_beat(fleet)
    assert actor.of("receive", "lost") == ["one", "two"]


async def test_a_tail_lost_with_its_announcements_shows_in_the_end(fleet: Fleet) -> None:
    """No reader was cut off: its mailbox overflowed, for example."""
    actor = Recorder()
    await fleet.started(actor)
    sending = await fleet.started(Recorder("scheduler"), "s")
    fleet.broker.drop("hr.f.executor.a.in.*", times=1 + ANNOUNCEMENTS)
    sending.mailbox.send("executor.a", cancel("one"))
    for _ in range(REANNOUNCE_HEARTBEATS + 1):
        await all_beat(fleet)
    assert actor.of("receive", "lost") == ["one"]


async def test_reconnecting_brings_nothing_twice(fleet: Fleet) -> None:
    actor = Recorder()
    receiving = await fleet.started(actor)
    sending = await fleet.started(Recorder("scheduler"), "s")
    for name in ("one", "two"):
        sending.mailbox.send("executor.a", cancel(name))
    await fleet.broker.settle()
    for runtime in (receiving, sending):
        assert isinstance(runtime.bus, MemoryBus)
        runtime.bus.report(BusFault("reconnected", "back"))
        await all_beat(fleet)
    assert actor.of("receive", "lost") == ["one", "two"]


async def all_beat(fleet: Fleet) -> None:
    fleet.clock.advance(INTERVAL_US)
    for runtime in fleet.runtimes:
        runtime.send_heartbeat()
    await fleet.broker.settle()
    for runtime in fleet.runtimes:
        runtime.upkeep()
    await fleet.broker.settle()


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_long_message_of_any_kind_travels_in_fragments_also_where_one_is_lost(
    fleet: Fleet, lost: int
) -> None:
    sender = await fleet.started(Recorder("scheduler"), "s")
    receiver = Recorder()
    await fleet.started(receiver)
    sender.mailbox.send("executor.a", cancel("before"))
    await fleet.broker.settle()
    if lost:
        fleet.broker.drop("hr.f.executor.a.in.*", times=lost)
    sender.mailbox.send("executor.a", cancel("x" * 200_000))
    sender.mailbox.send("executor.a", cancel("after"))
    await fleet.broker.settle()
    assert receiver.of("receive") == ["before", "x" * 200_000, "after"]
    assert receiver.of("lost") == []
