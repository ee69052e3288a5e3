"""What the death of a service costs streams that run: are they the same, and how long do they pause?

    python -m loadtest.deaths --out deaths.json -- --backend sim
    python -m loadtest.deaths --tokens 1500 -- --model FOLDER --device cuda --deterministic

What follows `--` goes to `headrace up`. The streams run once undisturbed; then once for each victim, which is
killed in their middle. An engine whose rows depend on their batch in the last bits (any on a GPU but with
`--deterministic`) may choose other tokens behind a death, since what is computed again is computed otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.leaks import settle
from loadtest.running_up import running_up
from shared.client import Client
from shared.errors import HeadraceError
from shared.nats.bus import NatsBus

SERVICES = ("tokenizer", "scheduler", "executor", "kv_offload", "detokenizer")
PROMPT_TOKENS = 40
TIMEOUT_S = 120.0


@dataclass
class Stream:
    """One answer as its reader saw it."""

    text: str = ""
    error: int = 0
    gaps_s: list[float] = field(default_factory=list)  # between two frames

    @property
    def pause_s(self) -> float:
        """The longest of its gaps."""
        return max(self.gaps_s, default=0.0)


async def read(client: Client, body: dict[str, Any]) -> Stream:
    """Follow one stream to its end; a new attempt brings the text from the first token on again."""
    stream, last_s = Stream(), time.perf_counter()
    try:
        async for frame in client.stream(body, timeout_s=TIMEOUT_S):
            now_s = time.perf_counter()
            stream.gaps_s.append(now_s - last_s)
            last_s = now_s
            if frame["type"] == "accepted":
                stream.text = ""
            elif frame["type"] == "delta":
                stream.text += "".join(choice["text"] for choice in frame["choices"])
    except HeadraceError as error:
        stream.error = error.code
    return stream


async def storm(url: str, up_pid: int, victim: str, args: argparse.Namespace) -> list[Stream]:
    """All streams at once, and the death of `victim` in their middle; empty: of nobody."""
    bus = await NatsBus.connect(url, timeout_s=10)
    client = await Client.open(bus)
    await settle(bus, dict.fromkeys(SERVICES, 1), TIMEOUT_S)
    model = (await client.ask("headrace.v1.models"))["data"][0]["id"]
    rng = random.Random(1)
    bodies = [
        {
            "model": model,
            "prompt": [rng.randrange(3, 300) for _ in range(PROMPT_TOKENS)],
            "max_tokens": args.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "seed": seed,
        }
        for seed in range(args.streams)
    ]
    running = [asyncio.create_task(read(client, body)) for body in bodies]
    await asyncio.sleep(args.after_s)
    if any(task.done() for task in running):
        raise SystemExit("a stream ended before the fault: more --tokens, or a shorter --after-s")
    for pid in faults.pids_of(up_pid, victim) if victim else ():
        faults.kill(pid)
    streams = [await task for task in running]
    await settle(bus, dict.fromkeys(SERVICES, 1), TIMEOUT_S)
    await bus.drain()
    return streams


def figures(streams: list[Stream], quiet: list[Stream]) -> dict[str, Any]:
    """What is reported of a run beside the undisturbed one."""
    pauses = sorted(stream.pause_s for stream in streams)
    return {
        "streams": len(streams),
        "errors": sum(bool(stream.error) for stream in streams),
        "same_text": sum(a.text == b.text for a, b in zip(streams, quiet, strict=True)),
        "pause_s_p50": round(statistics.median(pauses), 3),
        "pause_s_most": round(pauses[-1], 3),
    }


def main() -> int:
    """Run all of it; 1 when a stream failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--victims", nargs="+", choices=SERVICES, default=["scheduler", "executor", "detokenizer"]
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--after-s", type=float, default=1.0, help="from the first request to the death")
    parser.add_argument("--out", type=Path)
    parser.add_argument("up", nargs="*", help="for `headrace up`")
    args = parser.parse_args()
    found: dict[str, Any] = {"streams": args.streams, "tokens": args.tokens, "after_s": args.after_s}
    found["up"] = " ".join(word.rpartition("/")[2] if word.startswith("/") else word for word in args.up)
    with running_up(["--tokenizers=1", "--detokenizers=1", *args.up]) as (up_pid, url):
        quiet = asyncio.run(storm(url, up_pid, "", args))
        for victim in ["", *args.victims]:
            streams = asyncio.run(storm(url, up_pid, victim, args))
            found[victim or "nobody"] = figures(streams, quiet)
            print(victim or "nobody", json.dumps(found[victim or "nobody"]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(row["errors"] for row in found.values() if isinstance(row, dict)) else 0


if __name__ == "__main__":
    sys.exit(main())
