"""Every service and the server, stopped for 7 s, under load, over real processes. For kills see
test_chaos_matrix.py.

The engine is simulated, its tokens depend on seed, position and the token before: a lost, doubled or
invented token changes the text, which is compared with that of an undisturbed run. Connections,
processes and beats are those of a user.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from support.running_up import Up, running_up

from loadtest import faults
from loadtest.clients import Ask, Clients, Outcome, mixed
from loadtest.leaks import settle
from shared.client.client import Client
from shared.nats.bus import NatsBus

MODEL = "smollm2-135m-instruct"
SERVICES = ("tokenizer", "scheduler", "executor", "kv_offload", "detokenizer")
EXPECTED = {**dict.fromkeys(SERVICES, 1), "tokenizer": 2, "detokenizer": 2}
PAIR = "scheduler+detokenizer"
REQUESTS, CLIENTS = 48, 16
STOPPED_S = 7.0  # longer than a death goes unnoticed: 5 s
DEADLINE_S = 60  # of a request: far longer than a stop and what follows it
BROKER_DEADLINE_S = 20  # where requests are lost with a message, and wait for the client's own limit
SETTLE_S = 120  # a guard: what is not free by then never will be
REFUSALS = {503, 408, 429}  # the answers that a request that was not accepted may get

SURVIVED = {*SERVICES, PAIR}  # every request ends by its answer


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(
        tmp_path_factory.mktemp("chaos"),
        HEADRACE_HEARTBEAT_INTERVAL_MS="1000",
        HEADRACE_SIM="step=5000,token=20",
        HEADRACE_TOKENIZERS="2",
        HEADRACE_DETOKENIZERS="2",
    ) as up:
        yield up


@asynccontextmanager
async def connected(up: Up) -> AsyncIterator[Client]:
    bus = await NatsBus.connect(up.nats_url, timeout_s=30)
    try:
        yield await Client.open(bus)
    finally:
        await bus.drain()


def asks(deadline_s: float = DEADLINE_S) -> list[Ask]:
    return mixed(random.Random(3), REQUESTS, MODEL, timeout_s=deadline_s)


@pytest.fixture(scope="module")
def undisturbed(house: Up) -> dict[int, Outcome]:
    """What each request (by its seed) answers when nothing is wrong."""

    async def run() -> list[Outcome]:
        clients = Clients(house.nats_url, "", DEADLINE_S)
        await clients.run(asks(), 0, CLIENTS)
        return clients.outcomes

    outcomes = {o.ask.body["seed"]: o for o in asyncio.run(run())}
    assert [o.end for o in outcomes.values()] == ["answer"] * REQUESTS
    assert all(len(o.texts) == o.ask.body["n"] for o in outcomes.values())
    return outcomes


async def under_load(up: Up, victim: str) -> list[Outcome]:
    """Outcomes with a stop in the middle; afterwards nothing is held, and a request works."""
    async with connected(up) as client:
        await settle(client.bus, EXPECTED, SETTLE_S)
        deadline_s = BROKER_DEADLINE_S if victim == "nats-server" else DEADLINE_S
        clients, middle = Clients(up.nats_url, "", deadline_s + 2), asyncio.Event()
        clients.on_end = lambda _: middle.set() if len(clients.ended) >= CLIENTS else None
        running = asyncio.create_task(clients.run(asks(deadline_s), 0, CLIENTS))
        await middle.wait()
        pids = [faults.pids_of(up.process.pid, each)[0] for each in victim.split("+")]
        await asyncio.gather(*(faults.stop(pid, STOPPED_S) for pid in pids))
        await running
        await settle(client.bus, EXPECTED, SETTLE_S)
        after = await client.complete({**asks()[0].body, "stream": False}, timeout_s=DEADLINE_S)
        assert after["choices"]
        assert clients.waiting == client.waiting == 0
        return clients.outcomes


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", [*SERVICES, PAIR, "nats-server"])
def test_every_request_ends(house: Up, undisturbed: dict[int, Outcome], victim: str) -> None:
    outcomes = asyncio.run(under_load(house, victim))
    ends = Counter(f"error {o.code}" if o.end == "error" else o.end for o in outcomes)
    longest_s = max(o.seconds for o in outcomes)
    print(f"{victim}: {dict(ends)}, longest {longest_s:.1f} s")
    assert sum(ends.values()) == REQUESTS
    for outcome in outcomes:
        expected = undisturbed[outcome.ask.body["seed"]]
        if outcome.end == "answer":
            assert outcome.answer == expected.answer
        elif outcome.end == "error":
            assert outcome.code in REFUSALS, outcome
            assert not outcome.accepted, outcome
        else:  # the client's own limit: only for what no service had taken charge of
            assert (victim == "nats-server", outcome.accepted) == (True, False), outcome
    if victim in SURVIVED:
        assert ends == {"answer": REQUESTS}
