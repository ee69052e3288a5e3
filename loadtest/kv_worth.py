"""Are KV tiers worth it? On the real model, with real processes.

python -m loadtest.kv_worth chats --out out    chats that come back; prompts that do not
python -m loadtest.kv_worth curve --out out    bring back or compute again, by length
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from loadtest.worth import chats, curve


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["chats", "curve"])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--chats", type=int, default=8, help="conversations")
    parser.add_argument("--turns", type=int, default=3, help="of each")
    parser.add_argument("--words", type=int, default=350, help="of a first turn")
    parser.add_argument("--pairs", type=int, default=21, help="bursts without a hit")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(curve.LENGTHS), help="curve: tokens")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    command = f"python -m loadtest.kv_worth {args.what}"
    if args.what == "chats":
        command += f" --chats {args.chats} --turns {args.turns} --pairs {args.pairs}"
        size = chats.Size(args.chats, args.turns, args.pairs, args.words, args.threads)
        report = asyncio.run(chats.run(size, command))
    else:
        report = asyncio.run(curve.run(args.lengths, args.threads, command))
    print(report.markdown(), flush=True)
    if args.out:
        report.write(args.out)
        draw = chats.draw if args.what == "chats" else curve.draw
        draw(report, args.out / f"real_{report.name}.png")


if __name__ == "__main__":
    main()
