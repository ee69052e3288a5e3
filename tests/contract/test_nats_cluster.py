"""What a cluster of nats-servers with users does to a NatsBus when servers end and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import urlparse

import pytest
from nats import errors as nats_errors
from support import nats_cluster

from services.launcher.nats_server import NatsServer
from shared.errors import SetupError
from shared.nats import bus as nats_bus
from shared.nats.bus import NatsBus
from shared.nats.interface import BusFault

CLIENTS = 24


@pytest.fixture
def cluster() -> Iterator[list[NatsServer]]:
    servers = nats_cluster.start_three(users=True)
    yield servers
    for server in servers:
        server.stop()


def pool_of(bus: NatsBus) -> set[str]:
    return {each.uri.netloc for each in bus._nc._server_pool}


def netloc(server: NatsServer) -> str:
    return urlparse(nats_cluster.url_of(server)).netloc


async def until_pool(bus: NatsBus, servers: list[NatsServer]) -> None:
    async with asyncio.timeout(30):
        while pool_of(bus) != {netloc(server) for server in servers}:
            await asyncio.sleep(0.02)


async def test_the_death_of_a_server_refuses_no_client_and_the_login_goes_to_the_others(
    cluster: list[NatsServer],
) -> None:
    first, *others = cluster
    faults = list[BusFault]()
    url = nats_cluster.url_of(first)
    buses = [await NatsBus.connect(url, timeout_s=30, on_fault=faults.append) for _ in range(CLIENTS)]
    for bus in buses:
        await until_pool(bus, cluster)
    witness = await NatsBus.connect(nats_cluster.url_of(others[0]), timeout_s=30)
    await witness.subscribe("ask", lambda asked: witness.publish(asked.reply, asked.data))
    await until_pool(witness, cluster)
    first.process.kill()
    first.process.wait()
    async with asyncio.timeout(30):
        while sum(fault.kind == "reconnected" for fault in faults) < CLIENTS:
            await asyncio.sleep(0.02)
    for number, bus in enumerate(buses):
        answer = await bus.request("ask", b"%d" % number, timeout_us=20_000_000)
        assert answer.data == b"%d" % number
    assert {fault.kind for fault in faults} <= {"disconnected", "reconnected"}, faults
    await until_pool(witness, others)  # the address of the dead one has gone
    assert netloc(first) in pool_of(buses[0]), "a configured address stays"
    for bus in (*buses, witness):
        await bus.drain()


async def test_a_wrong_password_is_refused_after_a_second_try(cluster: list[NatsServer]) -> None:
    wrong = nats_cluster.url_of(cluster[0]).replace(nats_cluster.PASSWORD, "wrong")
    with pytest.raises(SetupError, match="refuses user 'all'"):
        await NatsBus.connect(wrong, timeout_s=30)


@pytest.mark.parametrize("addresses", [1, 3])
async def test_a_violation_counts_from_configured_addresses_after_a_retry(addresses: int) -> None:
    faults, got = nats_bus.Faults(), list[BusFault]()
    faults.handlers.append(got.append)
    faults.addresses, faults.opened = addresses, True
    violation = nats_errors.Error("nats: 'Authorization Violation'")
    for _ in range(20):
        await faults.on_error(violation, configured=False)
    for _ in range(addresses):
        await faults.on_error(violation)
    assert got == []
    await faults.on_error(violation)
    assert [fault.kind for fault in got] == ["refused"]
