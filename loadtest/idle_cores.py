"""Measures the CPU time of every process of `headrace up` without requests, thread by thread, and how long a
first token takes after such a rest.

    python -m loadtest.idle_cores --out idle.json -- --backend dummy --device cuda --model DIR

Flags after `--` go to `up`. The goal: at most 0.02 of a core for the executor. `stack` shows what its busiest
thread does in the kernel (as root), `--py-spy` in Python, if py-spy is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from loadtest.running_up import running_up
from shared.client.client import Client, request_all
from shared.nats import subjects
from shared.nats.bus import NatsBus

GOAL = 0.02  # of a core
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
ANSWER_S = 0.5
PROMPT, TOKENS = 32, 16


def processes(up: int) -> dict[int, str]:
    """The services that `up` runs, by process id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                words = (folder / "cmdline").read_text().split("\0")
            except OSError:  # it has ended
                continue
            if parent == up and "services.launcher.serve" in words:
                found[int(folder.name)] = words[words.index("services.launcher.serve") + 1]
    return found


def thread_s(process: int) -> dict[tuple[int, str], float]:
    """CPU time of each thread so far, by id and name."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        fields = (task / "stat").read_text()
        ticks = fields.rpartition(")")[2].split()[11:13]
        found[int(task.name), fields[fields.index("(") + 1 : fields.rindex(")")]] = (
            sum(map(int, ticks)) * TICK_S
        )
    return found


def rested(up: int, seconds: float, py_spy: str) -> dict[str, Any]:
    """Cores of each process over so many seconds without a request, and of its threads that took some."""
    kinds = processes(up)
    before = {process: thread_s(process) for process in kinds}
    began_s = time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - began_s
    found: dict[str, Any] = {}
    for process, kind in kinds.items():
        now = thread_s(process)
        cores = {thread: (s - before[process].get(thread, 0.0)) / took_s for thread, s in now.items()}
        busiest = max(cores, key=lambda thread: cores[thread])
        about: dict[str, Any] = {
            "cores": round(sum(cores.values()), 4),
            "threads": {f"{name} {task}": round(c, 4) for (task, name), c in cores.items() if c >= 0.001},
        }
        if kind == "executor" and about["cores"] > GOAL:
            about["stack"] = _read(Path(f"/proc/{process}/task/{busiest[0]}/stack"))
            about["system_call"] = _read(Path(f"/proc/{process}/task/{busiest[0]}/syscall"))
            if py_spy:
                shown = subprocess.run(
                    [py_spy, "dump", "--native", "--pid", str(process)], capture_output=True, text=True
                )
                about["py_spy"] = shown.stdout
        found[f"{kind} {process}"] = about
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        return str(error)


async def first_tokens(url: str, rest_s: float, times: int) -> dict[str, float]:
    """Median ms to the first token, of requests one behind the other and of requests behind a rest."""
    bus = await NatsBus.connect(url, name="idle-cores")
    client = await Client.open(bus)
    answers = await request_all(bus, subjects.STATUS, ANSWER_S)
    model = next(answer["model"] for answer in answers if answer["kind"] == "executor")

    async def one() -> float:
        body = {"model": model, "prompt": [300] * PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
        sent_s, first_s = time.monotonic(), 0.0
        async for frame in client.stream(body):
            if frame["type"] == "delta" and not first_s:
                first_s = time.monotonic() - sent_s
        return 1e3 * first_s

    for _ in range(3):
        await one()
    at_once = [await one() for _ in range(times)]
    behind = []
    for _ in range(times):
        await asyncio.sleep(rest_s)
        behind.append(await one())
    await bus.drain()
    return {"ttft_at_once_ms": statistics.median(at_once), "ttft_behind_rest_ms": statistics.median(behind)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.idle_cores", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--settle", type=float, default=30.0, help="from ready on: L1 is pinned meanwhile, s")
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--py-spy", default="", help="its program, to show what a busy executor does")
    parser.add_argument("--log", default=os.devnull)
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="of `up`")
    asked = parser.parse_args()
    with running_up(asked.flags, log=asked.log) as (up, url):
        time.sleep(asked.settle)
        never_asked = rested(up, asked.seconds, asked.py_spy)
        tokens = asyncio.run(first_tokens(url, 1.0, asked.times))
        after = rested(up, asked.seconds, asked.py_spy)
    report = {"flags": asked.flags, "before_any_request": never_asked, "after_requests": after, **tokens}
    print(json.dumps(report, indent=1), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
