"""Kills two services, one shortly after the other, while a real model answers; compares every token id.

    python -m loadtest.two_deaths --out two_deaths.json -- --backend torch --dtype f32
    python -m loadtest.two_deaths --pairs scheduler+executor executor+scheduler -- --backend torch --dtype f32

Each ordered pair of services and the nats-server has a round of greedy requests: SIGKILL to the first after a
random share of the tokens, and to the second a random time later, while the first is away or has just come
back. Each id that a scheduler sends must be that of the undisturbed answer at its place, in every attempt,
and each answer must be that answer. Flags after `--` go to `headrace up`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest import faults
from loadtest.bench.machine import circumstances
from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, connected, running_up
from loadtest.leaks import settle
from shared import codec
from shared.client.client import Client
from shared.errors import HeadraceError
from shared.messages import Open, Tokens
from shared.nats.interface import Delivery

KINDS = ("tokenizer", "scheduler", "executor", "kv_offload", "detokenizer", "nats-server")
PAIRS = tuple(itertools.permutations(KINDS, 2))
COUNTS = {"tokenizer": 2, "scheduler": 1, "executor": 1, "kv_offload": 1, "detokenizer": 2}
SHARE = (0.05, 0.4)  # of the tokens that have come when the first one dies
GAP_S = (0.05, 4.0)  # from the first death to the second
LIMIT_S, SETTLE_S = 300.0, 120.0
MOST_SHOWN = 20
TAPPED = "hr.default.detokenizer.*.in.*"

Answer = tuple[str, int]  # text, tokens


@dataclass(slots=True)
class Round:
    """What became of the requests of one pair."""

    pair: str
    gap_s: float = 0.0
    open_at: list[int] = field(default_factory=list)  # requests without an answer at each death
    equal: int = 0
    different: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ids: int = 0  # that schedulers sent
    other_ids: list[str] = field(default_factory=list)
    longest_s: float = 0.0


class Ids:
    """The token ids on their way to the detokenizers, by request and place; in several attempts a place has
    several."""

    def __init__(self) -> None:
        self.by_request: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.count = 0
        self._names: dict[int, str] = {}

    def on_message(self, delivery: Delivery) -> None:
        """A message."""
        message = codec.decode(delivery.data).message
        if isinstance(message, Open):
            self._names[message.seq] = message.request
        elif isinstance(message, Tokens):
            ids = iter(message.ids)
            for seq, first, count in zip(message.seqs, message.first, message.counts, strict=True):
                for nth, token in enumerate(itertools.islice(ids, count)):
                    if seq in self._names:  # its Open may have been lost with the server
                        self.by_request[self._names[seq]][first + nth].add(token)
                        self.count += 1


def name_of(pair: str, number: int) -> str:
    """The id of a request of a round."""
    return f"{pair.replace('+', '.')}.{number}"


def body_of(number: int, pair: str, tokens: int) -> dict[str, Any]:
    """A greedy request."""
    asked = f"Describe river number {number} and the mill beside it."
    return {
        "model": MODEL, "messages": [{"role": "user", "content": asked}], "temperature": 0, "seed": number,
        "max_tokens": tokens, "ignore_eos": True, "stream": False, "request_id": name_of(pair, number),
    }  # fmt: skip


async def ask(client: Client, body: dict[str, Any]) -> Answer:
    """One answer. Raises as the client does."""
    reply = await client.complete(body, timeout_s=LIMIT_S)
    return reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"]


@asynccontextmanager
async def tapped(url: str, take: Callable[[Delivery], None]) -> AsyncIterator[Client]:
    """A client of a fleet that holds nothing, while `take` gets all messages to detokenizers."""
    async with connected(url) as client:
        await settle(client.bus, COUNTS, SETTLE_S)
        await client.bus.subscribe(TAPPED, take)
        await client.bus.flush()
        yield client
        await client.bus.flush()


async def undisturbed(url: str, given: argparse.Namespace) -> tuple[list[Answer], list[list[int]]]:
    """The answer of each request, and its ids."""
    ids, bodies = Ids(), [body_of(i, "wanted", given.tokens) for i in range(given.requests)]
    async with tapped(url, ids.on_message) as client:
        answers = await asyncio.gather(*(ask(client, body) for body in bodies))
    found = [ids.by_request[body["request_id"]] for body in bodies]
    return answers, [[next(iter(of[place])) for place in range(given.tokens)] for of in found]


async def one_round(
    fleet: tuple[int, str],
    pair: tuple[str, str],
    given: argparse.Namespace,
    wanted: tuple[list[Answer], list[list[int]]],
) -> Round:
    """All requests at once, and both deaths meanwhile."""
    pid, url = fleet
    rng, result = random.Random(f"{given.seed} {pair}"), Round("+".join(pair))
    ids, enough = Ids(), asyncio.Event()
    share = rng.uniform(*SHARE) * given.requests * given.tokens
    result.gap_s = round(rng.uniform(*GAP_S), 2)

    def take(delivery: Delivery) -> None:
        ids.on_message(delivery)
        if ids.count >= share:
            enough.set()

    async def timed(client: Client, number: int) -> None:
        began_s = time.monotonic()
        try:
            answer = await ask(client, body_of(number, result.pair, given.tokens))
        except HeadraceError as error:
            result.errors.append(f"{number}: {error.code} {error.message}"[:200])
        else:
            result.equal += answer == wanted[0][number]
            if answer != wanted[0][number]:
                result.different.append(f"{number}: {answer}")
        result.longest_s = max(result.longest_s, round(time.monotonic() - began_s, 1))

    async with tapped(url, take) as client:
        asked = [asyncio.create_task(timed(client, number)) for number in range(given.requests)]
        came = asyncio.ensure_future(enough.wait())
        await asyncio.wait([came, *asked], return_when=asyncio.FIRST_COMPLETED)
        for kind, wait_s in zip(pair, (0.0, result.gap_s), strict=True):
            await asyncio.sleep(wait_s)
            result.open_at.append(sum(not task.done() for task in asked))
            if pids := faults.pids_of(pid, kind):
                faults.kill(rng.choice(pids))
        await asyncio.gather(*asked)
    result.ids = ids.count
    for number, right in enumerate(wanted[1]):
        for place, found in ids.by_request[name_of(result.pair, number)].items():
            if found != {right[place]} and len(result.other_ids) < MOST_SHOWN:
                result.other_ids.append(f"{number}: at {place} {sorted(found)}, not {right[place]}")
    async with connected(url) as client:
        await settle(client.bus, COUNTS, SETTLE_S)
    return result


def _pair(text: str) -> tuple[str, str]:
    pair = tuple(text.split("+"))
    if len(pair) != 2 or not {*pair} <= {*KINDS}:
        raise argparse.ArgumentTypeError(f"two of {', '.join(KINDS)}, joined by +")
    return pair


def main() -> int:
    """Run all pairs; 1 if an answer or an id is another one."""
    parser = parser_of("two_deaths", __doc__, up=True)
    parser.add_argument("--pairs", nargs="+", type=_pair, default=PAIRS, help="like scheduler+executor")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--log", default="/dev/null", help="a file for the services' log")
    given = parser.parse_args()
    rounds: list[Round] = []
    with running_up(("--no-durable", *given.up), log=given.log) as fleet:
        wanted = asyncio.run(undisturbed(fleet[1], given))
        for pair in given.pairs:
            rounds.append(asyncio.run(one_round(fleet, pair, given, wanted)))
            print(json.dumps(asdict(rounds[-1])), file=sys.stderr, flush=True)
    found: dict[str, Any] = {
        "circumstances": circumstances(), "requests": given.requests, "tokens": given.tokens,
        "seed": given.seed, "up": given.up, "pairs": len(rounds),
        "answers": given.requests * len(rounds), "equal": sum(each.equal for each in rounds),
        "ids": sum(each.ids for each in rounds), "other_ids": sum(len(each.other_ids) for each in rounds),
        "longest_s": max(each.longest_s for each in rounds), "rounds": [asdict(each) for each in rounds],
    }  # fmt: skip
    report(found, given.out, shown={name: value for name, value in found.items() if name != "rounds"})
    return 0 if found["answers"] == found["equal"] and not found["other_ids"] else 1


if __name__ == "__main__":
    sys.exit(main())
