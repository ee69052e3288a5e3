"""Measures the time from `headrace up` to the first token of a chat, phase by phase: cold, with no compiled
kernels on the machine, and warm. Each round does one of both, each in a home folder of its own.

    python -m loadtest.first_token --rounds 5 --out first_token.json -- --dtype bf16

Flags after `--` go to `up`. The goal: 6 s cold, 3 s warm on two cores. The model must have been pulled. A
phase is the time from the start of `up` to its end. CPU seconds are those of each process up to the first
token: they depend less on other work of the machine. Files come from the page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from loadtest.idle_cores import processes, thread_s
from loadtest.running_up import STOP_S
from shared.client import Client
from shared.config import load
from shared.nats.bus import NatsBus
from shared.vocab.files import resolve

GOALS_S = {"cold": 6.0, "warm": 3.0}
# A line of the log that ends a phase.
PHASES = (
    ("first log line of a service", r"\|"),
    ("executor: libraries imported", r"executor .*loading "),
    ("executor: weights loaded", r"executor .*KV blocks of"),
    ("executor: kernels ready", r"executor .*is ready"),
    ("tokenizer ready", r"tokenizer.*is ready"),
    ("detokenizer ready", r"detokenizer.*is ready"),
    ("scheduler ready", r"scheduler.*is ready"),
    ("gateway ready", r"gateway.*is ready"),
    ("up: a request was answered", r"^ready after"),
)
FIRST_TOKEN = "first token of a chat"


def measured(home: Path, flags: list[str]) -> dict[str, Any]:
    """One start in `home`: s of each phase, and CPU s of each process up to the first token."""
    settings = load().settings
    env = {
        **os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(home), "PYTHONUNBUFFERED": "1",
        "HEADRACE_CACHE_DIR": str(settings.cache_dir.expanduser()),
    }  # fmt: skip
    own = ("--port", "0", "--http", "127.0.0.1:0")
    load_before = os.getloadavg()[0]
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "services.launcher.cli", "up", *own, *flags],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    phases: dict[str, float] = {}
    url, lines = "", []
    try:
        for line in process.stdout:
            now_s = time.monotonic() - began_s
            lines.append(line)
            for phase, pattern in PHASES:
                if phase not in phases and re.search(pattern, line):
                    phases[phase] = now_s
            url = url or "".join(re.findall(r"NATS: +(nats://\S+)", line))
            if line.startswith("ready after"):
                break
        else:
            raise SystemExit(f"`headrace up` ended\n{''.join(lines[-8:])}")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # or its pipe fills up
        asyncio.run(first_token(url, resolve(settings.model, settings.cache_dir).name))
        phases[FIRST_TOKEN] = time.monotonic() - began_s
        cpu_s: dict[str, float] = {"up": sum(thread_s(process.pid).values())}
        for pid, kind in processes(process.pid).items():
            cpu_s[kind] = cpu_s.get(kind, 0.0) + sum(thread_s(pid).values())
        return {"phases_s": phases, "cpu_s": cpu_s, "load_before": load_before}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


async def first_token(url: str, model: str) -> None:
    """Return at the first text of a chat."""
    bus = await NatsBus.connect(url, name="first-token")
    client = await Client.open(bus)
    body = {"model": model, "messages": [{"role": "user", "content": "What is NATS?"}], "max_tokens": 16}
    async for frame in client.stream(body):
        if frame["type"] == "delta":
            break
    await bus.drain()


def table(rounds: list[dict[str, Any]]) -> str:
    """Median, least and most of every phase, and the median CPU s."""
    rows = [f"{'s since the start of up':<34}" + "".join(f"{kind:>22}" for kind in GOALS_S)]
    for part, names in (
        ("phases_s", [phase for phase, _ in PHASES] + [FIRST_TOKEN]),
        ("cpu_s", sorted({kind for each in rounds for kind in each["cpu_s"]})),
    ):
        if part == "cpu_s":
            rows.append("CPU s up to the first token")
        for name in names:
            row = f"{name:<34}"
            for kind in GOALS_S:
                found = [each[part][name] for each in rounds if each["kind"] == kind and name in each[part]]
                low_high = f" ({min(found):.2f}…{max(found):.2f})" if found else ""
                spread = f"{statistics.median(found):.2f}{low_high}" if found else "–"
                row += f"{spread:>22}"
            rows.append(row)
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON of every round")
    parser.add_argument("flags", nargs="*", help="for `headrace up`, after --")
    given = parser.parse_args()
    rounds = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as home:
            for kind in GOALS_S:
                rounds.append({"kind": kind, **measured(Path(home), given.flags)})
                print(kind, {name: round(s, 2) for name, s in rounds[-1]["phases_s"].items()}, flush=True)
    print(table(rounds))
    if given.out:
        document = {"flags": given.flags, "cores": len(os.sched_getaffinity(0)), "rounds": rounds}
        given.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
