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
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest
from redis import Redis
from support.kv_offload.bounds import (
    HITS_WITHIN_S,
    Run,
    TierWatch,
    assert_first_tokens,
    assert_gaps,
    assert_l1_is_quick,
)
from support.kv_offload.traffic import ANSWER_TOKENS, PROMPT_TOKENS, Traffic, assert_same, traffic_to
from support.redis_process import RedisProcess
from support.running_up import Up, running_up
from support.slow_link import SlowLink
from support.small_llama import BLOCK_BYTES, write_small_llama

from loadtest import faults
from shared.nats.interface import Delivery

pytestmark = pytest.mark.timed

PROMPTS, REQUESTS, CLIENTS = 16, 60, 5
BEFORE = 10  # answers before the fault, so that it lasts longer than L2 has for a call
COLD = range(100, 110)  # prompts that no client sends a second time
BLOCKS_EACH = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // 16)
MIB = 1 << 20
SLOW_BYTES_PER_S, SLOW_S = 256 << 10, 0.05  # a block takes half a second


@dataclass
class House:
    """A fleet with L1 and L2, the right answers, and what they took without a fault."""

    up: Up
    redis: RedisProcess
    link: SlowLink  # from kv_offload to Redis
    model: str
    reference: dict[int, list[int]] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)  # cold: nothing is cached; calm: as in a fault's storm
    watch: TierWatch = field(default_factory=TierWatch)  # of the calm one

    @property
    def store(self) -> int:
        return self.up.child("kv_offload")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("faults")
    model = write_small_llama(folder / "small-llama")
    with RedisProcess() as redis, SlowLink(redis.port) as link, running_up(
        folder, "--backend", "torch", "--dtype", "f32", "--deterministic", "--model", str(model),
        "--kv-blocks", str(4 * BLOCKS_EACH), "--slots", "8", "--threads", "1",
        "--l1", str(8 * BLOCKS_EACH * BLOCK_BYTES // MIB), "--l2", f"redis://127.0.0.1:{link.port}",
    ) as up:  # fmt: skip
        house = House(up, redis, link, model.name)
        asyncio.run(fill(house))
        yield house


async def fill(house: House) -> None:
    """Each prompt once, alone and cold; others that are new, some at a time; then the prompts so often that
    L1 and L2 hold what they can."""
    async with traffic_to(house.up, house.model) as traffic:
        for number in range(PROMPTS):
            answer = await traffic.ask(number)
            assert (answer.error, answer.cached_tokens, len(answer.ids)) == ("", 0, ANSWER_TOKENS)
            house.reference[number] = answer.ids
        house.runs["cold"] = Run.of(await traffic.many(COLD, CLIENTS))
        traffic.on_message = house.watch.take
        calm = await traffic.many(storm(0), CLIENTS)
        assert_same(calm, house.reference)
        house.runs["calm"] = Run.of(calm)


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


async def slow_down(house: House, traffic: Traffic) -> None:
    house.link.slow(SLOW_BYTES_PER_S, SLOW_S)


async def speed_up(house: House, traffic: Traffic) -> None:
    house.link.fast()


async def stop_redis(house: House, traffic: Traffic) -> None:
    house.link.refuse()
    house.redis.stop()


async def start_redis(house: House, traffic: Traffic) -> None:
    house.redis.start()
    house.link.accept()


async def restart_redis(house: House, traffic: Traffic) -> None:
    await stop_redis(house, traffic)
    await start_redis(house, traffic)


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
    """When it gets the command to make a copy."""
    commanded, others = asyncio.Event(), traffic.on_message

    def watch(delivery: Delivery) -> None:
        others(delivery)
        if delivery.subject.endswith(".KvCopy") and not commanded.is_set():
            faults.kill(house.up.child("executor"))
            commanded.set()

    traffic.on_message = watch
    await asyncio.wait_for(commanded.wait(), 60)


FAULTS: dict[str, tuple[Act, Act]] = {
    "redis frozen": (freeze_redis, thaw_redis),
    "redis over a slow link": (slow_down, speed_up),
    "redis killed": (stop_redis, start_redis),
    "redis restarted": (restart_redis, nothing),
    "redis full": (fill_redis, empty_redis),
    "kv_offload frozen": (freeze_store, thaw_store),
    "kv_offload killed": (kill_store, nothing),
    "executor killed while it copies": (kill_copying_executor, nothing),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_request_fails_and_no_token_changes(house: House, fault: str) -> None:
    asyncio.run(under_load(house, fault))


async def under_load(house: House, fault: str) -> None:
    """A storm that runs under the fault from some answers on, which lasts until the last one; then the way
    back, until the tiers serve hits."""
    act, undo = FAULTS[fault]
    watch = TierWatch()
    async with traffic_to(house.up, house.model) as traffic:
        await traffic.settle()
        some = asyncio.Event()
        running = asyncio.create_task(
            traffic.many(storm(1), CLIENTS, lambda ended: some.set() if ended > BEFORE else None)
        )
        await some.wait()
        before, opened = await traffic.tiers(), await breaker_openings(traffic)
        traffic.on_message = watch.take
        await act(house, traffic)
        answers = await running
        l1_s = list(watch.l1_s)  # under the fault
        after, opened = await traffic.tiers(), await breaker_openings(traffic) - opened
        await undo(house, traffic)
        ready_s = await traffic.until(whole)
        back_s = await until_hit(house, traffic, watch)
        await traffic.settle()
    assert_same(answers, house.reference)
    assert len(answers) == REQUESTS
    run = Run.of(answers)
    report(fault, house, run, l1_s, (ready_s, back_s))
    if fault.startswith("redis"):
        assert after["l1_hit_blocks"] > before["l1_hit_blocks"], "L1 serves on"
    if fault == "redis frozen":
        assert_l1_is_quick(l1_s, house.watch.l1_s, run)
    if fault == "redis full":
        assert not opened, "what it holds is read as before"
    if not fault.startswith("executor"):  # the next one loads a model first: that is the gap
        assert_gaps(run, house.runs["calm"])
        assert_first_tokens(run, house.runs["cold"])
    assert back_s <= HITS_WITHIN_S * run.slower_than(house.runs["calm"]) + house.runs["cold"].longest_first_s


async def breaker_openings(traffic: Traffic) -> int:
    """How often L2 was given up since kv_offload started."""
    store = (await traffic.services()).get("kv_offload", {})
    return int(store["tiers"]["l2"].get("opened", 0)) if "tiers" in store else 0  # it may not have L2 yet


def whole(found: dict[str, dict[str, object]]) -> bool:
    """Every service is there, and L2 answers."""
    store = found.get("kv_offload", {})
    if store.get("state") != "ready" or found.get("executor", {}).get("state") != "ready":
        return False
    tiers = store["tiers"]
    assert isinstance(tiers, dict)
    generation = found["executor"].get("arena_generation")
    return tiers["l2"]["breaker"] == "closed" and generation == tiers["l1"]["generation"]


async def until_hit(house: House, traffic: Traffic, watch: TierWatch) -> float:
    """Ask until a tier has brought something; how long that took."""
    began_s, seen = time.monotonic(), len(watch.loads_s)
    while len(watch.loads_s) == seen:
        assert_same(await traffic.many(range(6), CLIENTS), house.reference)
        assert time.monotonic() - began_s < 60
    return watch.loads_s[seen] - began_s


def report(fault: str, house: House, run: Run, l1_s: list[float], times_s: tuple[float, float]) -> None:
    """The figures of docs/guides/faults.md."""
    calm, cold = house.runs["calm"], house.runs["cold"]
    l1_ms = [median(of or [0.0]) * 1000 for of in (l1_s, house.watch.l1_s)]
    print(
        f"{fault}: step {run.step_s * 1000:.0f} ms (calm {calm.step_s * 1000:.0f},"
        f" cold {cold.step_s * 1000:.0f}),"
        f" longest stall {run.longest_gap_s * 1000:.0f} ms (calm {calm.longest_gap_s * 1000:.0f}),"
        f" longest TTFT {run.longest_first_s:.2f} s (calm {calm.longest_first_s:.2f}, cold"
        f" {cold.longest_first_s:.2f}), L1 p50 {l1_ms[0]:.2f} ms of {len(l1_s)} (calm {l1_ms[1]:.2f} of"
        f" {len(house.watch.l1_s)}), whole again after {times_s[0]:.1f} s, hits after {times_s[1]:.1f} s more"
    )


def test_the_folder_is_small(tmp_path: Path) -> None:
    """The model has blocks of BLOCK_BYTES."""
    assert BLOCK_BYTES == 131_072
