"""An edge and its centre on hosts of their own, with all services, whose link is down for a while.

`HEADRACE_LINK_DOWN_S=30` makes the time longer than in CI.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.hosts.fleet import host_fleet
from support.hosts.network import network

from services.launcher import credentials
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan
from shared.client.client import Client, request_all
from shared.errors import Unavailable
from shared.nats import subjects
from shared.nats.bus import NatsBus

MODEL, OWN, TENANT = "smollm2-135m-instruct", "of-the-edge", "acme"
BODY = {"prompt": "Hello", "max_tokens": 8, "seed": 1}
DOWN_S = float(os.environ.get("HEADRACE_LINK_DOWN_S", "3"))
RTT_MS, REQUESTS = 20, 20
IDS = [f"r{number}" for number in range(REQUESTS)]
LONGEST_S = 180  # a guard against hanging


@pytest.mark.timeout(300)
def test_requests_submitted_while_the_link_was_down_are_done_once(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    auth.generate(there, Plan("nats://nats:4222", "default", (TENANT,), leaves=True), print)
    auth.generate(here, Plan("nats://nats:4222", "default", (TENANT,)), print)
    with network("centre", "edge", rtt_ms=RTT_MS) as net, host_fleet(net, tmp_path) as fleet:
        centre, edge = net.hosts
        address = f"{centre.address}:7422"
        above = fleet.up(centre, "--auth", str(there), "--leaves", address, HEADRACE_DURABLE="true")
        url = credentials.url_of(there, "leaf", f"nats-leaf://{address}")
        names = {"HEADRACE_MODEL_NAME": OWN, "HEADRACE_DURABLE": "true"}
        below = fleet.up(edge, "--auth", str(here), "--leaf", url, **names)

        @asynccontextmanager
        async def acme() -> AsyncIterator[Client]:
            bus = await NatsBus.connect(credentials.url_of(here, TENANT, below.nats_url), timeout_s=LONGEST_S)
            yield await Client.open(bus, TENANT)
            await bus.drain()

        async def meet() -> None:
            async with acme() as client:
                await answered(client, MODEL)

        async def ask() -> Counter[str]:
            async with acme() as client:
                ended = Counter[str]()
                await client.bus.subscribe(
                    f"headrace.v1.done.{TENANT}.*", lambda m: ended.update([m.subject.split(".")[-1]])
                )
                edge.cut()
                for request in IDS:
                    asked = {**BODY, "request_id": request}
                    stored = await client.request(subjects.submit(TENANT, MODEL), asked)
                    assert stored["status"] == "queued"
                down_s = time.monotonic()
                while time.monotonic() < down_s + DOWN_S:
                    await answered(client, OWN)
                assert not ended
                edge.mend()
                up_s = time.monotonic()
                async with asyncio.timeout(LONGEST_S):
                    while len(ended) < REQUESTS:
                        await asyncio.sleep(0.05)
                print(f"all done {time.monotonic() - up_s:.1f} s after {DOWN_S:.0f} s without the link")
                for request in IDS:
                    assert (await client.state(request))["status"] == "completed"
                return ended

        async def computed() -> int:
            bus = await NatsBus.connect(
                credentials.url_of(there, "operator", above.nats_url), timeout_s=LONGEST_S
            )
            services = await request_all(bus, subjects.STATUS, 1)
            await bus.drain()
            return sum(s["requests"] for s in services if s["kind"] == "tokenizer")

        edge.inside(meet)
        before = centre.inside(computed)
        assert edge.inside(ask) == dict.fromkeys(IDS, 1)
        assert centre.inside(computed) == before + REQUESTS


async def answered(client: Client, model: str) -> None:
    """Return once services have answered: a server and its link need a moment."""
    async with asyncio.timeout(LONGEST_S):
        while True:
            try:
                answer = await client.complete({**BODY, "model": model})
            except Unavailable:
                await asyncio.sleep(0.05)
            else:
                assert answer["model"] == model
                return
