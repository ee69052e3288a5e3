"""Measures the copies of `loadtest.drafts` on servers that are up, in turn: Headrace beside others.

    python -m loadtest.copies headrace=http://127.0.0.1:8100 llama=http://127.0.0.1:8101 --rounds 11

With NAME=URL=PID seconds are CPU time of this process, which other work on the machine disturbs less.
A ratio is that of one round: the seconds of a server over those of the first one. The order changes with each
round, and the first round only warms up. `same` counts the answers that are those of the first server: other
arithmetic chooses another token at near ties.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from loadtest.command_line import parser_of, report
from loadtest.drafts import bodies
from loadtest.fleet import Body, machine


def text_of(url: str, body: Body) -> tuple[str, int]:
    """The answer to a completion, and its number of tokens."""
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=300) as reply:
        answer = json.load(reply)
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def clock_s(pid: str) -> float:
    """CPU time of a process so far; without one the time."""
    if not pid:
        return time.monotonic()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(servers: dict[str, list[str]], clients: int, rounds: int) -> dict[str, dict[str, Any]]:
    """The figures of each server with so many requests at once."""
    asked, names = bodies("copy", clients), list(servers)
    took_s: dict[str, list[float]] = {name: [] for name in names}
    tokens, same = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    with ThreadPoolExecutor(clients) as pool:
        for number in range(rounds + 1):
            texts: dict[str, list[str]] = {}
            for at in range(len(names)):
                name = names[(at + number) % len(names)]
                url, pid = servers[name]
                began_s = clock_s(pid)
                answers = list(pool.map(text_of, [url] * clients, asked))
                if number:
                    took_s[name].append(clock_s(pid) - began_s)
                texts[name] = [text.strip() for text, _ in answers]
                tokens[name] = sum(count for _, count in answers)
            for name in names:
                same[name] += sum(a == b for a, b in zip(texts[name], texts[names[0]], strict=True))
    found = {}
    for name in names:
        ratios = sorted(mine / first for mine, first in zip(took_s[name], took_s[names[0]], strict=True))
        found[name] = {
            "tokens_per_s": round(tokens[name] / statistics.median(took_s[name]), 1),
            "times_of_first": round(statistics.median(ratios), 3),
            "rounds_90": [round(ratios[int(len(ratios) * part)], 3) for part in (0.05, 0.95)],
            "same": f"{same[name]} of {clients * (rounds + 1)}",
        }
    return found


def main() -> None:
    """The program."""
    parser = parser_of("copies", __doc__)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL[=PID]")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    servers = {name: [*rest, ""][:2] for name, *rest in (server.split("=") for server in given.servers)}
    figures = {}
    for clients in given.clients:
        figures[clients] = measured(servers, clients, given.rounds)
        print(clients, figures[clients], flush=True)
    report({"machine": machine(), "rounds": given.rounds, "figures": figures}, given.out, figures)


if __name__ == "__main__":
    main()
