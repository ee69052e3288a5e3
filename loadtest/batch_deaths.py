"""Answers a batch while every process is killed, several times: each line once, and little computed twice.

    python -m loadtest.batch_deaths --lines 10000 --kills 5 --out batch_deaths.json

`headrace up --durable` with the simulated engine. At random counts of answered lines SIGKILL goes to `up`,
every service and the nats-server; then `up` starts again on the same folder. At the end the output is
compared with the answers to the same requests, sent without a keeper. Tokens are counted by the scheduler:
its count is read while the executor is stopped, just before each kill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.fleet import MODEL
from loadtest.running_up import running_up
from shared.client.client import Client, request_all
from shared.client.file_client import FileClient, asked
from shared.clock import SystemClock
from shared.errors import HeadraceError
from shared.nats import subjects
from shared.nats.bus import NatsBus

ENDED = ("completed", "failed", "expired", "cancelled")
FLAGS = (
    *("--durable", "--backend", "sim", "--l1", "off", "--tokenizers", "1", "--detokenizers", "1"),
    *("--heartbeat-interval-ms", "200"),
)
STEP = "step=5000"
LOOK_S, LIMIT_S, PLAIN = 0.05, 1_800, 64

Body = dict[str, Any]


@dataclass
class Result:
    """What came of a batch."""

    lines: int
    killed_after: list[int] = field(default_factory=list)  # answered lines
    seconds: float = 0.0
    status: str = ""
    counts: Body = field(default_factory=dict)
    once: int = 0  # lines with one answer, in their order
    equal: int = 0  # of `compared`, with the text of a plain request
    compared: int = 0
    one_pass: int = 0  # tokens of all answers
    generated: int = 0  # by all fleets, without the plain requests

    @property
    def passes(self) -> float:
        """Tokens generated over the tokens of the answers."""
        return self.generated / self.one_pass


def body_of(number: int) -> Body:
    """The request of a line, with a seed: a plain request with it has the same text."""
    length = {"max_tokens": 20 + number * 7 % 80, "ignore_eos": True}
    return {"prompt": f"request {number}", "seed": number, **length}


def input_of(lines: int) -> bytes:
    """The input file."""
    return b"".join(
        json.dumps({"custom_id": f"r{i}", "url": "/v1/completions", "body": body_of(i)}).encode() + b"\n"
        for i in range(lines)
    )


@contextlib.asynccontextmanager
async def client_at(url: str) -> AsyncIterator[Client]:
    """A client of a fleet."""
    bus = await NatsBus.connect(url, timeout_s=10)
    try:
        yield await Client.open(bus)
    finally:
        with contextlib.suppress(TimeoutError, OSError):  # the server may have been killed
            await asyncio.wait_for(bus.drain(), 2)


async def submitted(client: Client, lines: int) -> str:
    """The id of a new batch."""

    async def pieces() -> AsyncIterator[bytes]:
        yield input_of(lines)

    described = {"filename": "in.jsonl", "purpose": "batch"}
    file = await FileClient(client, SystemClock()).upload(pieces(), lambda: described)
    job = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str((await asked(client, subjects.batches(client.tenant, "create"), job))["id"])


async def until(client: Client, batch: str, count: int) -> Body:
    """The batch, once it has `count` answers or has ended."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(HeadraceError):  # the keeper has just started
                found = await asked(client, subjects.batches(client.tenant, "show"), {"id": batch})
                if found["request_counts"]["completed"] >= count or found["status"] in ENDED:
                    return found
            await asyncio.sleep(LOOK_S)


async def generated(client: Client, up_pid: int) -> int:
    """The tokens that this fleet has generated; its executor is stopped."""
    for pid in faults.pids_of(up_pid, "executor"):
        faults.send(pid, signal.SIGSTOP)
    found = await request_all(client.bus, subjects.STATUS, 10.0, lambda body: body.get("kind") == "scheduler")
    return sum(body["measured"]["tokens"]["generated"] for body in found if body.get("kind") == "scheduler")


def kill_all(up_pid: int) -> None:
    """SIGKILL for `up`, its services and its nats-server. Returns when they have gone."""
    pids = [up_pid, *faults.children(up_pid)]
    handles = [os.pidfd_open(pid) for pid in pids]
    for pid in reversed(pids):
        faults.send(pid, signal.SIGKILL)
    for handle in handles:
        select.select([handle], [], [], 30)
        os.close(handle)


async def run(lines: int, kills: int, compared: int, log: str = os.devnull, slots: int = 0) -> Result:
    """One batch of `lines`, through `kills` deaths of everything; `slots` of the executor, 0: its default."""
    result = Result(lines)
    moments = sorted(random.sample(range(1, lines), kills))
    started_s, batch = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as state:
        env = {"XDG_STATE_HOME": state}
        for moment in [*moments, lines]:
            with running_up((*FLAGS, "--slots", f"{slots}", "--sim", STEP), env, log) as (up_pid, url):
                async with client_at(url) as client:
                    batch = batch or await submitted(client, lines)
                    found = await until(client, batch, moment)
                    if moment < lines and found["status"] not in ENDED:
                        result.killed_after.append(found["request_counts"]["completed"])
                        result.generated += await generated(client, up_pid)
                        kill_all(up_pid)
                        continue
                    found = await ended(client, batch)
                    result.status, result.counts = found["status"], found["request_counts"]
                    result.seconds = time.monotonic() - started_s
                    result.generated += await generated(client, up_pid)
                    for pid in faults.pids_of(up_pid, "executor"):
                        faults.send(pid, signal.SIGCONT)
                    await compare(client, found, compared, result)
                    break
    return result


async def ended(client: Client, batch: str) -> Body:
    """The batch, once it has ended."""
    return await until(client, batch, sys.maxsize)


async def compare(client: Client, found: Body, compared: int, result: Result) -> None:
    """Count the lines of the output and what is equal in them."""
    _, chunks = await FileClient(client, SystemClock()).read(found["output_file_id"])
    raw = b"".join([chunk async for chunk in chunks])
    answers = [json.loads(line) for line in raw.splitlines()]
    names = [answer["custom_id"] for answer in answers]
    result.once = sum(names.count(name) == 1 for name in names) if len(names) < 2_000 else len(set(names))
    if names != [f"r{i}" for i in range(result.lines)]:
        result.once = 0
    result.one_pass = sum(a["response"]["body"]["usage"]["completion_tokens"] for a in answers)
    numbers = random.sample(range(result.lines), compared)
    result.compared = compared
    free = asyncio.Semaphore(PLAIN)

    async def same(number: int) -> bool:
        async with free:
            plain = await client.complete({**body_of(number), "model": MODEL})
        text = answers[number]["response"]["body"]["choices"][0]["text"]
        return bool(plain["choices"][0]["text"] == text)

    result.equal = sum(await asyncio.gather(*map(same, numbers)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--compared", type=int, default=1_000, help="lines sent again without a keeper")
    parser.add_argument(
        "--slots", type=int, default=0, help="rows of the executor; what runs at a kill is lost"
    )
    parser.add_argument("--log", default=os.devnull, help="what the services of the last start say")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = asyncio.run(run(given.lines, given.kills, given.compared, given.log, given.slots))
    document = {**asdict(result), "slots": given.slots, "passes": round(result.passes, 4)}
    print(json.dumps(document, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(document))
    if result.once != result.lines or result.equal != result.compared:
        raise SystemExit("a line is missing, doubled or changed")


if __name__ == "__main__":
    main()
