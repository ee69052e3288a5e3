"""Durable requests on a cluster of three nats-servers, one of which dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from support import nats_cluster
from support.running_up import StartUp

from loadtest.durable import MODEL, all_records, simulated, submit_all
from services.launcher.nats_server import NatsServer
from shared.client.client import Client, NoAnswer
from shared.errors import Unavailable
from shared.nats import subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import RequestTimeout
from shared.nats.jetstream import JetStream, StreamFull, Taken

REQUESTS = 200


@pytest.fixture
def cluster() -> Iterator[list[NatsServer]]:
    servers = nats_cluster.start_three()
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def with_users() -> Iterator[list[NatsServer]]:
    servers = nats_cluster.start_three(users=True)
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


def test_the_death_of_a_server_with_users_ends_no_service(
    with_users: list[NatsServer], start_up: StartUp
) -> None:
    """The services know one address and the login; the cluster advertises the others, without it."""
    dies, lives, _ = with_users
    up = start_up("--nats-url", nats_cluster.url_of(dies))
    before = sorted(up.children())

    async def live() -> None:
        bus = await NatsBus.connect(nats_cluster.url_of(lives), timeout_s=20)
        client = await Client.open(bus)
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 4, "ignore_eos": True}
        await client.complete(body)
        dies.process.kill()
        dies.process.wait()
        answers = [client.complete({**body, "request_id": f"r{n}"}, timeout_s=60) for n in range(24)]
        done = await asyncio.gather(*answers, return_exceptions=True)
        failed = {n: each for n, each in enumerate(done) if isinstance(each, BaseException)}
        assert {type(each) for each in failed.values()} <= {NoAnswer}, failed
        for number in failed:  # the other server sent it to the dead one, before it noticed
            await client.complete({**body, "request_id": f"again{number}"}, timeout_s=60)
        await bus.drain()

    asyncio.run(live())
    assert sorted(up.children()) == before, up.log.read_text()[-4000:]


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
