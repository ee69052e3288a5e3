"""Tests that kv_offload releases every lease and keeps every pinned block, with its real shell and LMCache.

    python -m loadtest.kv_churn --out kv_churn.json

Ten thousand cycles in random order: lookups, loads that are released, cancelled or left to their deadlines,
stores that are committed, in part, not at all or too late, and schedulers that die in between. Then an
executor dies for good. At the end no lease may be open and all of L1 must be free.

Then a burst: three times what L1 holds, as fast as kv_offload takes it, while blocks are pinned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from loadtest.bench.machine import circumstances
from loadtest.kv_process import ANSWER_S, BLOCK_BYTES, LONG_US, PRINT, House, keys
from services.kv_offload.backends.arena import MIB
from shared.messages import KvCommit, KvLookup, KvRelease, ints

LEASE_US = (2_000, 20_000, 200_000)  # some are left to end by themselves
QUARANTINE_S = 75.0  # ranges that a dead executor may still write are kept for 60 s
Cycle = Callable[[House, list[int], random.Random], Awaitable[bool]]

# ---- cycles; each says whether what it read was right ---------------------------------------------


async def _look_up(house: House, numbers: list[int], draw: random.Random) -> bool:
    asked = KvLookup(job=house.job(), keys=keys(numbers), fingerprint=PRINT)
    if draw.random() < 0.2:  # cancelled: nobody waits for the answer
        house.scheduler.send(asked)
        return True
    tiers = list((await house.scheduler.ask(asked)).tiers)
    return set(tiers) <= {0, 1}


async def _load(house: House, numbers: list[int], draw: random.Random) -> bool:
    asked = house.prefetch(numbers, draw.choice(LEASE_US))
    ending = draw.random()
    if ending < 0.1:
        house.scheduler.send(asked)
        house.scheduler.send(KvRelease(jobs=ints([asked.job])))
        return True
    ready = await house.scheduler.ask(asked)
    there = [(n, o) for n, o in zip(numbers, ready.offsets, strict=True) if o >= 0]
    right = house.segment.intact([n for n, _ in there], [o for _, o in there])
    if ending < 0.6:
        house.scheduler.send(KvRelease(jobs=ints([asked.job])))
    return right


async def _store(house: House, numbers: list[int], draw: random.Random) -> bool:
    asked = house.reserve(numbers, draw.choice(LEASE_US), urgent=draw.random() < 0.3)
    ending = draw.random()
    if ending < 0.1:
        house.scheduler.send(asked)
        return True
    offsets = list((await house.scheduler.ask(asked)).offsets)
    if ending < 0.2:
        return True  # left to its deadline
    if ending < 0.3:
        house.scheduler.send(KvRelease(jobs=ints([asked.job])))
        return True
    done = [int(offset >= 0 and draw.random() < 0.9) for offset in offsets]
    house.segment.write(numbers, [offset if done[i] else -1 for i, offset in enumerate(offsets)])
    if ending < 0.35:
        await asyncio.sleep(LEASE_US[0] / 1e6)  # perhaps too late
    await house.scheduler.ask(KvCommit(job=asked.job, written=ints(done)))
    return True


async def _kill(house: House, numbers: list[int], draw: random.Random) -> bool:
    """A scheduler dies with a load and a store under way."""
    house.scheduler.send(house.prefetch(numbers, LONG_US))
    house.scheduler.send(house.reserve(numbers, LEASE_US[-1]))
    await house.new_scheduler()
    return True


_CYCLES: dict[str, tuple[Cycle, int]] = {
    "look up": (_look_up, 30),
    "load": (_load, 35),
    "store": (_store, 34),
    "kill": (_kill, 1),
}


# ---- the two parts --------------------------------------------------------------------------------


async def churn(cycles: int, l1_mib: int) -> dict[str, Any]:
    """Cycles at random, then the end of all who asked; what is left."""
    house, draw, kinds, wrong = House(l1_mib * MIB), random.Random(7), Counter[str](), 0
    await house.open()
    free_at_start = _free_bytes(house)
    for _ in range(cycles):
        numbers = draw.sample(range(2 * house.blocks), draw.randint(1, 8))
        (kind,) = draw.choices(list(_CYCLES), weights=[weight for _, weight in _CYCLES.values()])
        kinds[kind] += 1
        wrong += not await _CYCLES[kind][0](house, numbers, draw)
    settled_s = await _all_die(house)
    held = house.held()
    evictions = house.l1()["evictions"]
    given = await _take_all(house)
    found = {
        "cycles": dict(kinds), "wrong_blocks": wrong, "held_at_the_end": held, "settled_after_s": settled_s,
        "evictions": evictions, "blocks": house.blocks, "blocks_that_found_room_at_once": given,
        "free_bytes_at_start": free_at_start, "free_bytes_at_the_end": _free_bytes(house),
    }  # fmt: skip
    await house.close()
    return found


def _free_bytes(house: House) -> int:
    l1 = house.l1()
    return int(l1["capacity_bytes"] - l1["used_bytes"])


async def _all_die(house: House) -> float:
    """Until nothing is held any more; how long that took."""
    await house.end("e")
    await house.end("s")
    began = time.monotonic()
    await house.until_free(QUARANTINE_S)
    return round(time.monotonic() - began, 1)


async def _take_all(house: House) -> int:
    """A new executor reserves all of L1, and lets go: how many blocks found room."""
    await house.open_again()
    every, jobs, given = range(10**6, 10**6 + house.blocks), [], 0
    for first in range(0, len(every), 256):
        asked = house.reserve(list(every[first : first + 256]), LONG_US, urgent=True)
        given += sum(offset >= 0 for offset in (await house.scheduler.ask(asked)).offsets)
        jobs.append(asked.job)
    house.scheduler.send(KvRelease(jobs=ints(jobs)))
    await house.until_free(ANSWER_S)
    return given


async def burst(times: int, l1_mib: int) -> dict[str, Any]:
    """`times` what L1 holds is stored, four reservations of eight blocks at a time; an eighth is pinned."""
    house = House(l1_mib * MIB)
    await house.open()
    pinned = list(range(house.blocks // 8))
    await house.store(pinned)
    asked = house.prefetch(pinned, LONG_US)
    offsets = list((await house.scheduler.ask(asked)).offsets)
    waiting = [list(range(first, first + 8)) for first in range(1_000, 1_000 + times * house.blocks, 8)]
    count, began = 8 * len(waiting), time.monotonic()

    async def one_after_the_other() -> int:
        return sum([await house.store(waiting.pop()) for _ in range(len(waiting)) if waiting])

    accepted = sum(await asyncio.gather(*(one_after_the_other() for _ in range(4))))
    took_s = time.monotonic() - began
    found = {
        "blocks_of_l1": house.blocks, "pinned": len(pinned), "offered": count, "accepted": accepted,
        "accepted_pct": round(100 * accepted / count, 2),
        "pinned_intact": house.segment.intact(pinned, offsets),
        "gb_per_s": round(accepted * BLOCK_BYTES / took_s / 1e9, 2),
    }  # fmt: skip
    await house.close()
    return found


async def _main(args: argparse.Namespace) -> None:
    found = {"churn": await churn(args.cycles, args.l1), "burst": await burst(args.times, args.l1)}
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(circumstances() | found, indent=1) + "\n")


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=3, help="what L1 holds, in the burst")
    parser.add_argument("--l1", type=int, default=64, help="MiB")
    parser.add_argument("--out", type=Path)
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
