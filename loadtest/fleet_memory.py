"""Measures the memory of `headrace up`, by process and by kind: when it is ready, after one chat, and after
many different prompts.

    python -m loadtest.fleet_memory --out fleet_memory.json
    python -m loadtest.fleet_memory --cases f32 --prompts 40 -- --slots 8

Memory that several processes share counts once (PSS). Pages of /dev/shm count whole, mapped or not. The goals
are for the sum of all processes after the chat, in MB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, connected, machine, running_up
from loadtest.processes import GONE, memory_bytes, name_of, tree
from services.executor.engine import SHM

GOALS_MB = {"f32": 1400, "packed": 900}
KINDS = {"Pss_Anon": "private", "Pss_File": "files", "Pss_Shmem": "shared"}
CHAT = [{"role": "user", "content": "What is NATS?"}]
PROMPT_TOKENS = 1024
SETTLED_BYTES, SETTLED_S, POLL_S = 1 << 20, 8.0, 1.0  # a service that starts late takes seconds for imports


def sizes(up_pid: int) -> dict[str, dict[str, int]]:
    """Bytes of every process by kind, and of /dev/shm what no process has mapped."""
    found: dict[str, dict[str, int]] = {}
    for pid in tree(up_pid):
        with suppress(*GONE):
            if fields := memory_bytes(pid):
                found[f"{name_of(pid)} {pid}"] = {shown: fields[kind] for kind, shown in KINDS.items()}
    mapped = sum(each["shared"] for each in found.values())
    found["/dev/shm, unmapped"] = {"private": 0, "files": 0, "shared": max(0, shm_bytes(found) - mapped)}
    return found


def shm_bytes(found: dict[str, dict[str, int]]) -> int:
    """Bytes of the files in /dev/shm that these processes have open or mapped."""
    paths = set()
    for pid in (name.split()[-1] for name in found):
        with suppress(*GONE):
            paths |= {
                Path(words[5])
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
                if len(words := line.split(maxsplit=5)) == 6 and words[5].startswith(f"{SHM}/")
            }
    return sum(path.stat().st_blocks * 512 for path in paths if path.exists())


def total(found: dict[str, dict[str, int]]) -> int:
    """Bytes of all of it."""
    return sum(sum(kinds.values()) for kinds in found.values())


async def settled(up_pid: int) -> dict[str, dict[str, int]]:
    """The sizes, once their sum has not changed for some seconds."""
    found, since_s = sizes(up_pid), time.monotonic()
    while time.monotonic() - since_s < SETTLED_S:
        await asyncio.sleep(POLL_S)
        new = sizes(up_pid)
        if abs(total(new) - total(found)) > SETTLED_BYTES:
            found, since_s = new, time.monotonic()
    return found


async def read(up_pid: int, url: str, prompts: int) -> dict[str, Any]:
    """The sizes at each moment."""
    async with connected(url) as client:
        moments = {"ready": await settled(up_pid)}
        await client.complete({"model": MODEL, "messages": CHAT, "max_tokens": 32}, timeout_s=600)
        moments["first chat"] = await settled(up_pid)
        for i in range(prompts):
            prompt = [300 + (7919 * i + 31 * k) % 40_000 for k in range(PROMPT_TOKENS)]
            await client.complete({"model": MODEL, "prompt": prompt, "max_tokens": 2}, timeout_s=600)
        if prompts:
            moments[f"{prompts} prompts of {PROMPT_TOKENS}"] = await settled(up_pid)
    return moments


def figures(dtype: str, given: argparse.Namespace) -> dict[str, Any]:
    """One start of `up`."""
    flags = ["--http", "127.0.0.1:0", "--dtype", dtype, *given.up]
    began_s = time.monotonic()
    with running_up(flags, log=given.log) as (pid, url):
        start_s = round(time.monotonic() - began_s, 2)
        moments = asyncio.run(read(pid, url, given.prompts))
    for moment, found in moments.items():
        print(f"\n{dtype}, {moment}: MB\n{table(found)}", flush=True)
    summed_mb = {moment: round(total(found) / 1e6, 1) for moment, found in moments.items()}
    return {"dtype": dtype, "start_s": start_s, "sum_mb": summed_mb, "bytes": moments}


def table(found: dict[str, dict[str, int]]) -> str:
    """A line for each process, and the sum."""
    names = list(KINDS.values())
    rows = [f"{'':<28}" + "".join(f"{name:>9}" for name in (*names, "sum"))]
    summed = {kind: sum(each[kind] for each in found.values()) for kind in names}
    for name, kinds in {**found, "sum": summed}.items():
        cells = [*(kinds[kind] for kind in names), sum(kinds.values())]
        rows.append(f"{name:<28}" + "".join(f"{cell / 1e6:9.1f}" for cell in cells))
    return "\n".join(rows)


def main() -> None:
    """The command line."""
    parser = parser_of("fleet_memory", __doc__, up=True)
    parser.add_argument("--cases", default="f32,packed", help="values of dtype")
    parser.add_argument("--prompts", type=int, default=0, help="different prompts after the chat")
    parser.add_argument("--log", default=os.devnull, help="a file for the services' log")
    given = parser.parse_args()
    runs = [figures(dtype, given) for dtype in given.cases.split(",")]
    met = {
        run["dtype"]: run["sum_mb"]["first chat"] <= GOALS_MB[run["dtype"]]
        for run in runs
        if run["dtype"] in GOALS_MB
    }
    about = {**machine(), "kernel": platform.release(), "flags": given.up, "prompts": given.prompts}
    found = {"machine": about, "goals_mb": GOALS_MB, "met": met, "runs": runs}
    report(found, given.out, shown={"met": met, "sums": {run["dtype"]: run["sum_mb"] for run in runs}})


if __name__ == "__main__":
    main()
