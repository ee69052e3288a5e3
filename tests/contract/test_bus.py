"""What every Bus promises, held over MemoryBus and over NatsBus with a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared.errors import PayloadTooLarge
from shared.nats.interface import Bus, Delivery, NoResponders, RequestTimeout

Connect = Callable[[], Awaitable[Bus]]


class Inbox:
    """Collects deliveries and wakes the waiter for a number of them."""

    def __init__(self) -> None:
        self.got: list[Delivery] = []
        self._changed = asyncio.Event()

    def __call__(self, delivery: Delivery) -> None:
        self.got.append(delivery)
        self._changed.set()

    async def wait_for(self, count: int) -> list[Delivery]:
        async with asyncio.timeout(60):
            while len(self.got) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.got


async def test_one_wildcard_keeps_the_order_of_the_calls(connect: Connect, fleet: str) -> None:
    sender, receiver, inbox = await connect(), await connect(), Inbox()
    await receiver.subscribe(f"{fleet}.in.*", inbox)
    await receiver.flush()
    for i in range(2000):
        sender.publish(f"{fleet}.in.{'abc'[i % 3]}", b"%d" % i)
    got = await inbox.wait_for(2000)
    assert [(d.subject[-1], int(d.data)) for d in got] == [("abc"[i % 3], i) for i in range(2000)]


async def test_a_star_is_one_token_and_an_arrow_is_the_rest(connect: Connect, fleet: str) -> None:
    bus, star, arrow = await connect(), Inbox(), Inbox()
    await bus.subscribe(f"{fleet}.*.c", star)
    await bus.subscribe(f"{fleet}.a.>", arrow)
    await bus.flush()
    for tail in ("a.c", "b.c", "c", "a", "a.b.c", "a.c.d"):
        bus.publish(f"{fleet}.{tail}", b"")
    await bus.flush()
    await arrow.wait_for(3)
    assert [d.subject.removeprefix(fleet) for d in star.got] == [".a.c", ".b.c"]
    assert [d.subject.removeprefix(fleet) for d in arrow.got] == [".a.c", ".a.b.c", ".a.c.d"]


async def test_another_connection_is_one_of_the_same_broker(connect: Connect, fleet: str) -> None:
    bus, inbox = await connect(), Inbox()
    other = await bus.another("two", 5)
    assert other.user == bus.user
    await other.subscribe(fleet, inbox)
    await other.flush()
    bus.publish(fleet, b"x")
    assert [d.data for d in await inbox.wait_for(1)] == [b"x"]
    await other.drain()
    bus.publish(fleet, b"y")
    await bus.flush()
    assert len(inbox.got) == 1


async def test_publishing_does_not_run_handlers(connect: Connect, fleet: str) -> None:
    bus, inbox = await connect(), Inbox()
    await bus.subscribe(fleet, inbox)
    await bus.flush()
    bus.publish(fleet, b"x")
    assert inbox.got == []
    assert [d.data for d in await inbox.wait_for(1)] == [b"x"]


async def test_a_queue_group_shares_and_others_get_everything(connect: Connect, fleet: str) -> None:
    sender, members, watcher = await connect(), [Inbox(), Inbox()], Inbox()
    for member in members:
        await (await connect()).subscribe(fleet, member, queue="workers")
    bus = await connect()
    await bus.subscribe(fleet, watcher)
    await bus.flush()
    for i in range(200):
        sender.publish(fleet, b"%d" % i)
    await watcher.wait_for(200)
    async with asyncio.timeout(60):
        while len(members[0].got) + len(members[1].got) < 200:
            await sender.flush()
    shared = sorted(int(d.data) for member in members for d in member.got)
    assert shared == list(range(200))
    assert all(member.got for member in members)


async def test_request_and_reply_with_headers(connect: Connect, fleet: str) -> None:
    asker, answerer = await connect(), await connect()

    def answer(delivery: Delivery) -> None:
        text = delivery.data + delivery.headers["Question"].encode()
        answerer.publish(delivery.reply, text, headers={"Answer": "yes: it is", "Other": "2"})

    await answerer.subscribe(fleet, answer)
    await answerer.flush()
    got = await asker.request(fleet, b"is it? ", timeout_us=5_000_000, headers={"Question": "Q 1"})
    assert got.data == b"is it? Q 1"
    assert dict(got.headers) == {"Answer": "yes: it is", "Other": "2"}
    assert not got.has_no_responders


async def test_requests_in_flight_get_their_own_replies(connect: Connect, fleet: str) -> None:
    asker, answerer, waiting = await connect(), await connect(), Inbox()
    await answerer.subscribe(fleet, waiting)
    await answerer.flush()
    asked = [asyncio.create_task(asker.request(fleet, b"%d" % i, timeout_us=5_000_000)) for i in range(20)]
    for delivery in reversed(await waiting.wait_for(20)):
        answerer.publish(delivery.reply, delivery.data * 2)
    assert [int((await a).data) for a in asked] == [int(f"{i}{i}") for i in range(20)]


async def test_a_request_follows_what_was_published_before_it(connect: Connect, fleet: str) -> None:
    asker, answerer, inbox = await connect(), await connect(), Inbox()

    def answer(delivery: Delivery) -> None:
        inbox(delivery)
        if delivery.reply:
            answerer.publish(delivery.reply, b"%d" % len(inbox.got))

    await answerer.subscribe(fleet, answer)
    await answerer.flush()
    for i in range(50):
        asker.publish(fleet, b"%d" % i)
    assert (await asker.request(fleet, b"", timeout_us=5_000_000)).data == b"51"


async def test_request_fails_at_once_when_no_service_subscribes(connect: Connect, fleet: str) -> None:
    bus = await connect()
    with pytest.raises(NoResponders, match=f"nothing listens to {fleet}"):
        await bus.request(fleet, b"", timeout_us=60_000_000)


async def test_request_times_out_when_no_service_answers(connect: Connect, fleet: str) -> None:
    bus = await connect()
    await bus.subscribe(fleet, Inbox())
    await bus.flush()
    with pytest.raises(RequestTimeout, match=rf"no answer on {fleet} within 0\.02 s"):
        await bus.request(fleet, b"", timeout_us=20_000)


async def test_dead_reply_inbox_is_named_in_the_error(connect: Connect, fleet: str) -> None:
    bus, gone, alive = await connect(), Inbox(), Inbox()
    await bus.subscribe(f"_R.{fleet}.*", gone)
    living, dead = bus.new_inbox(), bus.new_inbox()
    assert living != dead
    await bus.subscribe(living, alive)
    await bus.flush()
    bus.publish(living, b"frame", reply=f"_R.{fleet}.one")
    bus.publish(dead, b"frame", reply=f"_R.{fleet}.two", headers={"Some": "header"})
    (fault,) = await gone.wait_for(1)
    assert fault.has_no_responders
    assert fault.subject == f"_R.{fleet}.two"
    assert fault.headers["Nats-Subject"] == dead
    assert [(d.data, d.has_no_responders) for d in await alive.wait_for(1)] == [(b"frame", False)]


async def test_an_empty_message_is_no_503(connect: Connect, fleet: str) -> None:
    bus, inbox = await connect(), Inbox()
    await bus.subscribe(fleet, inbox)
    await bus.flush()
    bus.publish(fleet, b"")
    assert [(d.data, d.reply, dict(d.headers), d.has_no_responders) for d in await inbox.wait_for(1)] == [
        (b"", "", {}, False)
    ]


async def test_a_payload_over_the_limit_is_refused_by_name(connect: Connect, fleet: str) -> None:
    bus, inbox = await connect(), Inbox()
    await bus.subscribe(fleet, inbox)
    await bus.flush()
    assert bus.max_payload == 8 * 1024 * 1024
    with pytest.raises(
        PayloadTooLarge, match="over the server's limit of 8388608: send less, or raise max_payload"
    ):
        bus.publish(fleet, bytes(bus.max_payload + 1))
    bus.publish(fleet, bytes(bus.max_payload))
    assert len((await inbox.wait_for(1))[0].data) == 8 * 1024 * 1024


async def test_headers_count_for_the_limit(connect: Connect, fleet: str) -> None:
    bus, inbox = await connect(), Inbox()
    await bus.subscribe(fleet, inbox)
    await bus.flush()
    frame = len(b"NATS/1.0\r\nA: b\r\n\r\n")
    with pytest.raises(PayloadTooLarge, match="8388609 bytes"):
        bus.publish(fleet, bytes(bus.max_payload - frame + 1), headers={"A": "b"})
    bus.publish(fleet, bytes(bus.max_payload - frame), headers={"A": "b"})  # the server still takes it
    assert len((await inbox.wait_for(1))[0].data) == 8 * 1024 * 1024 - frame


async def test_cancelled_subscriptions_are_silent_and_cancel_twice(connect: Connect, fleet: str) -> None:
    bus, first, second = await connect(), Inbox(), Inbox()
    subscription = await bus.subscribe(fleet, first)
    await bus.subscribe(fleet, second)
    await bus.flush()
    bus.publish(fleet, b"1")
    await first.wait_for(1)
    await subscription.cancel()
    await subscription.cancel()
    bus.publish(fleet, b"2")
    await second.wait_for(2)
    assert [d.data for d in first.got] == [b"1"]


async def test_drain_delivers_what_is_published_and_comes_twice(connect: Connect, fleet: str) -> None:
    sender, receiver, inbox = await connect(), await connect(), Inbox()
    await receiver.subscribe(fleet, inbox)
    await receiver.flush()
    for i in range(500):
        sender.publish(fleet, b"%d" % i)
    await asyncio.gather(sender.drain(), sender.drain())
    await sender.drain()
    assert sender.backlog_bytes == 0
    await receiver.drain()
    assert [int(d.data) for d in inbox.got] == list(range(500))


async def test_a_handler_may_reply_while_its_bus_drains(connect: Connect, fleet: str) -> None:
    asker, answerer = await connect(), await connect()
    await answerer.subscribe(fleet, lambda d: answerer.publish(d.reply, b"late but here"))
    await answerer.flush()
    replies = Inbox()
    await asker.subscribe(f"{fleet}.reply", replies)
    await asker.flush()
    for _ in range(100):
        asker.publish(fleet, b"", reply=f"{fleet}.reply")
    await asker.flush()
    await answerer.drain()
    assert {d.data for d in await replies.wait_for(100)} == {b"late but here"}


async def test_flush_is_a_barrier_for_subscriptions(connect: Connect, fleet: str) -> None:
    asker, answerer = await connect(), await connect()
    for i in range(100):
        await answerer.subscribe(f"{fleet}.{i}", lambda d: answerer.publish(d.reply, b"here"))
        await answerer.flush()
        assert (await asker.request(f"{fleet}.{i}", b"", timeout_us=5_000_000)).data == b"here"


@pytest.mark.parametrize("whole", [True, False], ids=["connection", "subscription"])
async def test_draining_subscriber_loses_no_message_of_its_group(
    connect: Connect, fleet: str, whole: bool
) -> None:
    sender, leaver, stayer = await connect(), await connect(), await connect()
    left, stayed = Inbox(), Inbox()
    leaves = await leaver.subscribe(fleet, left, queue="workers")
    await stayer.subscribe(fleet, stayed, queue="workers")
    await leaver.flush()
    await stayer.flush()
    leaving = None
    for i in range(4000):
        sender.publish(fleet, b"%d" % i)
        if i % 8 == 0:
            await asyncio.sleep(0)
        if i == 1000:
            leaving = asyncio.create_task(leaver.drain() if whole else leaves.drain())
    assert leaving is not None
    await leaving
    await sender.flush()
    await stayer.flush()
    got = sorted(int(d.data) for d in left.got + stayed.got)
    assert got == list(range(4000))
    assert left.got
    await leaves.drain()
