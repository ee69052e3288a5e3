"""The KV tiers and what they lean on, frozen, killed, restarted and full, under load, over real processes.

A small random model computes the answers: a block that comes back wrong changes every id after it. The
reference is each prompt alone, computed cold. HBM holds 4 of the 16 prompts, L1 8, L2 all.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kv_traffic import ANSWER_TOKENS, PROMPT_TOKENS, Answer, Traffic, assert_same, traffic_to
from redis import Redis
from redis_process import RedisProcess
from small_llama import BLOCK_BYTES, write_small_llama

from loadtest import faults
from shared.bus import Delivery
from tests.e2e.conftest import Up, running_up

PROMPTS, REQUESTS, CLIENTS = 16, 30, 5
BLOCKS_EACH = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // 16)
MIB = 1 << 20


@dataclass
class House:
    """A fleet with L1 and L2, and the right answers."""

    up: Up
    redis: RedisProcess
    model: str
    reference: dict[int, list[int]]
    calm: list[Answer]  # of a storm without a fault

    @property
    def store(self) -> int:
        return self.up.child("kv_offload")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("faults")
    model = write_small_llama(folder / "small-llama")
    with RedisProcess() as redis, running_up(
        folder, "--backend", "torch", "--dtype", "f32", "--deterministic", "--model", str(model),
        "--kv-blocks", str(4 * BLOCKS_EACH), "--slots", "8", "--threads", "1", "--l2", redis.url,
        "--l1", str(8 * BLOCKS_EACH * BLOCK_BYTES // MIB),
    ) as up:  # fmt: skip
        house = House(up, redis, model.name, {}, [])
        asyncio.run(fill(house))
        yield house


async def fill(house: House) -> None:
    """Each prompt once, alone and cold; then often enough that L1 and L2 hold what they can."""
    async with traffic_to(house.up, house.model) as traffic:
        for number in range(PROMPTS):
            answer = await traffic.ask(number)
            assert (answer.error, answer.cached_tokens, len(answer.ids)) == ("", 0, ANSWER_TOKENS)
            house.reference[number] = answer.ids
        house.calm = await traffic.many(storm(0), CLIENTS)
        assert_same(house.calm, house.reference)


def storm(seed: int) -> list[int]:
    """Which prompts are asked for: some often, all at times."""
    rng = random.Random(seed)
    return [min(rng.randrange(PROMPTS), rng.randrange(PROMPTS)) for _ in range(REQUESTS)]


Act = Callable[[House, Traffic], Awaitable[None]]


async def nothing(house: House, traffic: Traffic) -> None:
    """The way back, where there is none."""


async def freeze_redis(house: House, traffic: Traffic) -> None:
    house.redis.freeze()


async def thaw_redis(house: House, traffic: Traffic) -> None:
    house.redis.thaw()


async def stop_redis(house: House, traffic: Traffic) -> None:
    house.redis.stop()


async def start_redis(house: House, traffic: Traffic) -> None:
    house.redis.start()


async def restart_redis(house: House, traffic: Traffic) -> None:
    house.redis.stop()
    house.redis.start()


async def fill_redis(house: House, traffic: Traffic) -> None:
    with Redis(port=house.redis.port) as redis:
        redis.config_set("maxmemory", "1mb")
        redis.config_set("maxmemory-policy", "noeviction")


async def empty_redis(house: House, traffic: Traffic) -> None:
    with Redis(port=house.redis.port) as redis:
        redis.config_set("maxmemory", "0")


async def freeze_store(house: House, traffic: Traffic) -> None:
    os.kill(house.store, signal.SIGSTOP)


async def thaw_store(house: House, traffic: Traffic) -> None:
    os.kill(house.store, signal.SIGCONT)


async def kill_store(house: House, traffic: Traffic) -> None:
    faults.kill(house.store)


async def kill_copying_executor(house: House, traffic: Traffic) -> None:
    """At the sight of a copy that it is told to make."""
    told = asyncio.Event()

    def watch(delivery: Delivery) -> None:
        if delivery.subject.endswith(".KvCopy") and not told.is_set():
            faults.kill(house.up.child("executor"))
            told.set()

    traffic.on_message = watch
    await asyncio.wait_for(told.wait(), 60)


FAULTS: dict[str, tuple[Act, Act]] = {
    "redis frozen": (freeze_redis, thaw_redis),
    "redis killed": (stop_redis, start_redis),
    "redis restarted": (restart_redis, nothing),
    "redis full": (fill_redis, empty_redis),
    "kv_offload frozen": (freeze_store, thaw_store),
    "kv_offload killed": (kill_store, nothing),
    "executor killed while it copies": (kill_copying_executor, nothing),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_request_fails_and_no_token_changes(house: House, fault: str) -> None:
    asyncio.run(under_load(house, fault))


async def under_load(house: House, fault: str) -> None:
    """A storm whose second half runs under the fault, which lasts until the last answer; then the way back,
    until the tiers serve hits."""
    act, undo = FAULTS[fault]
    async with traffic_to(house.up, house.model) as traffic:
        await traffic.settle()
        half = asyncio.Event()
        running = asyncio.create_task(
            traffic.many(storm(1), CLIENTS, lambda ended: half.set() if ended > REQUESTS // 3 else None)
        )
        await half.wait()
        began_s = time.monotonic()
        before = await traffic.tiers()
        await act(house, traffic)
        answers = await running
        fault_s = time.monotonic() - began_s
        after = await traffic.tiers()
        await undo(house, traffic)
        ready_s = await traffic.until(whole)
        back_s = await until_hit(house, traffic)
        await traffic.settle()
    assert_same(answers, house.reference)
    assert len(answers) == REQUESTS
    if fault.startswith("redis"):
        assert after["l1_hit_blocks"] > before["l1_hit_blocks"], "L1 serves on"
    if not fault.startswith("executor"):
        assert max(a.longest_gap_s for a in answers) < fault_s / 2, "a stream stood still for the fault"
    report(fault, house.calm, answers, (fault_s, ready_s, back_s))


def whole(found: dict[str, dict[str, object]]) -> bool:
    """Everybody is there, and L2 answers."""
    store = found.get("kv_offload", {})
    if store.get("state") != "ready" or found.get("executor", {}).get("state") != "ready":
        return False
    tiers = store["tiers"]
    assert isinstance(tiers, dict)
    generation = found["executor"].get("arena_generation")
    return tiers["l2"]["breaker"] == "closed" and generation == tiers["l1"]["generation"]


async def until_hit(house: House, traffic: Traffic) -> float:
    """Ask until a tier has brought something; how long that took."""
    began_s = time.monotonic()
    before = (await traffic.tiers())["loads"]
    while (await traffic.tiers())["loads"] == before:
        assert_same(await traffic.many(range(6), CLIENTS), house.reference)
        assert time.monotonic() - began_s < 60
    return time.monotonic() - began_s


def report(
    fault: str, calm: list[Answer], answers: list[Answer], times_s: tuple[float, float, float]
) -> None:
    """The figures of docs/faults.md."""
    fault_s, ready_s, back_s = times_s
    gaps = [max(a.longest_gap_s for a in of) for of in (calm, answers)]
    firsts = [max(a.first_s for a in of) for of in (calm, answers)]
    print(
        f"{fault}: {len(answers)} requests, {sum(bool(a.error) for a in answers)} failed, longest stall"
        f" {gaps[1] * 1000:.0f} ms (calm {gaps[0] * 1000:.0f} ms), longest TTFT {firsts[1] * 1000:.0f} ms"
        f" (calm {firsts[0] * 1000:.0f} ms), fault for {fault_s:.1f} s,"
        f" whole again after {ready_s:.1f} s, hits after {back_s:.1f} s more"
    )


def test_the_folder_is_small(tmp_path: Path) -> None:
    """The model is what BLOCK_BYTES says."""
    assert BLOCK_BYTES == 131_072
