"""Durable requests and the loss of everything: SIGKILL of `up`, every service and the nats-server.

    python -m loadtest.durable --requests 1000 --kills 3 --out total_loss.json
    python -m loadtest.durable --mix real --requests 24 --kills 1 -- --backend torch --dtype f32
    python -m loadtest.durable --checkpoints --requests 200 --kills 2

Requests of three tenants are submitted; at random moments, measured in records, every process is killed and
a new `headrace up` starts on the same folder. A submit without a reply is repeated under its id. At the end
each request must have one record, and those with a seed must have the answers that an undisturbed fleet gives
to plain requests. `--mix real` asks for two choices, JSON schemas, stop strings and log probabilities.
With `--checkpoints` the tokens are kept; `resumed` has the requests that went on, and their tokens, by fleet.
Flags after `--` go to `headrace up` and replace the simulated engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable

from loadtest import faults
from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, SIM, Body, connected, running_up
from shared.client.client import Client
from shared.codec import decode
from shared.errors import HeadraceError, Unavailable
from shared.messages import Tokenized
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery, RequestTimeout

TENANTS = ("public", "acme", "bob")
OPEN = 64  # submits at a time
LOST_S = 600  # far above what any request takes: a guard against hanging
REFUSED_S = 120  # likewise, for a submit: clusters elect leaders, and an `up` starts, in some ten seconds
ACKED_S = 60  # likewise, for acks: a delivery without one comes again after 10 s
NOT_ENDED = ("queued", "running", "away")
ROWS = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

Numbered = list[tuple[str, Body]]  # tenant and body


def simulated(number: int) -> tuple[str, Body]:
    """A request of the simulated engine; ids occur once a tenant only. Every second one has a seed."""
    body: Body = {
        "request_id": f"r{number // 3}", "prompt": f"number {number}", "ignore_eos": True,
        "max_tokens": 20 + 7 * number % 300,
    }  # fmt: skip
    return TENANTS[number % 3], {**body, "seed": number} if number % 2 else body


def real(number: int) -> tuple[str, Body]:
    """A request of a real model: sampled choices with stop strings, a JSON schema, or a greedy completion."""
    asked = {"role": "user", "content": f"Describe river number {number} and the mill beside it."}
    schema = {"type": "json_schema", "json_schema": {"name": "r", "schema": ROWS}}
    kinds: list[Body] = [
        {"messages": [asked], "n": 2, "temperature": 0.9, "stop": ["mill", "."], "max_tokens": 120},
        {"messages": [asked], "response_format": schema, "temperature": 0.7, "max_tokens": 80},
        {"prompt": f"{number}. The river", "temperature": 0, "max_tokens": 90, "logprobs": 2},
    ]
    return TENANTS[number % 3], {**kinds[number % len(kinds)], "request_id": f"r{number}", "seed": number}


async def record_of(client: Client, tenant: str, request_id: str) -> Body:
    """Its record, once there is one; of a failed request its code."""
    async with asyncio.timeout(LOST_S):
        while True:
            try:
                found = await client.request(subjects.result(tenant, request_id))
            except (Unavailable, RequestTimeout):
                found = {"status": "away"}
            except HeadraceError as error:
                return {"status": "failed", "code": error.code}
            if found["status"] not in NOT_ENDED:
                return found
            await asyncio.sleep(0.2)


async def submit_all(client: Client, numbered: Numbered, replies: dict[int, Body]) -> None:
    """Submit what has no reply yet. Raises a refusal that cannot be retried, or that still comes after
    REFUSED_S."""
    left = iter([number for number in range(len(numbered)) if number not in replies])

    async def one_by_one() -> None:
        for number in left:
            tenant, body = numbered[number]
            until = time.monotonic() + REFUSED_S
            while number not in replies:
                try:
                    replies[number] = await client.request(subjects.submit(tenant, MODEL), body)
                except HeadraceError as error:
                    if not error.retryable or time.monotonic() > until:
                        error.add_note(
                            f"{len(replies)} of {len(numbered)} requests were stored, not {number}"
                        )
                        raise
                    await asyncio.sleep(0.2)

    await asyncio.gather(*(one_by_one() for _ in range(OPEN)))


class Resumed(dict[str, int]):
    """The tokens after which requests go on in one fleet, by tenant and id."""

    async def listen(self, bus: Bus) -> None:
        """Count what detokenizers send to schedulers."""
        await bus.subscribe("hr.*.scheduler.*.in.Tokenized", self._on_delivery)

    def _on_delivery(self, delivery: Delivery) -> None:
        message = decode(delivery.data).message
        if isinstance(message, Tokenized) and any(message.generated):
            self[f"{message.tenant} {message.request}"] = sum(message.generated)


async def until_records(
    url: str, numbered: Numbered, replies: dict[int, Body], ended: int, resumed: Resumed
) -> None:
    """Submit; returns when stream HR_DONE has `ended` records."""
    async with connected(url) as client:
        await resumed.listen(client.bus)
        submitting = asyncio.create_task(submit_all(client, numbered, replies))
        async with asyncio.timeout(LOST_S):
            while (await messages(client.bus))[subjects.RECORD_STREAM] < ended:
                if submitting.done():
                    submitting.result()  # raises
                await asyncio.sleep(0.02)
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)


async def messages(bus: Bus) -> Counter[str]:
    """The messages of the two streams."""
    counts = Counter[str]()
    for stream in (subjects.WORK_STREAM, subjects.RECORD_STREAM):
        try:
            info = await bus.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_us=5_000_000)
        except HeadraceError:
            continue
        counts[stream] = json.loads(info.data).get("state", {}).get("messages", 0)
    return counts


async def acked(bus: Bus) -> Counter[str]:
    """The messages of the two streams once no work is left, or after the time in which an ack that a death
    lost has come again."""
    until = time.monotonic() + ACKED_S
    while (counts := await messages(bus))[subjects.WORK_STREAM] and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return counts


async def all_records(
    url: str, numbered: Numbered, replies: dict[int, Body], resumed: Resumed | None = None
) -> tuple[list[Body], Counter[str]]:
    """Submit the rest; the record of each request, and the messages of the streams at the end (`acked`)."""
    async with connected(url) as client:
        if resumed is not None:
            await resumed.listen(client.bus)
        await submit_all(client, numbered, replies)
        records = [await record_of(client, tenant, body["request_id"]) for tenant, body in numbered]
        return records, await acked(client.bus)


async def plain(url: str, numbered: Numbered) -> list[Body]:
    """The answers of a fleet without a keeper."""
    room = asyncio.Semaphore(OPEN)

    async def ask(client: Client, tenant: str, body: Body) -> Body:
        async with room:
            asked = {**body, "model": MODEL}
            return await client.as_tenant(tenant).complete(asked, timeout_s=LOST_S)

    async with connected(url) as client:
        return await asyncio.gather(*(ask(client, tenant, body) for tenant, body in numbered))


def main() -> int:
    parser = parser_of("durable", __doc__, up=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--mix", choices=("sim", "real"), default="sim")
    parser.add_argument("--checkpoints", action="store_true", help="keep the tokens of all requests")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    make: Callable[[int], tuple[str, Body]] = real if given.mix == "real" else simulated
    numbered = [make(i) for i in range(given.requests)]
    if given.checkpoints:
        numbered = [(tenant, {**body, "durable": "tokens"}) for tenant, body in numbered]
    found = total_loss(numbered, given.kills, given.seed, given.up or SIM)
    report(found, given.out)
    return 0 if found["holds"] else 1


def total_loss(numbered: Numbered, kills: int, seed: int, flags: list[str] | tuple[str, ...]) -> Body:
    """Submit all, kill everything so often, compare. Moments are drawn from `seed`."""
    moments = sorted(random.Random(seed).sample(range(1, len(numbered)), kills))
    replies: dict[int, Body] = {}
    resumed = [Resumed() for _ in range(kills + 1)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as state:
        env = {"XDG_STATE_HOME": state, "HEADRACE_SIM": "step=4000"}
        for ended, going_on in zip(moments, resumed, strict=False):
            print(f"until {ended} records", file=sys.stderr)
            with running_up(("--durable", *flags), env) as (pid, url):
                asyncio.run(until_records(url, numbered, replies, ended, going_on))
                faults.kill_all(pid)
        with running_up(("--durable", *flags), env) as (_, url):
            records, counts = asyncio.run(all_records(url, numbered, replies, resumed[-1]))
    took_s = time.monotonic() - began
    seeded = [i for i, (_, body) in enumerate(numbered) if "seed" in body]
    with running_up(("--no-durable", *flags), {"HEADRACE_SIM": "step=4000"}) as (_, url):
        asked = [(tenant, {**body, "durable": None}) for tenant, body in (numbered[i] for i in seeded)]
        answers = asyncio.run(plain(url, asked))
    pairs = [
        (i, records[i].get("answer", {}).get("choices"), a["choices"])
        for i, a in zip(seeded, answers, strict=True)
    ]
    different = [{"request": i, "record": got, "plain": want} for i, got, want in pairs if got != want]
    equal = len(seeded) - len(different)
    found = {
        "requests": len(numbered), "killed_after_records": moments, "seed": seed, "up": list(flags),
        "statuses": dict(Counter(record["status"] for record in records)),
        "records": counts[subjects.RECORD_STREAM], "left_in_queue": counts[subjects.WORK_STREAM],
        "resumed": [{"requests": len(each), "tokens": sum(each.values())} for each in resumed],
        "compared": len(seeded), "equal": equal, "different": different, "seconds": round(took_s, 1),
    }  # fmt: skip
    found["holds"] = (
        found["statuses"] == {"completed": len(numbered)}
        and found["records"] == len(numbered)
        and not different
        and any(resumed) == any("durable" in body for _, body in numbered)
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
