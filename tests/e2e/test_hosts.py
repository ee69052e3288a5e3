"""A fleet on two hosts, 20 ms apart: one has the nats-server, Redis and all services, the other one joins.

A small random model computes on both, the same ids in any batch: a token that is lost, doubled or computed
from wrong KV shows in every id after it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache

import pytest
from redis import Redis
from support.hosts.fleet import HostFleet, host_fleet
from support.hosts.network import network
from support.kv_offload.traffic import PROMPT_TOKENS, Answer, Traffic, assert_same
from support.small_llama import BLOCK_BYTES, write_small_llama

from loadtest import faults
from loadtest.leaks import settle
from shared.client.client import request_all
from shared.nats import subjects
from shared.nats.bus import NatsBus

RTT_MS = 20
FULL_BLOCKS = (PROMPT_TOKENS - 1) // 16  # of a prompt; its last token is always computed
PROMPTS, ROUNDS = 4, 20
REQUESTS, ANSWER_TOKENS = 6, 64
DEATH_S = 5  # of silence, until requests are queued again
LONGEST_S = 180  # a guard against hanging
MODEL = "small-llama"
SERVICES = ("tokenizer", "scheduler", "detokenizer")


def test_hosts_are_apart_and_a_link_that_was_cut_loses_no_connection() -> None:
    with network("alpha", "beta", rtt_ms=RTT_MS) as net:
        alpha, beta = net.hosts
        assert (alpha.run("hostname"), beta.run("ls", "-A", "/dev/shm")) == ("alpha\n", "")

        async def echo() -> list[float]:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(await reader.read(100))
                writer.write(await reader.read(100))
                writer.close()

            server = await asyncio.start_server(serve, alpha.address, 7)
            seconds = await asyncio.to_thread(beta.inside, ask)
            server.close()
            return seconds

        async def ask() -> list[float]:
            reader, writer = await asyncio.open_connection(alpha.address, 7)
            seconds = []
            for cut in (False, True):
                if cut:
                    beta.cut()
                began_s = time.monotonic()
                writer.write(b"?")
                if cut:
                    await asyncio.sleep(3 * RTT_MS / 1000)
                    beta.mend()
                assert await reader.read(100) == b"?"
                seconds.append(time.monotonic() - began_s)
            writer.close()
            return seconds

        usual_s, cut_s = alpha.inside(echo)
        assert usual_s >= RTT_MS / 1000
        assert cut_s >= 3 * RTT_MS / 1000
        sleeper = beta.popen("sh", "-c", "echo; exec sleep 1000", stdout=subprocess.PIPE)
        with sleeper.stdout as output:
            assert output.readline() == b"\n", "it is there"
        assert beta.pids() == [sleeper.pid]
        beta.kill()
        assert (sleeper.wait(), beta.pids()) == (-signal.SIGKILL, [])
        assert beta.run("hostname") == "beta\n"


# ---- a fleet ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostFleet]:
    """One host only, to begin with. Device memory has room for three prompts, L1 for one, L2 for all. With KV
    in fp8 a prompt takes much longer to compute than to bring over the link."""
    folder = tmp_path_factory.mktemp("hosts")
    model = write_small_llama(folder / MODEL)
    with network("alpha", "beta", rtt_ms=RTT_MS) as net, host_fleet(net, folder) as fleet:
        fleet.start_nats()
        fleet.start_redis()
        l1 = str(-(-(FULL_BLOCKS + 4) * BLOCK_BYTES // 4 // (1 << 20)))
        fleet.args = (
            "--backend", "torch", "--dtype", "f32/fp8", "--threads", "1", "--deterministic",
            "--model", str(model), "--kv-blocks", "72", "--slots", "8", "--l1", l1, "--l2", fleet.redis_url,
        )  # fmt: skip
        fleet.up(fleet.hub, "--nats-url", fleet.nats_url, *fleet.args)
        yield fleet


@asynccontextmanager
async def traffic(fleet: HostFleet, hosts: int) -> AsyncIterator[Traffic]:
    """Requests, from the hub, once so many hosts have nothing to do."""
    bus = await NatsBus.connect(fleet.nats_url, timeout_s=LONGEST_S)
    try:
        await settled(bus, hosts)
        yield await Traffic.open(bus, MODEL, subjects.DEFAULT_TENANT)
        await settled(bus, hosts)
    finally:
        await bus.drain()


async def settled(bus: NatsBus, hosts: int) -> None:
    await settle(bus, {**dict.fromkeys(SERVICES, 1), "executor": hosts, "kv_offload": hosts}, LONGEST_S)


def on_hub(fleet: HostFleet, hosts: int, work: Callable[[Traffic], Awaitable[None]]) -> None:
    async def run() -> None:
        async with traffic(fleet, hosts) as asking:
            await work(asking)

    fleet.hub.inside(run)


async def ask_all(asking: Traffic) -> list[Answer]:
    return await asyncio.gather(*(asking.ask(i, max_tokens=ANSWER_TOKENS) for i in range(REQUESTS)))


@cache
def _reference() -> dict[int, list[int]]:
    """Filled by the first test that asks undisturbed."""
    return {}


async def reference(asking: Traffic) -> dict[int, list[int]]:
    """What an undisturbed fleet answers to each of the prompts."""
    if not _reference():
        _reference().update({answer.number: answer.ids for answer in await ask_all(asking)})
    return _reference()


async def computes(asking: Traffic, host: str, asked: asyncio.Task[list[Answer]]) -> None:
    """Return when the executor of a host has sequences of what was asked."""
    while True:
        for service in await request_all(asking.bus, subjects.STATUS, 0.3):
            if (service["kind"], service["host"]) == ("executor", host) and service["open_slots"]:
                return
        assert not asked.done(), "none of them ran there"


def test_a_host_that_joins_finds_in_l2_what_another_one_has_computed(fleet: HostFleet) -> None:
    reference: dict[int, list[int]] = {}

    async def fill(asking: Traffic) -> None:
        with Redis(host=fleet.hub.address) as redis:
            for _ in range(ROUNDS):
                for number in range(PROMPTS):
                    reference[number] = (await asking.ask(number)).ids
                if redis.dbsize() > PROMPTS * FULL_BLOCKS:  # and a few of its own
                    return
        raise AssertionError("L2 does not get what L1 has no room for")

    async def find(asking: Traffic) -> None:
        (pid,) = faults.pids_of(fleet.running[0].process.pid, "executor")
        os.kill(pid, signal.SIGSTOP)  # beta serves alone from then on
        answers = [await asking.ask(0)]
        while answers[-1].cached_tokens < FULL_BLOCKS * 16:
            assert len(answers) < ROUNDS * PROMPTS
            answers.append(await asking.ask(len(answers) % PROMPTS))
        assert_same(answers, reference)
        found = await request_all(asking.bus, subjects.STATUS, 1)
        (tier,) = (s for s in found if (s["kind"], s["host"]) == ("kv_offload", "beta"))
        print([answer.cached_tokens for answer in answers], tier["keys"]["moved"])
        assert tier["keys"]["moved"]["l2_gets"] >= FULL_BLOCKS
        faults.send(pid, signal.SIGCONT)

    on_hub(fleet, 1, fill)
    fleet.join(fleet.net.hosts[1], *fleet.args)
    on_hub(fleet, 2, find)


@pytest.mark.parametrize("seconds", [2, 9], ids=["shorter", "longer"])
def test_a_link_is_cut_for_shorter_or_longer_than_a_death_goes_unnoticed(
    fleet: HostFleet, seconds: int
) -> None:
    beta = fleet.net.hosts[1]

    async def work(asking: Traffic) -> None:
        right = await reference(asking)
        asked = asyncio.create_task(ask_all(asking))
        await computes(asking, "beta", asked)
        beta.cut()
        try:
            await asyncio.sleep(seconds)
            assert seconds > DEATH_S or not asked.done(), "its requests wait for the link"
        finally:
            beta.mend()
        assert_same(await asked, right)

    on_hub(fleet, 2, work)


def test_a_host_dies_and_its_requests_go_on(fleet: HostFleet) -> None:
    beta = fleet.net.hosts[1]

    async def work(asking: Traffic) -> None:
        right = await reference(asking)
        asked = asyncio.create_task(ask_all(asking))
        await computes(asking, "beta", asked)
        beta.kill()
        assert_same(await asked, right)
        await settled(asking.bus, 1)
        await asyncio.to_thread(fleet.join, beta, *fleet.args)

    on_hub(fleet, 2, work)
    shown = json.loads(fleet.command(beta, "status", "--json"))["services"]
    assert sorted(s["host"] for s in shown if s["kind"] == "executor") == ["alpha", "beta"]
    table = fleet.command(beta, "status")
    assert "alpha" in table
    assert "beta" in table
