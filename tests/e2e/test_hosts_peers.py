"""Two hosts without an L2, 20 ms and 1 Gb/s apart: one finds in the other's L1 what that has computed.

The model and its ids are those of test_hosts.py: KV that is wrong by a bit shows in every id after it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.hosts.fleet import HostFleet, host_fleet
from support.hosts.network import Host, network
from support.kv_offload.bounds import DEADLINE_S
from support.kv_offload.traffic import PROMPT_TOKENS, Status, Traffic, assert_same, leased
from support.small_llama import BLOCK_BYTES, write_small_llama

from loadtest import faults
from loadtest.leaks import settle
from services.kv_offload.peers import nixl
from shared import codec
from shared.client.client import request_all
from shared.messages import PeerFound
from shared.nats import subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery

pytestmark = pytest.mark.skipif(not nixl.is_installed(), reason="headrace[nixl] is not installed: 241 MB")

RTT_MS, MBIT = 2, 1_000  # a read takes less time than to compute the prompt, on fast machines, too
SLOW_MBIT = 5  # a read takes 4 s, so that a busy machine cuts the link in time
SENT_BYTES = 2 * BLOCK_BYTES  # that a killed process leaves to its kernel, which sends them; by default MiBs
FULL_BLOCKS = (PROMPT_TOKENS - 1) // 16
PROMPTS = 8  # a busy machine answers some lookups too late: those prompts are computed
LONGEST_S = 180  # a guard against hanging
MODEL = "small-llama"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostFleet]:
    """Two hosts that have met. Device memory has room for five prompts, L1 for all."""
    folder = tmp_path_factory.mktemp("hosts")
    model = write_small_llama(folder / MODEL)
    with network("alpha", "beta", rtt_ms=RTT_MS) as net, host_fleet(net, folder) as fleet:
        net.link(*net.hosts, rtt_ms=RTT_MS, mbit=MBIT)
        for host in net.hosts:
            host.run("sh", "-c", f"echo 4096 65536 {SENT_BYTES} >/proc/sys/net/ipv4/tcp_wmem")
        fleet.start_nats()
        fleet.args = (
            "--backend", "torch", "--dtype", "f32", "--threads", "1", "--deterministic",
            "--model", str(model), "--kv-blocks", "112", "--slots", "8", "--l1", "64",
        )  # fmt: skip
        tcp = {"UCX_TLS": "tcp,self"}  # these hosts share a kernel, so UCX would find something faster
        fleet.up(fleet.hub, "--nats-url", fleet.nats_url, *fleet.args, **tcp)
        fleet.join(net.hosts[1], *fleet.args, **tcp)
        yield fleet


@asynccontextmanager
async def traffic(fleet: HostFleet) -> AsyncIterator[Traffic]:
    bus = await NatsBus.connect(fleet.nats_url, timeout_s=LONGEST_S)
    kinds = {**dict.fromkeys(("tokenizer", "scheduler", "detokenizer"), 1), "executor": 2, "kv_offload": 2}
    try:
        await settle(bus, kinds, LONGEST_S)
        asking = await Traffic.open(bus, MODEL, subjects.DEFAULT_TENANT)
        for host in ("alpha", "beta"):
            await tier(asking, host, met)
        yield asking
        await settle(bus, kinds, LONGEST_S)
        for host in ("alpha", "beta"):
            await tier(asking, host, lambda s: met(s) and not s["peers"]["open"] and not any(leased(s)))
    finally:
        await bus.drain()


def on_hub(fleet: HostFleet, work: Callable[[Traffic], Awaitable[None]]) -> None:
    async def run() -> None:
        async with traffic(fleet) as asking:
            await work(asking)

    fleet.hub.inside(run)


async def tier(asking: Traffic, host: str, true: Callable[[Status], bool]) -> Status:
    """The status of a host's kv_offload, once a condition on it holds."""
    async with asyncio.timeout(LONGEST_S):
        while True:
            for service in await request_all(asking.bus, subjects.STATUS, 0.2):
                if (service["kind"], service["host"]) == ("kv_offload", host) and true(service):
                    return service


