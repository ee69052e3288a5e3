"""Durable requests on a cluster of three nats-servers, one of which dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.running_up import StartUp

from loadtest.durable import all_records, simulated, submit_all
from services.launcher import nats_server
from services.launcher.nats_server import NatsServer, ServerLimits
from shared.client import Client
from shared.errors import Unavailable
from shared.nats import subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import RequestTimeout
from shared.nats.jetstream import JetStream, StreamFull, Taken

REQUESTS = 200


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@pytest.fixture
def cluster() -> Iterator[list[NatsServer]]:
    ports = free_ports(3)
    routes = json.dumps([f"nats://127.0.0.1:{port}" for port in ports])
    limits = replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="1GB")
    servers = []
    for number, port in enumerate(ports):
        listen = f'cluster {{ name: c, listen: "127.0.0.1:{port}", routes: {routes} }}'
        servers.append(nats_server.start(limits=limits, extra=f"server_name: n{number}\n{listen}\n"))
    yield servers
    for server in servers:
        server.stop()


async def info_of(bus: NatsBus) -> dict[str, Any]:
    answer = await bus.request(f"$JS.API.STREAM.INFO.{subjects.WORK_STREAM}", b"", timeout_us=5_000_000)
    info: dict[str, Any] = json.loads(answer.data)
    return info


def test_the_leader_dies_and_every_accepted_request_has_a_record(
    cluster: list[NatsServer], start_up: StartUp
) -> None:
    url = ",".join(server.url for server in cluster)
    start_up("--durable", "--durable-replicas", "3", "--nats-url", url)
    numbered = [simulated(i) for i in range(REQUESTS)]
    replies: dict[int, dict[str, Any]] = {}

    async def submit_and_kill() -> None:
        bus = await NatsBus.connect(url, timeout_s=20)
        client = await Client.open(bus)
        submitting = asyncio.create_task(submit_all(client, numbered, replies))
        async with asyncio.timeout(60):
            while len(replies) < REQUESTS // 4:
                await asyncio.sleep(0.005)
        info = await info_of(bus)
        assert len(info["cluster"]["replicas"]) == 2
        leader = cluster[int(info["cluster"]["leader"].removeprefix("n"))]
        leader.process.kill()
        leader.process.wait()
        await submitting
        await bus.drain()

    asyncio.run(submit_and_kill())
    assert len(replies) == REQUESTS
    records, counts = asyncio.run(all_records(url, numbered, replies))
    assert {record["status"] for record in records} == {"completed"}
    assert counts == {subjects.WORK_STREAM: 0, subjects.RECORD_STREAM: REQUESTS}


async def test_another_try_while_the_first_one_is_being_stored_may_be_repeated(
    cluster: list[NatsServer],
) -> None:
    bus = await NatsBus.connect(",".join(server.url for server in cluster), timeout_s=20)
    async with asyncio.timeout(60):
        config = {"subjects": [subjects.WORK_ALL], "num_replicas": 3, "storage": "file"}
        while (leader := await leader_of_new(bus, config)) is None:
            await asyncio.sleep(0.1)
    await bus.drain()
    others = [server.process for number, server in enumerate(cluster) if number != leader]
    at_leader = await NatsBus.connect(cluster[leader].url, timeout_s=20)
    streams, subject = JetStream(at_leader, replicated=True), subjects.work("public", "r")
    for process in others:
        process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(2):
            with pytest.raises(Unavailable):  # a majority is missing
                await streams.create(subject, b"{}")
    finally:
        for process in others:
            process.send_signal(signal.SIGCONT)
    stored = False
    async with asyncio.timeout(60):
        while not stored:
            with contextlib.suppress(Unavailable):
                with contextlib.suppress(Taken):
                    await streams.create(subject, b"{}")
                stored = True
    await at_leader.drain()


async def leader_of_new(bus: NatsBus, config: dict[str, Any]) -> int | None:
    """The number of the server that leads stream WORK, which is made; None without one yet."""
    with contextlib.suppress(Unavailable, StreamFull, RequestTimeout):
        await JetStream(bus).make_stream(subjects.WORK_STREAM, config)
        if name := (await info_of(bus))["cluster"].get("leader"):
            return int(name.removeprefix("n"))
    return None
