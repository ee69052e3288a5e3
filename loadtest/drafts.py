"""Measures what drafts gain: the same requests with and without them, in turn, on one fleet.

    python -m loadtest.drafts --rounds 15 --out OUT.json
    python -m loadtest.drafts --loads copy --clients 1 8 -- --dtype f32

Loads: `copy` goes on with a text that stands twice in the prompt, `edit` repeats code with a name changed,
`predict` is `edit` with the code as `prediction`, `chat` is short questions, `again` the same questions by a
tenant that has asked them before, `object` an answer within a JSON schema. In the others each round has
tenants of its own, whose earlier answers hold no drafts. A request without drafts has `"speculate": false`.
All requests are greedy, and the program ends with an error if an answer differs. A
ratio is that of one round: seconds without drafts over seconds with them; the order changes with each round,
and the first round only warms up. Flags after `--` go to `headrace up`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import deque
from typing import Any

from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, Body, connected, machine, running_up
from shared.client.client import Client

CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        return self.balance

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)
        return self.balance
"""
SENTENCES = (
    "The river rises in the hills above the town and runs east for forty miles.",
    "In spring it is brown with mud, and the lower fields stand under water for a week or two.",
    "The mill at the old bridge has not worked since the war, but its wheel still turns.",
    "Children fish from the wall in the evenings, and herons wait on the stones below.",
    "A train passes twice a day, slow enough to count the windows.",
    "Two old oaks stand beside the school, and a bench runs around each of them.",
    "On market days the square smells of bread, wet wool and diesel.",
    "The baker closes at noon, and puts what is left on a table at the door.",
)  # fmt: skip
EDIT = f"Rename `balance` to `total` in this code and repeat all of it:\n\n```python\n{CODE}```"
QUESTIONS = (
    "What is the capital of France?", "Why is the sky blue?", "Write a short story about a robot.",
    "How do I boil an egg?", "Explain gravity to a child.", "Name five rivers and where they end.",
    "What is a prime number?", "Describe the ocean in autumn.",
)  # fmt: skip
RIVER = {
    name: {"type": kind}
    for name, kind in {
        "name": "string",
        "length_km": "integer",
        "country": "string",
        "flows_into": "string",
    }.items()
}
SCHEMA = {"type": "object", "properties": RIVER, "required": [*RIVER], "additionalProperties": False}
TOKENS = {"copy": 80, "edit": 200, "predict": 200, "chat": 96, "again": 96, "object": 96}


def bodies(load: str, clients: int) -> list[Body]:
    """A request for each client."""
    asked: list[str] = {"copy": [], "edit": [EDIT], "predict": [EDIT]}.get(load, [*QUESTIONS])
    if load == "object":
        asked = [
            f"Describe the {name} as JSON." for name in ("Nile", "Rhine", "Volga", "Seine", "Thames", "Po")
        ]
    found: list[Body] = []
    for number in range(clients):
        body: Body = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS[load], "ignore_eos": True}
        if load == "copy":
            text = " ".join(sentences := random.Random(number).sample(SENTENCES, 6))
            body["prompt"] = f"{text}\n\n{text}\n\n{sentences[0]}"
        else:
            again = f"{number}. " if number >= len(asked) else ""  # no two answers are the same
            text = again + asked[number % len(asked)]
            body["messages"] = [{"role": "user", "content": text}]
        if load == "object":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
            body["ignore_eos"] = False
        if load == "predict":
            body["prediction"] = {"type": "content", "content": CODE.replace("balance", "total")}
        found.append(body)
    return found


async def answered(
    client: Client, asked: list[Body], *, drafts: bool, clients: int = 0
) -> tuple[float, int, list[str]]:
    """The seconds and tokens of these requests, and their answers: so many at once, or all of them."""
    left, replies = deque(asked), list[Body]()

    async def one_by_one() -> None:
        while left:
            replies.append(await client.complete({**left.popleft(), "speculate": drafts}))

    began_s = time.monotonic()
    await asyncio.gather(*(one_by_one() for _ in range(clients or len(asked))))
    took_s = time.monotonic() - began_s
    tokens = sum(reply["usage"]["completion_tokens"] for reply in replies)
    texts = [str(reply["choices"][0].get("message", reply["choices"][0])) for reply in replies]
    return took_s, tokens, sorted(texts)


async def rounds_of(client: Client, load: str, clients: int, rounds: int, turns: int) -> dict[str, Any]:
    """The figures of a load. Raises SystemExit if drafts have changed an answer."""
    asked, times = bodies(load, clients * turns), {True: list[float](), False: list[float]()}
    tokens = 0
    for number in range(rounds + 1):
        texts: dict[bool, list[str]] = {}
        for drafts in (True, False) if number % 2 else (False, True):
            tenant = load if load == "again" else f"{load}-{clients}-{number}-{drafts}"
            took_s, tokens, texts[drafts] = await answered(
                client.as_tenant(tenant), asked, drafts=drafts, clients=clients
            )
            if number:
                times[drafts].append(took_s)
        if texts[True] != texts[False]:
            raise SystemExit(f"drafts have changed an answer of {load} with {clients} clients")
    ratios = sorted(off / on for on, off in zip(times[True], times[False], strict=True))
    return {
        "load": load,
        "clients": clients,
        "tokens_per_s": {
            name: round(tokens / statistics.median(times[drafts]), 1)
            for name, drafts in (("with", True), ("without", False))
        },
        "ratio": round(statistics.median(ratios), 3),
        "rounds_90": [round(ratios[int(len(ratios) * part)], 3) for part in (0.05, 0.95)],
        "rounds": rounds,
        "turns": turns,
    }


async def measured(
    url: str, loads: list[str], clients: list[int], rounds: int, turns: int
) -> list[dict[str, Any]]:
    found = []
    async with connected(url) as client:
        for load in loads:
            for count in clients:
                found.append(await rounds_of(client, load, count, rounds, turns))
                print(found[-1], flush=True)
    return found


def main() -> None:
    """The program."""
    parser = parser_of("drafts", __doc__, up=True)
    parser.add_argument("--loads", nargs="+", default=list(TOKENS), choices=TOKENS)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=1, help="requests of each client in a round")
    given = parser.parse_args()
    with running_up(given.up) as (_, url):
        figures = asyncio.run(measured(url, given.loads, given.clients, given.rounds, given.turns))
    report({"machine": machine(), "flags": given.up, "figures": figures}, given.out, figures)


if __name__ == "__main__":
    main()
