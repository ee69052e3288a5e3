"""Measures tokens a second and the first start with fewer cores than threads: beside busy processes and under
CPU quotas: of one answer after the other, and of several clients at once with prompts and answers of unequal
lengths. Each case runs with the default number of threads and with each fixed one, and `headrace up` is
started anew every time, so that its start is in the figures, too.

    python -m loadtest.few_cores --out few_cores.json           (as root, for the quotas)

Run it on a quiet machine. The last output is the table. `goals` are the conditions: the default reaches 0.9
of the best fixed number in each case, alone and at once, a third of its speed alone beside one busy process,
and starts within twice the time of the fastest start of its case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtest.fleet import MODEL, cpu_name
from loadtest.running_up import running_up
from shared.client.client import Client
from shared.nats.bus import NatsBus
from shared.processes import die_with_parent, usable_cores

CASES = "alone,busy1,busy2,cpus1.0,cpus1.5"
GROUPS, GROUP = Path("/sys/fs/cgroup"), "headrace-few-cores"
PERIOD_US = 100_000
PROMPT = 32
SPIN = "while True: pass"


def figures(case: str, threads: int, asked: argparse.Namespace) -> dict[str, Any]:
    """One start of `up` in a case: `threads` 0 is the default."""
    env = {"HEADRACE_THREADS": str(threads)}
    flags = ["--max-context", "2048", *asked.flags.split()]
    with ExitStack() as stack:
        for _ in range(int(case.removeprefix("busy")) if case.startswith("busy") else 0):
            stack.enter_context(busy())
        leave = stack.enter_context(limited(float(case[4:]))) if case.startswith("cpus") else None
        began_s = time.monotonic()
        _, url = stack.enter_context(running_up(flags, env, asked.log))
        start_s = time.monotonic() - began_s
        if leave is not None:
            leave.write_text(str(os.getpid()))  # this program asks from outside
        reads = asyncio.run(answers(url, asked.tokens, asked.repeats))
        together = asyncio.run(at_once(url, asked.clients, asked.tokens, asked.each)) if asked.clients else {}
    rates = [round(rate, 2) for rate, _ in reads]
    found = {
        "case": case, "threads": threads or "default", "start_s": round(start_s, 2), "tok_s": rates[1:],
        "tok_s_median": statistics.median(rates[1:]), "first_answer_tok_s": rates[0],
        "ttft_ms": [round(1e3 * first_s, 1) for _, first_s in reads], **together,
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


async def answers(url: str, tokens: int, repeats: int) -> list[tuple[float, float]]:
    """(Tokens a second behind the first, seconds to the first) of one answer after the other."""
    bus = await NatsBus.connect(url, name="few-cores")
    client = await Client.open(bus)
    found = []
    for i in range(repeats + 1):
        sent_s = time.monotonic()
        done, parts_s = await _answer(client, 37 * i, PROMPT, tokens)
        found.append(((done - 1) / (parts_s[-1] - parts_s[0]), parts_s[0] - sent_s))
    await bus.drain()
    return found


async def at_once(url: str, clients: int, tokens: int, each: int) -> dict[str, float]:
    """Tokens a second of so many clients, and the 99th percentiles of the times to a first token and between
    two messages, ms. A client asks for `each` answers, one after the other; lengths are between a tenth of
    `tokens` and twice as many, the same at each call."""
    bus = await NatsBus.connect(url, name="few-cores")
    client = await Client.open(bus)
    firsts_s, gaps_s, total = list[float](), list[float](), 0

    async def ask(number: int) -> None:
        nonlocal total
        draw = random.Random(number)
        for _ in range(each):
            prompt, answer = (draw.randint(tokens // 10, 2 * tokens) for _ in range(2))
            sent_s = time.monotonic()
            done, parts_s = await _answer(client, draw.randrange(9_000), prompt, answer)
            total += done
            firsts_s.append(parts_s[0] - sent_s)
            gaps_s.extend(later - earlier for earlier, later in pairwise(parts_s))

    began_s = time.monotonic()
    await asyncio.gather(*(ask(number) for number in range(clients)))
    took_s = time.monotonic() - began_s
    await bus.drain()
    p99_ms = [round(1e3 * statistics.quantiles(times, n=100)[-1], 1) for times in (firsts_s, gaps_s)]
    return {
        "at_once_tok_s": round(total / took_s, 1), "at_once_ttft_p99_ms": p99_ms[0],
        "at_once_itl_p99_ms": p99_ms[1],
    }  # fmt: skip


async def _answer(client: Client, first: int, prompt: int, tokens: int) -> tuple[int, list[float]]:
    """(Tokens of an answer, when its parts came)."""
    ids = [300 + (first + k) % 9_000 for k in range(prompt)]
    body = {"model": MODEL, "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    parts_s, done = list[float](), 0
    async for frame in client.stream(body, timeout_s=600):
        if frame["type"] == "delta":
            parts_s.append(time.monotonic())
        elif frame["type"] == "done":
            done = frame["usage"]["completion_tokens"]
    return done, parts_s


@contextmanager
def busy() -> Iterator[None]:
    """A process that would have a core for itself."""
    process = subprocess.Popen([sys.executable, "-c", SPIN], preexec_fn=die_with_parent())
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def limited(cpus: float) -> Iterator[Path]:
    """This process, and what it starts, in a control group with a quota of so many CPUs. Where it writes its
    id to leave it."""
    v2 = (GROUPS / "cgroup.controllers").exists()
    above = GROUPS if v2 else GROUPS / "cpu"
    group = above / GROUP
    if v2:
        (above / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir(exist_ok=True)
    quota_us = round(cpus * PERIOD_US)
    if v2:
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield above / "cgroup.procs"
    finally:
        (above / "cgroup.procs").write_text(str(os.getpid()))
        while (group / "cgroup.procs").read_text().split():
            time.sleep(0.05)  # what was started ends
        group.rmdir()


def goals(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each case, what the default reaches of the best fixed count, of alone, and of the quickest start."""
    told = {}
    alone = max((one["tok_s_median"] for one in found if one["case"] == "alone"), default=0.0)
    for case in dict.fromkeys(one["case"] for one in found):
        here = [one for one in found if one["case"] == case]
        default = [one for one in here if one["threads"] == "default"]
        fixed = [one for one in here if one["threads"] != "default"]
        if default and fixed:
            told[case] = {
                "of_best_fixed": round(
                    default[0]["tok_s_median"] / max(one["tok_s_median"] for one in fixed), 3
                ),
                **_of_best_at_once(default[0], fixed),
                "of_alone": round(default[0]["tok_s_median"] / alone, 3) if alone else None,
                "start_of_quickest": round(default[0]["start_s"] / min(one["start_s"] for one in here), 2),
            }
    return told


def _of_best_at_once(default: dict[str, Any], fixed: list[dict[str, Any]]) -> dict[str, float]:
    key = "at_once_tok_s"
    return {"at_once": round(default[key] / max(one[key] for one in fixed), 3)} if key in default else {}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.few_cores", description=__doc__)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--threads", default="", help="fixed counts; empty: each up to the cores")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="answers that count, behind a first one")
    parser.add_argument("--clients", type=int, default=16, help="at once; 0: only one after the other")
    parser.add_argument("--each", type=int, default=4, help="answers of a client")
    parser.add_argument("--flags", default="--dtype f32", help="further flags of `up`")
    parser.add_argument("--log", default=os.devnull, help="what the services say")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    most = max(1, int(usable_cores()))
    counts = [int(n) for n in asked.threads.split(",") if n] or list(range(1, most + 1))
    found = [
        figures(case, threads, asked)
        for case in asked.cases.split(",")
        for threads in dict.fromkeys([0, *counts])
    ]
    machine = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "kernel": platform.release(),
        "load": os.getloadavg(),
    }
    report = {"machine": machine, "goals": goals(found), "runs": found}
    print(json.dumps(report["goals"], indent=1), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
