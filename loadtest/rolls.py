"""Rolls the executors of a fleet one after the other under load, and measures what its clients see.

    python -m loadtest.rolls [--executors 3] [--clients 24] [--tokens 1500] [--out rolls.json]

`headrace up` with a simulated engine. Each client streams one answer after another, of 20 ms a token. SIGTERM
drains an executor, and `up` starts another one in its place. `roll_s`: from SIGTERM until the process has
ended. `stall_s`: the longest time between two frames of a stream. Each text is compared with that of the same
seed before the first roll.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.fleet import MODEL, cpu_name
from loadtest.leaks import settle
from loadtest.running_up import running_up
from shared.client.client import Client
from shared.errors import HeadraceError
from shared.nats.bus import NatsBus

SIM = "step=20000,token=20"
LIMIT_S = 300.0
BEFORE_S = 3.0  # of load before a roll


@dataclass
class Seen:
    """What the clients have seen."""

    texts: dict[int, str] = field(default_factory=dict)  # by seed
    stalls: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wrong: int = 0
    answers: int = 0


def body(seed: int, tokens: int) -> dict[str, Any]:
    """A request, the same each time."""
    rng = random.Random(seed)
    prompt = rng.choices(range(300, 20_000), k=rng.randrange(50, 2_000))
    most = rng.randrange(tokens // 10, tokens)
    return {"model": MODEL, "prompt": prompt, "seed": seed, "max_tokens": most, "ignore_eos": True}


async def read(client: Client, seed: int, tokens: int, seen: Seen) -> None:
    """Stream one answer."""
    text, last_s, longest_s = "", time.monotonic(), 0.0
    try:
        async for frame in client.stream(body(seed, tokens), timeout_s=LIMIT_S):
            now_s = time.monotonic()
            if text:
                longest_s = max(longest_s, now_s - last_s)
            last_s = now_s
            if frame["type"] == "accepted":
                text = ""
            elif frame["type"] == "delta":
                text += "".join(choice["text"] for choice in frame["choices"])
    except HeadraceError as error:
        seen.errors.append(f"{error.code} {error.message}")
        return
    seen.answers += 1
    seen.stalls.append(longest_s)
    seen.wrong += seen.texts.setdefault(seed, text) != text


async def roll(up_pid: int, pid: int) -> float:
    """Drain an executor and wait for the next one. Returns how long the drain took, seconds."""
    before = faults.pids_of(up_pid, "executor")
    began_s = time.monotonic()
    faults.send(pid, signal.SIGTERM)
    while pid in faults.children(up_pid):  # noqa: ASYNC110 - of another process, which sends no event
        await asyncio.sleep(0.02)
    took_s = time.monotonic() - began_s
    while len(set(faults.pids_of(up_pid, "executor")) - {pid}) < len(before):  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.05)
    await asyncio.sleep(BEFORE_S)
    return took_s


async def measured(options: argparse.Namespace, up_pid: int, url: str) -> dict[str, Any]:
    """Two passes over the same requests: one that is calm, and one with the rolls."""
    bus = await NatsBus.connect(url, timeout_s=30)
    client, seen, seeds = await Client.open(bus), Seen(), list(range(options.clients * 2))
    counts = {"executor": options.executors, "scheduler": 1, "detokenizer": 2}
    await settle(bus, counts, LIMIT_S)
    await asyncio.gather(*(read(client, seed, options.tokens, seen) for seed in seeds))
    calm_s, seen.stalls = max(seen.stalls), []
    rolling = asyncio.Event()

    async def one(number: int) -> None:
        rng = random.Random(number)
        while not rolling.is_set():
            await read(client, rng.choice(seeds), options.tokens, seen)

    clients = [asyncio.create_task(one(number)) for number in range(options.clients)]
    await asyncio.sleep(BEFORE_S)
    rolls_s = [await roll(up_pid, pid) for pid in faults.pids_of(up_pid, "executor")]
    rolling.set()
    await asyncio.gather(*clients)
    status = await settle(bus, counts, LIMIT_S)
    (scheduler,) = (s for s in status if s["kind"] == "scheduler")
    await bus.drain()
    return {
        "executors": options.executors,
        "clients": options.clients,
        "longest_answer_s": options.tokens * 0.02,
        "roll_s": [round(each, 2) for each in rolls_s],
        "stall_s": round(max(seen.stalls), 2),
        "stall_calm_s": round(calm_s, 2),
        "answers": seen.answers - len(seeds),
        "lost": len(seen.errors),
        "wrong": seen.wrong,
        "errors": seen.errors[:5],
        "moves": scheduler["measured"]["tokens"]["moves"],
        "recomputed": scheduler["measured"]["tokens"]["recomputed"],
        "restored": scheduler["measured"]["tiers"]["restored_tokens"],
        "cpu": cpu_name(),
    }


def main() -> int:
    """Print and write the figures; 1 if an answer is lost or wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--executors", type=int, default=3)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1_500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    flags = ["--backend", "sim", "--sim", SIM, "--executors", str(options.executors), "--detokenizers=2"]
    with running_up(flags) as (pid, url):
        found = asyncio.run(measured(options, pid, url))
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(found["lost"] or found["wrong"])


if __name__ == "__main__":
    raise SystemExit(main())
