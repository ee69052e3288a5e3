"""Three hosts, 20 ms apart, with a nats-server each; two of them run all services. One of these dies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

from support.hosts.fleet import HostFleet, host_fleet
from support.hosts.network import Host, network

from loadtest.clients import Clients, mixed, oracle_key
from shared.client.client import request_all
from shared.nats import subjects
from shared.nats.bus import NatsBus

RTT_MS = 20
MODEL = "smollm2-135m-instruct"
REQUESTS, CLIENTS = 120, 24
LONGEST_S = 180  # a guard against hanging
SLOW = {"HEADRACE_SIM": "step=20000,token=20"}  # so that requests run when the host dies


async def answers(fleet: HostFleet, host: Host, victim: Host | None) -> dict[str, object]:
    """What each request answers, from a client on `host`. Two schedulers with an executor each have requests
    when all processes of `victim` die."""
    bus = await NatsBus.connect(fleet.url_of(host), timeout_s=LONGEST_S)
    clients = Clients(fleet.url_of(host), "", LONGEST_S)
    async with asyncio.timeout(LONGEST_S):
        while [len(s["executors"]) for s in await schedulers(bus)] != [1, 1]:
            pass
    running = asyncio.create_task(clients.run(mixed(random.Random(4), REQUESTS, MODEL), 0, CLIENTS))
    if victim is not None:
        while [s["running"] > 0 for s in await schedulers(bus)] != [True, True]:
            assert not running.done(), "one of them had no request"
        victim.kill()
    await running
    await bus.drain()
    ends = Counter(f"{o.end} {o.code} {o.message}".strip() for o in clients.outcomes)
    assert ends == {"answer 0": REQUESTS}
    return {oracle_key(o.ask): o.answer for o in clients.outcomes}


async def schedulers(bus: NatsBus) -> list[dict[str, object]]:
    found = await request_all(bus, subjects.STATUS, 0.3)
    return [s for s in found if s["kind"] == "scheduler" and s["state"] == "ready"]


def test_any_host_may_die(tmp_path: Path) -> None:
    with network("alpha", "beta", "gamma", rtt_ms=RTT_MS) as net, host_fleet(net, tmp_path) as fleet:
        alpha, beta, gamma = net.hosts
        fleet.start_cluster()
        ups = [fleet.up(host, "--nats-url", fleet.url_of(host), wait=False, **SLOW) for host in (alpha, beta)]
        for up in ups:
            up.read_until("^ready after")
        right = gamma.inside(lambda: answers(fleet, gamma, None))
        assert gamma.inside(lambda: answers(fleet, gamma, alpha)) == right
