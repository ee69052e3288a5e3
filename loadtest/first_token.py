"""Measures the time from `headrace up` to the first token of a chat, phase by phase: cold, with no compiled
kernels on the machine, and warm. Each round does one of both, each in a home folder of its own, and with
`--peers` starts each server of a TOML file too, as `loadtest.peers` reads it.

    python -m loadtest.first_token --rounds 5 --out first_token.json -- --dtype bf16
    python -m loadtest.first_token --peers loadtest/peers/smollm2_gguf.toml --only llama-q4_1

Flags after `--` go to `up`. The goals: 6 s cold, 3 s warm on two cores, and no more than 2.5 times a peer's
seconds in the same round. The model must have been pulled. A phase is the time from the start of `up` to its
end. The chat goes over HTTP to every server. CPU seconds are those of each process up to the first token:
they depend less on other work of the machine. Files come from the page cache.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.bench.over_http import HttpTransport
from loadtest.bench.pacer import Pacer
from loadtest.bench.record import Record
from loadtest.command_line import parser_of, report
from loadtest.fleet import STOP_S, machine
from loadtest.peers.server import Peer, read_peers, running
from loadtest.processes import cpu_s, name_of, tree
from shared.config import load

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
CHAT = {"messages": [{"role": "user", "content": "What is NATS?"}], "max_tokens": 1}


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
            url = url or "".join(re.findall(r"OpenAI API: +(http://[^/\s]+)", line))
            if line.startswith("ready after"):
                break
        else:
            raise SystemExit(f"`headrace up` ended\n{''.join(lines[-8:])}")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # or its pipe fills up
        asyncio.run(first_token(url))
        phases[FIRST_TOKEN] = time.monotonic() - began_s
        taken: dict[str, float] = defaultdict(float)
        for pid in tree(process.pid):
            taken[name_of(pid)] += cpu_s(pid)
        return {"phases_s": phases, "cpu_s": taken, "load_before": load_before}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


async def first_token(url: str) -> None:
    """Return when a chat of one token is answered."""
    transport, record = HttpTransport(url, Pacer()), Record("", 0)
    await transport.find_model()
    await transport.send({**CHAT}, record)
    await transport.close()
    if record.error:
        raise SystemExit(f"the chat failed: {record.error}")


def peer_measured(peer: Peer, home: Path) -> dict[str, Any]:
    """One start of another server."""
    load_before = os.getloadavg()[0]
    with running(peer, home / f"{peer.name}.log", CHAT) as server:
        taken = {peer.name: server.cpu_s()}
    return {"phases_s": {FIRST_TOKEN: server.ready_s}, "cpu_s": taken, "load_before": load_before}


def table(rounds: list[dict[str, Any]]) -> str:
    """Median, least and most of every phase, the median CPU s, and ratios to each peer, round by round."""
    kinds = list(dict.fromkeys(each["kind"] for each in rounds))
    rows = [f"{'s since the start':<34}" + "".join(f"{kind:>22}" for kind in kinds)]
    for part, names in (
        ("phases_s", [phase for phase, _ in PHASES] + [FIRST_TOKEN]),
        ("cpu_s", sorted({kind for each in rounds for kind in each["cpu_s"]})),
    ):
        if part == "cpu_s":
            rows.append("CPU s up to the first token")
        for name in names:
            row = f"{name:<34}"
            for kind in kinds:
                found = [each[part][name] for each in rounds if each["kind"] == kind and name in each[part]]
                row += f"{spread(found) if found else '–':>22}"
            rows.append(row)
    taken = {
        kind: [each["phases_s"][FIRST_TOKEN] for each in rounds if each["kind"] == kind] for kind in kinds
    }
    for peer in kinds[len(GOALS_S) :]:
        row = f"{'first token / ' + peer + chr(39) + 's':<34}"
        for kind in GOALS_S:
            row += f"{spread([a / b for a, b in zip(taken[kind], taken[peer], strict=True)]):>22}"
        rows.append(row)
    return "\n".join(rows)


def spread(found: list[float]) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(found):.2f} ({min(found):.2f}…{max(found):.2f})"


def main() -> None:
    parser = parser_of("first_token", __doc__, up=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, help="a TOML file of servers to start in each round, too")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of them")
    given = parser.parse_args()
    peers = [
        peer
        for peer in (read_peers(given.peers) if given.peers else [])
        if not given.only or peer.name in given.only
    ]
    rounds: list[dict[str, Any]] = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as home:
            starts = {kind: partial(measured, Path(home), given.up) for kind in GOALS_S}
            starts |= {peer.name: partial(peer_measured, peer, Path(home)) for peer in peers}
            for kind, start in starts.items():
                rounds.append({"kind": kind, **start()})
                print(kind, {name: round(s, 2) for name, s in rounds[-1]["phases_s"].items()}, flush=True)
    print(table(rounds))
    about = {"flags": given.up, **machine(), "peers": [asdict(peer) for peer in peers]}
    report({**about, "rounds": rounds}, given.out, shown=about)


if __name__ == "__main__":
    main()
