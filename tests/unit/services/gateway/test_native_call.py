"""Each tenant has a connection of its own: how many there are, when they open and end, what waits in them."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlparse

import pytest
from support.memory_bus import MemoryBroker, MemoryBus

from services.gateway import native_call
from services.gateway.native_call import TenantConnections
from services.launcher import nats_server as servers
from services.launcher.nats_server import NatsServer
from shared.client.client import Client
from shared.errors import SetupError, Unavailable
from shared.nats.bus import TURN_MESSAGES, NatsBus
from shared.nats.interface import Bus, BusFault, Delivery

FLOOD = 20_000


async def lines_of(broker: MemoryBroker, *, apart: bool = True) -> TenantConnections:
    return TenantConnections(await Client.open(broker.connect()), apart)


async def test_two_tenants_have_two_connections_apart_from_the_main_one() -> None:
    lines = await lines_of(MemoryBroker())
    clients = await asyncio.gather(*(lines.client_of(tenant) for tenant in "aabba"))
    assert [client.tenant for client in clients] == [*"aabba"]
    first, second = clients[0].bus, clients[2].bus
    assert [client.bus for client in clients] == [first, first, second, second, first]
    assert len({id(bus) for bus in (first, second, lines.main.bus)}) == 3
    assert len(lines) == 2


async def test_native_calls_share_one_connection_without_keys() -> None:
    lines = await lines_of(MemoryBroker(), apart=False)
    assert (await lines.client_of("default")).bus is lines.main.bus
    assert len(lines) == 0


async def test_tenants_share_connections_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_call, "MAX_CONNECTIONS", 2)
    lines = await lines_of(MemoryBroker())
    own = [(await lines.client_of(tenant)).bus for tenant in "ab"]
    shared = {tenant: await lines.client_of(tenant) for tenant in "cdefgh"}
    assert [client.tenant for client in shared.values()] == [*"cdefgh"]
    assert {id(client.bus) for client in shared.values()} == {id(bus) for bus in own}
    assert [(await lines.client_of(tenant)).bus for tenant in shared] == [
        each.bus for each in shared.values()
    ]
    assert len(lines) == 2


async def test_an_idle_connection_is_closed_and_one_in_use_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = MemoryBroker()
    lines, before = await lines_of(broker), len(broker.subscriptions)
    asked: list[Delivery] = []
    await broker.connect().subscribe("slow", asked.append)
    client = await lines.client_of("a")
    lines.sweep()
    assert len(lines) == 1
    question = asyncio.create_task(client.request("slow"))
    await asyncio.sleep(0)
    await broker.settle()
    monkeypatch.setattr(native_call, "CONNECTION_IDLE_S", -1.0)
    lines.sweep()
    assert len(lines) == 1
    client.bus.publish(asked[0].reply, json.dumps({"b": 1}).encode())
    assert await question == {"b": 1}
    lines.sweep()
    assert len(lines) == 0
    await lines.close()
    assert len(broker.subscriptions) == before + 1
    assert (await lines.client_of("a")).bus is not client.bus


async def test_one_that_does_not_open_is_503_and_the_next_request_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = await lines_of(MemoryBroker())
    with monkeypatch.context() as broken:

        async def another(*_: Any) -> MemoryBus:
            raise SetupError("no connection to nats://secret:4222")

        broken.setattr(MemoryBus, "another", another)
        answers = await asyncio.gather(*(lines.client_of("a") for _ in range(3)), return_exceptions=True)
    assert {(type(error), getattr(error, "code", 0)) for error in answers} == {(Unavailable, 503)}
    assert all("secret" not in str(error) for error in answers)
    assert (await lines.client_of("a")).tenant == "a"


async def test_a_request_that_leaves_does_not_end_the_opening_for_others() -> None:
    lines = await lines_of(MemoryBroker())
    leaving = asyncio.create_task(lines.client_of("a"))
    staying = asyncio.create_task(lines.client_of("a"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).tenant == "a"
    assert leaving.cancelled()


async def test_one_that_ends_for_good_fails_its_own_requests_and_no_others() -> None:
    broker = MemoryBroker()
    lines = await lines_of(broker)
    await broker.connect().subscribe("slow", lambda _: None)
    first, second = await lines.client_of("a"), await lines.client_of("b")
    questions = [asyncio.create_task(client.request("slow")) for client in (first, second)]
    await asyncio.sleep(0)
    await broker.settle()
    assert isinstance(first.bus, MemoryBus)
    first.bus.report(BusFault("closed", "for good"))
    with pytest.raises(Unavailable, match="try again"):
        await questions[0]
    await asyncio.sleep(0)
    await broker.settle()
    assert not questions[1].done()
    assert (await lines.client_of("a")).bus is not first.bus
    lines.fail(Unavailable("the end"))
    with pytest.raises(Unavailable, match="the end"):
        await questions[1]
    await lines.close()
    assert len(lines) == 0


@pytest.fixture
def server() -> Iterator[NatsServer]:
    running = servers.start()
    yield running
    running.stop()


async def test_a_tenants_flood_is_not_ahead_of_another_tenants_frame(server: NatsServer) -> None:
    """All of it lies in the server and in the sockets before the gateway reads the first of it."""
    main = await NatsBus.connect(server.url, timeout_s=30)
    lines, order, done = TenantConnections(await Client.open(main), apart=True), list[str](), asyncio.Event()
    for tenant in "ab":

        def note(delivery: Delivery, tenant: str = tenant) -> None:
            order.append(tenant)
            if len(order) == FLOOD + 1:
                done.set()

        bus = (await lines.client_of(tenant)).bus
        await bus.subscribe(f"to.{tenant}", note)
        await bus.flush()
    publish(server, [*["to.a"] * FLOOD, "to.b"], *[(await lines.client_of(tenant)).bus for tenant in "ab"])
    await asyncio.wait_for(done.wait(), 60)
    assert order.index("b") < FLOOD / 10
    await lines.close()
    await main.drain()


async def test_a_connection_lets_others_have_their_turn(server: NatsServer) -> None:
    bus, turns, most, done = await NatsBus.connect(server.url, timeout_s=30), 0, 0, asyncio.Event()
    got = 0

    def count(_: Delivery) -> None:
        nonlocal got, most
        got += 1
        most = max(most, got - turns)
        if got == FLOOD:
            done.set()

    async def others() -> None:
        nonlocal turns
        while True:
            turns = got
            await asyncio.sleep(0)

    await bus.subscribe("to.a", count)
    await bus.flush()
    publish(server, ["to.a"] * FLOOD, bus)
    beside = asyncio.create_task(others())
    await asyncio.wait_for(done.wait(), 60)
    beside.cancel()
    assert most <= 2 * TURN_MESSAGES
    await bus.drain()


async def test_a_second_connection_yields_to_the_first(server: NatsServer) -> None:
    """Both bring the same messages. The first has read all of them while the second has read a part."""
    first = await NatsBus.connect(server.url)
    second = await first.another("copies", 10, TURN_MESSAGES // 8)
    read, done = Counter[str](), asyncio.Event()
    at_end = 0

    def count(which: str, _: Delivery) -> None:
        nonlocal at_end
        read[which] += 1
        if read["first"] == FLOOD and not at_end:
            at_end = read["second"]
        if read.total() == 2 * FLOOD:
            done.set()

    for bus, which in ((first, "first"), (second, "second")):
        await bus.subscribe("to.a", partial(count, which))
        await bus.flush()
    publish(server, ["to.a"] * FLOOD, first, second)
    await asyncio.wait_for(done.wait(), 60)
    assert at_end <= FLOOD // 2
    await second.drain()
    await first.drain()


def publish(server: NatsServer, to: list[str], *readers: Bus) -> None:
    """Publish to each, and return when the server has it all and each reader's socket the first of it; the
    event loop stands still meanwhile."""
    where = urlparse(server.url)
    assert where.hostname is not None
    with socket.create_connection((where.hostname, where.port or 4222)) as raw:
        raw.sendall(b'CONNECT {"verbose":false}\r\n')
        raw.sendall(b"".join(f"PUB {subject} 64\r\n{'x' * 64}\r\n".encode() for subject in to) + b"PING\r\n")
        got = b""
        while b"PONG\r\n" not in got:
            got += raw.recv(65536)
    for reader in readers:  # the server answers the publisher before it has written to the others
        assert isinstance(reader, NatsBus)
        transport: Any = reader._nc._transport
        arrived, _, _ = select.select([transport._io_writer.get_extra_info("socket").fileno()], [], [], 60)
        assert arrived
