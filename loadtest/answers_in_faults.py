"""Kills or stops one service while a real model answers, and compares all answers with undisturbed ones.

    python -m loadtest.answers_in_faults --rounds 40 --out answers.json -- --backend torch --dtype f32

The requests are those of `loadtest.durable --mix real`: two choices with stop strings, JSON schemas, log
probabilities. Each round draws a service and whether it dies or is stopped for some seconds, also not at all.
Flags after `--` go to `headrace up`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.durable import Numbered, plain, real
from loadtest.running_up import running_up

KINDS = ("tokenizer", "scheduler", "executor", "detokenizer")
LATEST_S = 5.0  # the fault comes by then: the answers take longer
STOPPED_S = (0.5, 8.0)  # shorter than the 15 s after which `up` replaces a hung service


async def disturb(pid: int, fault: tuple[str, str], rng: random.Random) -> None:
    """Kill or stop a service of this kind after a random time; "none" does nothing."""
    what, kind = fault
    await asyncio.sleep(rng.uniform(0.2, LATEST_S))
    victims = faults.pids_of(pid, kind)
    if what == "none" or not victims:
        return
    victim = rng.choice(victims)
    if what == "kill":
        faults.kill(victim)
    else:
        await faults.stop(victim, rng.uniform(*STOPPED_S))


async def one_round(url: str, pid: int, asked: Numbered, fault: tuple[str, str], rng: random.Random) -> Any:
    """The choices of each answer, with one fault meanwhile."""
    answers, _ = await asyncio.gather(plain(url, asked), disturb(pid, fault, rng))
    return [answer["choices"] for answer in answers]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.answers_in_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--out", type=Path)
    parser.add_argument("up", nargs="*", help="for `headrace up`")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    kinds = [("none", "executor"), *((what, kind) for what in ("kill", "stop") for kind in KINDS)]
    rounds = []
    with running_up(("--no-durable", *given.up)) as (pid, url):

        def answers(number: int, fault: tuple[str, str]) -> list[Any]:
            bodies = [real(i) for i in range(given.requests)]
            asked = [(t, {**body, "request_id": f"{number}-{body['request_id']}"}) for t, body in bodies]
            found: list[Any] = asyncio.run(one_round(url, pid, asked, fault, rng))
            return found

        wanted = answers(0, ("none", "executor"))
        for number in range(1, given.rounds + 1):
            fault = rng.choice(kinds)
            found = answers(number, fault)
            different = [
                {"request": i, "answer": got, "undisturbed": want}
                for i, (got, want) in enumerate(zip(found, wanted, strict=True))
                if got != want
            ]
            rounds.append({"fault": " ".join(fault), "different": different})
            print(f"{number} {' '.join(fault)}: {len(different)} differ", file=sys.stderr)
    report = {
        "requests": given.requests, "seed": given.seed, "up": given.up, "rounds": rounds,
        "answers": given.requests * given.rounds,
        "equal": sum(given.requests - len(each["different"]) for each in rounds),
    }  # fmt: skip
    print(json.dumps({name: value for name, value in report.items() if name != "rounds"}))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["answers"] == report["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
