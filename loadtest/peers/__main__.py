"""Servers side by side: `python -m loadtest.peers loadtest/peers/smollm2.toml --rounds 3 --out FOLDER`.

Flags after `--` go to `headrace bench run`, and those after each further `--` to another run of it on the
same server; without them 128 tokens in and 96 out, concurrency 1, 8 and 32, two requests for each client.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from loadtest.bench.machine import circumstances
from loadtest.peers.ratios import rows, settings, starts, table
from loadtest.peers.server import read_peers
from loadtest.peers.turns import side_by_side, take_turns
from shared.errors import BadRequest, HeadraceError

LOAD = [
    *("--input-len", "128", "--output-len", "96"),
    *("--num-prompts", "64", "--per-client", "2", "--max-concurrency", "1,8,32", "--num-warmups", "8"),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    ends = [*(i for i, word in enumerate(words) if word == "--"), len(words)]
    loads = [words[end + 1 : next_end] for end, next_end in pairwise(ends)] or [LOAD]
    parser = argparse.ArgumentParser(prog="python -m loadtest.peers", description=__doc__)
    parser.add_argument("peers", type=Path, help="a TOML file of servers")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of them; ratios are of the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side-by-side", action="store_true", help="start all at once: each load in turn")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for results and logs")
    given = parser.parse_args(words[: ends[0]])
    try:
        peers = {peer.name: peer for peer in read_peers(given.peers)}
        if missing := [name for name in given.only or () if name not in peers]:
            raise BadRequest(f"{given.peers} describes no {missing[0]}: it has {', '.join(peers)}")
        chosen = [peers[name] for name in given.only or peers]
        take = side_by_side if given.side_by_side else take_turns
        turns = take(chosen, given.rounds, loads, given.out)
    except HeadraceError as error:
        print(f"error {error.code} {error.type}: {error.message}", file=sys.stderr)
        return 1
    result = circumstances() | {"peers": [asdict(peer) for peer in chosen], "loads": loads}
    result |= {"rows": rows(turns), "starts": starts(turns)}
    (given.out / "peers.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(turns), "", settings(chosen), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
