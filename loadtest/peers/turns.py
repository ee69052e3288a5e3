"""The turns of servers under the same loads: one at a time, started anew for its turn and ended after it.

    round 1: a b c     round 2: b c a     round 3: c a b

So no idle server takes cores or memory from the measured one, and each start is timed, too. All requests of a
round are the same for every server.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.bench import document
from loadtest.bench.compare import point_name
from loadtest.peers.server import Peer, running
from shared.errors import SetupError

Loads = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One server in one round. `results` as `headrace bench run --json` writes them, one for each load;
    `cores` are those that it kept busy while it was under load, on average."""

    round: int
    peer: str
    ready_s: float
    memory_bytes: int
    cores: float
    results: list[dict[str, Any]]

    def runs(self) -> dict[str, dict[str, Any]]:
        """Those of all loads, by name."""
        return {
            "{input_len} in, {output_len} out, ".format_map(result["configuration"]) + point_name(run): run
            for result in self.results
            for run in result["runs"]
        }


def order(peers: Sequence[Peer], number: int) -> list[Peer]:
    """The order of the servers in round `number`: each is first as often as the others."""
    first = number % len(peers)
    return [*peers[first:], *peers[:first]]


def take_turns(peers: Sequence[Peer], rounds: int, loads: Loads, folder: Path) -> list[Turn]:
    """Every turn; a load is flags of `headrace bench run`. Results and logs are kept in `folder`. Raises
    SetupError when a server does not start or a request fails."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        take_turn(peer, number, loads, folder) for number in range(rounds) for peer in order(peers, number)
    ]


def take_turn(peer: Peer, number: int, loads: Loads, folder: Path) -> Turn:
    """One of them."""
    with running(peer, folder / f"{peer.name}-{number + 1}.log") as server:
        print(f"{peer.name}, round {number + 1}: answers after {server.ready_s:.1f} s", flush=True)
        began_s, used_s = time.monotonic(), server.cpu_s()
        results = [load_on(peer, number, loads, i, folder) for i in range(len(loads))]
        cores = (server.cpu_s() - used_s) / (time.monotonic() - began_s)
        return Turn(number, peer.name, server.ready_s, server.memory_bytes(), cores, results)


def side_by_side(peers: Sequence[Peer], rounds: int, loads: Loads, folder: Path) -> list[Turn]:
    """The same with all servers started once: a load goes to one server after the other, while the others are
    idle. So seconds lie between the figures of a ratio, not minutes: for servers that are nearly as fast."""
    folder.mkdir(parents=True, exist_ok=True)
    turns = []
    with ExitStack() as stack:
        servers = {
            peer.name: stack.enter_context(running(peer, folder / f"{peer.name}.log")) for peer in peers
        }
        for number in range(rounds):
            results: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
            used_s, took_s = dict.fromkeys(servers, 0.0), dict.fromkeys(servers, 0.0)
            for i in range(len(loads)):
                for peer in order(peers, number + i):
                    began_s, used_before_s = time.monotonic(), servers[peer.name].cpu_s()
                    results[peer.name].append(load_on(peer, number, loads, i, folder))
                    used_s[peer.name] += servers[peer.name].cpu_s() - used_before_s
                    took_s[peer.name] += time.monotonic() - began_s
            print(f"round {number + 1} of {rounds}", flush=True)
            for name, server in servers.items():
                cores, memory_bytes = used_s[name] / took_s[name], server.memory_bytes()
                turns.append(Turn(number, name, server.ready_s, memory_bytes, cores, results[name]))
    return turns


def load_on(peer: Peer, number: int, loads: Loads, i: int, folder: Path) -> dict[str, Any]:
    """The result of load `i` in round `number`. The client is a process of its own, the same for every
    server. Each load has another seed: none of its prompts is in the prefix cache from an earlier one."""
    out = folder / (f"{peer.name}-{number + 1}" + f"-{i}" * bool(i) + ".json")
    words = [sys.executable, "-m", "loadtest.bench", "run", "--url", peer.url, "--label", peer.name]
    words += ["--seed", str(number * len(loads) + i), *loads[i], "--json", str(out)]
    if subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SetupError(
            f"the load on {peer.name} failed; {out} and the server's log beside it have the rest"
        )
    return document.read(out)
