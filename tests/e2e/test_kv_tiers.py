"""KV tiers over real processes: executors and hosts that share, values of L2 that are not what they should
be, and what goes over the network. For pauses see test_real_answers.py."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis
from support.kv_offload.traffic import (
    MOST_MESSAGE_BYTES,
    PROMPT_TOKENS,
    Answer,
    Traffic,
    assert_same,
    prompt,
    traffic_to,
)
from support.open_sockets import remote_addresses
from support.redis_process import RedisProcess
from support.running_up import Up, running_up
from support.small_llama import BLOCK_BYTES, write_small_llama

from loadtest import faults
from shared.kv_blocks import extend, root_key

SMOLLM = "smollm2-135m-instruct"
FULL_BLOCKS = (PROMPT_TOKENS - 1) // 16  # of a prompt; its last token is always computed
ENGINE = ("--backend", "torch", "--dtype", "f32", "--threads", "1")
ASKS = 20  # until L2 has answered a lookup within its 10 ms


# ---- sharing ------------------------------------------------------------------------------------


@dataclass
class Hosts:
    """Two hosts over one Redis: `near` has two executors, `far` a fleet of its own. Each L1 has room for one
    prompt, so that L2 soon holds what is computed, and device memory for two."""

    near: Up
    far: Up
    redis: RedisProcess
    model: str


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder, other = tmp_path_factory.mktemp("near"), tmp_path_factory.mktemp("far")
    model = write_small_llama(folder / "small-llama")
    engine = (*ENGINE, "--deterministic", "--model", str(model), "--kv-blocks", "48", "--slots", "8")
    l1 = str(-(-(FULL_BLOCKS + 4) * BLOCK_BYTES // (1 << 20)))
    with (
        RedisProcess() as redis,
        running_up(folder, *engine, "--executors", "2", "--l2", redis.url, HEADRACE_L1=l1) as near,
        running_up(other, *engine, "--l2", redis.url, "--host-id", "far", HEADRACE_L1=l1) as far,
    ):
        yield Hosts(near, far, redis, model.name)


@pytest.mark.timeout(120)
def test_executors_and_hosts_share_blocks_and_tenants_do_not(hosts: Hosts) -> None:
    asyncio.run(sharing(hosts))


async def sharing(hosts: Hosts) -> None:
    async with traffic_to(hosts.near, hosts.model) as near:
        await near.until(lambda found: len(found["scheduler"]["executors"]) == 2)
        first = await near.ask(0)
        assert (first.error, first.cached_tokens) == ("", 0)
        reference = {0: first.ids}
        asks = itertools.count()
        while (await near.services())["kv_offload"]["keys"]["moved"]["stored"] < FULL_BLOCKS:
            assert next(asks) < 60, "what is often asked for is stored ahead of need"
            assert not (await near.ask(0)).error
        kill_executor(hosts.near, first.request)
        second = await near.ask(0)
        assert second.cached_tokens >= FULL_BLOCKS * 16, "the second executor brings it from L1"
        assert executor_of(hosts.near, second.request) != executor_of(hosts.near, first.request)
        _, again = await stored(hosts, near, 0)
        async with (
            traffic_to(hosts.far, hosts.model) as far,
            traffic_to(hosts.far, hosts.model, "x") as stranger,
        ):
            third = [await far.ask(0)]
            while third[-1].cached_tokens < FULL_BLOCKS * 16 and len(third) < ASKS:
                await forget(far, len(third))
                third.append(await far.ask(0))
            assert third[-1].cached_tokens >= FULL_BLOCKS * 16, "the other host brings it from L2"
            assert (await far.services())["kv_offload"]["keys"]["moved"]["promotions"] > 0
            fourth = await stranger.ask(0)
            assert fourth.cached_tokens == 0, "another tenant has other keys"
        assert_same([second, *again, *third, fourth], reference)


async def forget(traffic: Traffic, time: int) -> None:
    """Other prompts take the place of what was asked for last, in device memory and in L1. A lookup in L2 has
    a short deadline, which a busy machine may miss; by the next lookup the answer has come."""
    for number in range(3):
        assert not (await traffic.ask(1000 + 3 * time + number)).error


def executor_of(up: Up, request: str) -> str:
    """On which executor a request ran."""
    return str(json.loads(up.run("trace", request, "--json").stdout)["choices"][0]["executor"])


def kill_executor(up: Up, request: str) -> None:
    """The process of the executor on which a request ran."""
    named = f"executor.{executor_of(up, request)} is ready"
    (line,) = (line for line in up.log.read_text().splitlines() if named in line)
    name = line.split()[0]
    (pid,) = (
        pid
        for pid in faults.pids_of(up.process.pid, "executor")
        if Path(f"/proc/{pid}/cmdline").read_text().split("\0").count(name)
    )
    faults.kill(pid)


async def stored(hosts: Hosts, near: Traffic, number: int) -> tuple[list[bytes], list[Answer]]:
    """Ask for a prompt until L2 holds all of it: what is often found cached is stored ahead of need. The
    names of its values, in order, and the answers."""
    answers: list[Answer] = []
    with Redis(port=hosts.redis.port) as redis:
        while len(names := names_of(redis, number)) < FULL_BLOCKS:
            assert len(answers) < 60
            answers.append(await near.ask(number))
    return names, answers


def names_of(redis: Redis, number: int) -> list[bytes]:
    """What Redis holds of a prompt of the tenant `public`, by the hash chain over its tokens."""
    found = {name.rpartition(b":")[2].decode(): name for name in redis.scan_iter(count=1000)}
    names: list[bytes] = []
    for fingerprint in {name.split(b":")[-2].decode() for name in found.values()}:  # the canary has its own
        keys: list[bytes] = []
        extend(keys, root_key(fingerprint, "public"), array("i", prompt(number)), 16, 16 * FULL_BLOCKS)
        names += [found[key.hex()] for key in keys if key.hex() in found]
    return names


# ---- values that are not what they should be ----------------------------------------------------


def flip(redis: Redis, names: list[bytes]) -> None:
    for at, name in enumerate(names):
        value = bytearray(redis.get(name))
        value[(at * 7919) % len(value)] ^= 0x10  # in a header, too
        redis.set(name, bytes(value))


def truncate(redis: Redis, names: list[bytes]) -> None:
    for name in names:
        redis.set(name, redis.get(name)[:-7])


def swap(redis: Redis, names: list[bytes]) -> None:
    values = [redis.get(name) for name in names]
    for name, value in zip(names, values[1:] + values[:1], strict=True):
        redis.set(name, value)


def replace(redis: Redis, names: list[bytes]) -> None:
    """Values of another program, shorter than a header."""
    for name in names:
        redis.set(name, b"not ours")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "damage"), list(enumerate([flip, truncate, swap, replace], 10)))
def test_a_damaged_value_is_never_used(
    hosts: Hosts, number: int, damage: Callable[[Redis, list[bytes]], None]
) -> None:
    asyncio.run(damaged(hosts, number, damage))


async def damaged(hosts: Hosts, number: int, damage: Callable[[Redis, list[bytes]], None]) -> None:
    async with traffic_to(hosts.near, hosts.model) as near:
        reference = {number: (await near.ask(number)).ids}
        names, again = await stored(hosts, near, number)
        assert_same(again, reference)
    with Redis(port=hosts.redis.port) as redis:
        damage(redis, names)
    async with traffic_to(hosts.far, hosts.model) as far:
        seen = await damaged_values(far)
        answers = [await far.ask(number)]
        assert answers[0].cached_tokens == 0
        while await damaged_values(far) == seen:
            assert len(answers) < ASKS, "what L2 holds was never looked at"
            await forget(far, number * ASKS + len(answers))
            answers.append(await far.ask(number))
        assert_same([*answers, await far.ask(number)], reference)


async def damaged_values(traffic: Traffic) -> int:
    """How many values kv_offload has found damaged, or lost."""
    store: dict[str, dict[str, dict[str, int]]] = (await traffic.services())["kv_offload"]
    return store["tiers"]["l2"]["corrupt"] + store["keys"]["asked"]["absent"]


# ---- the network --------------------------------------------------------------------------------

LONG_BLOCKS, LONG_BLOCK_TOKENS = 1_000, 8  # as many tokens as the context takes
LONG_ENGINE = ("--kv-blocks", str(LONG_BLOCKS + 100), "--block-tokens", str(LONG_BLOCK_TOKENS))
LONG = {"HEADRACE_SIM": "step=1000,token=50,block=4096", "HEADRACE_L1": "16"}


# A namespace with loopback alone.
NO_NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
INSIDE = "KV_TIERS_WITHOUT_NETWORK"


def test_control_messages_stay_small_and_no_network_connection_is_made(tmp_path: Path) -> None:
    """Prompts have as many blocks as one lookup may name; device memory holds one of them. Runs in a
    namespace without a network, unless the kernel forbids that."""
    if (
        INSIDE not in os.environ
        and subprocess.run([*NO_NETWORK, "true"], capture_output=True).returncode == 0
    ):
        name = test_control_messages_stay_small_and_no_network_connection_is_made.__name__
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"{__file__}::{name}"]
        env = {**os.environ, INSIDE: "1"}
        done = subprocess.run([*NO_NETWORK, *command], env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-4000:]
        assert "1 passed" in done.stdout
        return
    with (
        RedisProcess() as redis,
        running_up(tmp_path, *LONG_ENGINE, "--l2", redis.url, **LONG) as up,
    ):
        asyncio.run(long_prompts(up))
        pids = up.children()
        called = {address for pid in pids for address in remote_addresses(pid)}
        assert called, "services connect to the server, and kv_offload to Redis"
        assert {host for host, _ in called} == {"127.0.0.1"}, called
        assert redis.port in {port for _, port in called}


async def long_prompts(up: Up) -> None:
    async with traffic_to(up, SMOLLM) as traffic:
        for number in (1, 2, 1):
            answer = await traffic.ask(
                number, prompt=[number] * LONG_BLOCK_TOKENS * LONG_BLOCKS, max_tokens=2
            )
            assert not answer.error
            await traffic.settle()
        assert answer.cached_tokens >= 900 * LONG_BLOCK_TOKENS
        assert (await traffic.tiers())["l1_hit_blocks"] >= 900
        largest = {kind: size for kind, size in traffic.largest.items() if kind.startswith("Kv")}
    assert {"KvLookup", "KvFound", "KvReserve", "KvReserved", "KvCopy", "KvCopied", "KvCommit", "KvStored",
            "KvPrefetch", "KvReady", "KvRelease"} <= set(largest)  # fmt: skip
    assert largest["KvLookup"] > 32 * 900, "a lookup names nearly all blocks of a prompt"
    assert max(largest.values()) < MOST_MESSAGE_BYTES, largest