def received_bytes(host: Host) -> int:
    """What has come to a host."""
    text = Path(f"/proc/{host.pid}/net/dev").read_text()
    return int(text.partition("eth0:")[2].split()[0])


async def fill(asking: Traffic, host: str, prompts: range) -> dict[int, list[int]]:
    """The ids of prompts that the only executor computes. Some of their blocks are in L1 of its host then."""
    before = (await tier(asking, host, met))["keys"]["moved"]["stored"]
    ids = {}
    for number in prompts:
        for _ in range(2):  # blocks that are never asked for again are not stored
            ids[number] = (await asking.ask(number)).ids
    await tier(asking, host, lambda s: s["keys"]["moved"]["stored"] >= before + FULL_BLOCKS)
    return ids


def met(service: Status) -> bool:
    return service.get("peers", {}).get("readable") == 1


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """Without this process; the other host serves alone."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        faults.send(pid, signal.SIGCONT)


def test_a_host_reads_the_blocks_that_another_one_has_in_l1(fleet: HostFleet) -> None:
    alpha, beta = (faults.pids_of(up.process.pid, "executor")[0] for up in fleet.running)

    async def work(asking: Traffic) -> None:
        async with stopped(beta):
            reference = await fill(asking, "alpha", range(PROMPTS))
        async with stopped(alpha):
            answers = []
            for number in range(PROMPTS):
                answers.append(await asking.ask(number))
                if answers[-1].cached_tokens == FULL_BLOCKS * 16:
                    break
        assert_same(answers, reference)
        found = await tier(asking, "beta", met)
        print([answer.cached_tokens for answer in answers], found["peers"])
        assert answers[-1].cached_tokens == FULL_BLOCKS * 16
        assert found["peers"]["gets"] >= FULL_BLOCKS
        assert found["peers"]["bytes"] == found["peers"]["gets"] * BLOCK_BYTES
        assert found["peers"]["corrupt"] == 0

    on_hub(fleet, work)


@pytest.mark.parametrize("death", ["killed", "cut off"])
def test_the_peer_is_gone_in_the_middle_of_a_read(fleet: HostFleet, death: str) -> None:
    alpha, beta = (faults.pids_of(up.process.pid, "executor")[0] for up in fleet.running)
    (owner,) = faults.pids_of(fleet.running[1].process.pid, "kv_offload")
    reader, other = fleet.net.hosts
    first = 100 if death == "killed" else 200
    prompts = range(first, first + PROMPTS)
    gone = asyncio.Event()

    async def end() -> None:
        fleet.net.link(reader, other, rtt_ms=RTT_MS, mbit=SLOW_MBIT)
        began = received_bytes(reader)
        while received_bytes(reader) < began + 3 * BLOCK_BYTES:
            await asyncio.sleep(0)
        if death == "killed":
            os.kill(owner, signal.SIGKILL)
        else:
            other.cut()
        gone.set()

    async def work(asking: Traffic) -> None:
        async with stopped(alpha):
            reference = await fill(asking, "beta", prompts)
        ending: list[asyncio.Task[None]] = []

        def on_message(delivery: Delivery) -> None:
            if delivery.subject.endswith(".PeerFound") and not ending:
                found = codec.decode(delivery.data).message
                if isinstance(found, PeerFound) and found.lease_us and len(found.offsets) > 6:
                    ending.append(asyncio.create_task(end()))

        async with stopped(beta):
            cold_s = max([(await asking.ask(first + n)).first_s for n in (51, 52, 53)])
            asking.on_message = on_message
            answers = []
            for number in prompts:
                answers.append(await asking.ask(number))
                if gone.is_set():
                    break
            assert gone.is_set(), ("no read began", answers)
            found = await tier(asking, "alpha", lambda s: not s["peers"]["open"])
            other.mend()
            fleet.net.link(reader, other, rtt_ms=RTT_MS, mbit=MBIT)
        assert_same(answers, reference)
        print(cold_s, [(answer.cached_tokens, answer.first_s) for answer in answers], found["peers"])
        assert answers[-1].cached_tokens < FULL_BLOCKS * 16, "computed instead"
        assert answers[-1].first_s <= 3 * cold_s + DEADLINE_S
        assert found["peers"]["corrupt"] == 0

    on_hub(fleet, work)
