"""Measures the first requests after "ready" against later ones, through `headrace up --backend dummy`.

Rounds of 32 requests (1,024 tokens in, 32 out), one after the other from the moment that `up` is ready: L1
is pinned meanwhile, and no kernel may be compiled. Prints the time of each round, the wait of its readers,
how much of L1 the executor had by then, and which kernels it compiled under requests.

    python -m loadtest.gpu.first_requests --out first.json                  (each start is a new process)
    python -m loadtest.gpu.first_requests --bare                            (with an empty Triton cache)

The goal: the first round takes at most 1.2 times the median of the later rounds that had all of L1.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtest.gpu.readers import FIRST_ID, LAST_ID
from loadtest.gpu.serve import write_model
from loadtest.gpu.shape import LLAMA_8B
from loadtest.running_up import running_up
from shared.client.client import Client, request_all
from shared.nats import subjects
from shared.nats.bus import NatsBus

MODEL = "dummy-8b"
AT_ONCE, PROMPT, ANSWER = 32, 1024, 32
GOAL = 1.2
STATUS_S = 0.2
AFTER = 4  # rounds with all of L1


def tokens_of(round_: int, row: int, most: int) -> list[int]:
    """A prompt that no other shares blocks with."""
    seed, found = 1 + round_ * AT_ONCE + row, []
    for _ in range(PROMPT):
        seed = seed * 1_103_515_245 + 12_345 & 0x7FFFFFFF
        found.append(FIRST_ID + seed % (most - FIRST_ID))
    return found


async def one(client: Client, body: dict[str, Any]) -> list[float]:
    """When its parts came, from the request on, in seconds."""
    sent_s, parts = time.monotonic(), list[float]()
    async for frame in client.stream(body, timeout_s=120):
        if frame["type"] == "delta":
            parts.append(time.monotonic() - sent_s)
    return parts


async def round_of(client: Client, bus: NatsBus, round_: int, most: int) -> dict[str, Any]:
    """32 requests at once."""
    bodies = [
        {"model": MODEL, "prompt": tokens_of(round_, row, most), "max_tokens": ANSWER, "ignore_eos": True}
        for row in range(AT_ONCE)
    ]
    began_s = time.monotonic()
    reads = await asyncio.gather(*(one(client, body) for body in bodies))
    took_s = time.monotonic() - began_s
    answers = await request_all(bus, subjects.STATUS, STATUS_S)
    (executor,) = (answer for answer in answers if answer["kind"] == "executor")
    gaps = [b - a for parts in reads for a, b in itertools.pairwise(parts)]
    found = {
        "seconds": round(took_s, 3), "ttft_p50_ms": round(1e3 * statistics.median(p[0] for p in reads), 1),
        "ttft_max_ms": round(1e3 * max(p[0] for p in reads), 1), "gap_max_ms": round(1e3 * max(gaps), 1),
        "arena_generation": executor.get("arena_generation", 0),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


async def rounds(url: str, most: int, patience_s: float) -> list[dict[str, Any]]:
    """From now on until L1 is there, and some more; without L1 in that time those that there were."""
    bus = await NatsBus.connect(url, name="first-requests")
    client = await Client.open(bus)
    found: list[dict[str, Any]] = []
    until_s, after = time.monotonic() + patience_s, 0
    while after < AFTER and time.monotonic() < until_s:
        found.append(await round_of(client, bus, len(found), most))
        after += bool(found[-1]["arena_generation"])
    await bus.drain()
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.first_requests", description=__doc__)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--patience", type=float, default=120.0, help="longest wait for L1, s")
    parser.add_argument("--bare", action="store_true", help="each start compiles its kernels anew")
    parser.add_argument("--flags", default="--device cuda --max-context 8192", help="of `up`")
    parser.add_argument("--shape", type=Path, help="a config.json in the place of an 8B model's")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = []
    config = json.loads(asked.shape.read_text()) if asked.shape else LLAMA_8B
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), config)
        flags = ["--backend", "dummy", "--model", folder, "--model-name", MODEL, *asked.flags.split()]
        for start in range(asked.starts):
            log = Path(folder) / f"log{start}"
            env = {"TRITON_CACHE_DIR": f"{folder}/kernels{start}"} if asked.bare else {}
            began_s = time.monotonic()
            with running_up(flags, env, str(log)) as (_, url):
                ready_s = time.monotonic() - began_s
                seen = asyncio.run(rounds(url, min(LAST_ID, config["vocab_size"]), asked.patience))
            later = [one["seconds"] for one in seen[1:] if one["arena_generation"]] or [
                one["seconds"] for one in seen[1:]
            ]
            compiled = re.findall(r"compiled under a request.*", log.read_text())
            ratio = seen[0]["seconds"] / statistics.median(later) if later else None
            found.append({
                "ready_s": round(ready_s, 2), "first_to_later": ratio,
                "reached": ratio is not None and ratio <= GOAL, "compiled": compiled, "rounds": seen,
            })  # fmt: skip
            print(json.dumps({**found[-1], "rounds": len(seen)}), flush=True)
    if asked.out:
        asked.out.write_text(
            json.dumps({"flags": asked.flags, "bare": asked.bare, "starts": found}, indent=1) + "\n"
        )
    raise SystemExit(0 if all(one["reached"] for one in found) else 1)


if __name__ == "__main__":
    main()
