"""The broker's faults on request, and what only it promises. The rest is tests/contract/test_bus.py."""

from __future__ import annotations

import asyncio

import pytest
from support.memory_bus import MemoryBroker

from shared.nats.interface import BusFault, Delivery


async def collect(broker: MemoryBroker, pattern: str) -> list[str]:
    got: list[str] = []
    await broker.connect().subscribe(pattern, lambda d: got.append(d.data.decode()))
    return got


def publish(broker: MemoryBroker, *messages: str) -> None:
    bus = broker.connect()
    for message in messages:
        bus.publish(f"t.{message}", message.encode())


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda b: b.drop("t.b"), "acab"),
        (lambda b: b.drop("t.*", times=3), "ab"),
        (lambda b: b.duplicate("t.b"), "abbcab"),
        (lambda b: b.duplicate("t.>", times=2), "aabbcab"),
        (lambda b: b.delay("t.b", by=1), "acbab"),
        (lambda b: b.delay("t.a", by=2), "bcaab"),
        (lambda b: b.delay("t.a", by=99), "bcaba"),
        (lambda b: b.drop("t.x"), "abcab"),
        (lambda b: b.drop("t.b.c"), "abcab"),
        (lambda b: b.drop("t"), "abcab"),
    ],
)
async def test_faults_hit_the_next_messages_that_match(fault: object, expected: str) -> None:
    broker = MemoryBroker()
    got = await collect(broker, "t.*")
    assert callable(fault)
    fault(broker)
    publish(broker, "a", "b", "c", "a", "b")
    await broker.settle()
    assert "".join(got) == expected


async def test_messages_on_the_way_do_not_shorten_a_delay() -> None:
    broker = MemoryBroker()
    got = await collect(broker, "t.*")
    broker.delay("t.b", by=1)
    publish(broker, "a", "b")
    for _ in range(5):
        await asyncio.sleep(0)
    assert got == ["a"], "b waits for a later message"
    publish(broker, "c")
    for _ in range(5):
        await asyncio.sleep(0)
    assert got == ["a", "c", "b"]


async def test_a_failing_handler_does_not_stop_the_others() -> None:
    broker, errors = MemoryBroker(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def fail(delivery: Delivery) -> None:
        raise RuntimeError("handler")

    await broker.connect().subscribe("t.a", fail)
    got = await collect(broker, "t.*")
    publish(broker, "a", "b")
    await broker.settle()
    assert got == ["b"]
    assert [str(e) for e in errors] == ["handler"]


async def test_request_leaves_no_subscription() -> None:
    broker = MemoryBroker()
    bus, server = broker.connect(), broker.connect()
    await server.subscribe("echo", lambda d: server.publish(d.reply, d.data))
    for _ in range(3):
        assert (await bus.request("echo", b"x", timeout_us=1_000_000)).data == b"x"
    assert len(broker.subscriptions) == 1
    assert bus._mine == []


async def test_faults_are_reported_to_the_caller() -> None:
    bus, reported = MemoryBroker().connect(), []
    bus.on_fault(reported.append)
    fault = BusFault("overflow", "t.a")
    bus.report(fault)
    assert reported == [fault]
    assert bus.backlog_bytes == 0


async def test_drain_delivers_then_unsubscribes_once_and_for_all() -> None:
    broker = MemoryBroker()
    bus, got = broker.connect(), []
    subscription = await bus.subscribe("t.*", got.append)
    publish(broker, "a")
    await bus.drain()
    await bus.drain()
    await subscription.cancel()
    publish(broker, "b")
    await broker.settle()
    assert [d.data for d in got] == [b"a"]
    assert broker.subscriptions == []
