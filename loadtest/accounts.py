"""Streams of tenants with accounts of the nats-server: long silences, and a tenant at its connection limit.

    python -m loadtest.accounts --silence-s 60 --minutes 10 --out accounts.json

Clients are nats-py as it comes, with the usual inboxes. Part one, *limit*: the time to the first token of
tenant acme, alone and while bob, with all of its connections in use, tries to open more; rounds take turns.
Then readers are killed: the seconds until the scheduler has no request. Part two, *silence*: a step of the
simulated engine takes `--silence-s`, and a stream sends nothing for as long. One stream in each of two
accounts runs for `--minutes`; every token must arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client as Nats

from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, SIM, machine, running_up
from services.launcher import credentials
from services.launcher import nats_server as servers
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan

CONNECTIONS = 2  # of bob
ROUNDS, ASKS = 4, 40
LOUD, EVERY_S = 8, 0.02  # attempts to connect at a time, and how often there is a new one
FREE_S = READY_S = 60.0


@asynccontextmanager
async def connected(users: Path, name: str, url: str) -> AsyncIterator[Nats]:
    """A client with the credentials of `name`."""
    prefix = f"_INBOX.headrace-{name}" if name == "operator" else "_INBOX"
    nc = await nats.connect(
        credentials.url_of(users, name, url), inbox_prefix=prefix, allow_reconnect=False, error_cb=_silent
    )
    try:
        yield nc
    finally:
        await nc.close()


async def _silent(_: Exception) -> None:
    """What nats-py would print of each refused attempt."""


async def stream(nc: Nats, tenant: str, request: str, tokens: int, wait_s: float) -> AsyncIterator[Any]:
    """The frames of a streamed answer; each may take `wait_s`."""
    replies = await nc.subscribe(inbox := nc.new_inbox())
    body = {"prompt": f"Tell me {request}.", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "request_id": request, "timeout_s": 3_600}).encode()
    await nc.publish(f"headrace.v1.generate.{tenant}.{MODEL}", data, reply=inbox)
    ended = False
    while not ended:
        message = await replies.next_msg(wait_s)
        yield json.loads(message.data)
        ended = "Headrace-End" in (message.headers or {})
    await replies.unsubscribe()


async def whole(nc: Nats, tenant: str, tokens: int, silence_s: float) -> dict[str, Any]:
    """One stream to its end: its frames and its silences."""
    times, done = [], 0
    async for frame in stream(nc, tenant, f"long-{tenant}", tokens, 5 * silence_s + 60):
        times.append(time.monotonic())
        done = frame.get("usage", {}).get("completion_tokens", 0)
    gaps = [after - before for before, after in pairwise(times)]
    return {
        "tenant": tenant, "frames": len(times), "tokens": done, "whole": done == tokens,
        "seconds": round(times[-1] - times[0], 1), "longest_silence_s": round(max(gaps), 1),
        "silences": sum(gap > 0.9 * silence_s for gap in gaps),
    }  # fmt: skip


async def free_after_kill(nc: Nats, operator: Nats, silence_s: float) -> float:
    """Seconds from the death of a reader to the moment when the scheduler has no request."""
    async for frame in stream(nc, "acme", "killed", 10_000, 5 * silence_s + 60):
        if frame["type"] == "delta":
            break
    transport: Any = nc._transport
    transport._io_writer.transport.abort()  # a reset: what a dead process leaves
    began = time.monotonic()
    while time.monotonic() < began + FREE_S + 3 * silence_s:
        stats = json.loads((await operator.request("$SRV.STATS.headrace-scheduler", b"", 30)).data)["data"]
        if not stats["requests"]:
            return round(time.monotonic() - began, 3)
    raise SystemExit("the request of a killed reader goes on")


@contextmanager
def services(users: Path, sim: str, log: str) -> Iterator[str]:
    """The URL of a server with one process of each service: `up` would test a model in less than a step."""
    server = servers.start(extra=credentials.authorization(users, "default"))
    running = []
    with Path(log).open("w") as output:
        for kind in ("scheduler", "detokenizer", "executor", "tokenizer"):
            env = {"HEADRACE_NATS_URL": credentials.url_of(users, kind, server.url), "HEADRACE_L1": "off"}
            command = [sys.executable, "-m", "services.launcher.cli", "serve", kind]
            more = ["--backend", "sim", "--sim", sim] if kind == "executor" else []
            running.append(subprocess.Popen([*command, *more], env={**os.environ, **env}, stderr=output))
        try:
            yield server.url
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
            server.stop()


async def until_ready(nc: Nats, operator: Nats) -> None:
    """Return once there are a tokenizer, and a scheduler with an executor."""
    for client, subject in ((operator, "$SRV.STATS.headrace-scheduler"), (nc, "headrace.v1.models.acme")):
        deadline, found = time.monotonic() + READY_S, dict[str, Any]()
        while not (found.get("data", {}) and (subject[0] == "h" or found["data"]["executors"])):
            try:
                found = json.loads((await client.request(subject, b"", 5)).data)
            except nats.errors.Error:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)


async def silence(users: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Part two."""
    tokens = max(2, round(args.minutes * 60 / args.silence_s))
    with services(users, f"step={round(args.silence_s * 1e6)},token=0", args.log) as url:
        async with (
            connected(users, "acme", url) as acme,
            connected(users, "bob", url) as bob,
            connected(users, "operator", url) as operator,
        ):
            await until_ready(acme, operator)
            both = whole(acme, "acme", tokens, args.silence_s), whole(bob, "bob", tokens, args.silence_s)
            streams = await asyncio.gather(*both)
    return {"silence_s": args.silence_s, "streams": streams}


async def first_token_ms(nc: Nats, request: str) -> float:
    """The time to the first delta of a short answer."""
    began, first = time.monotonic(), 0.0
    async for frame in stream(nc, "acme", request, 8, 60):
        if frame["type"] == "delta" and not first:
            first = time.monotonic() - began
    return first * 1e3


async def try_to_connect(users: Path, url: str, refused: list[str], stop: asyncio.Event) -> None:
    """Attempts of bob, one after another, until `stop`: nats-py may lose a cancellation while it connects."""
    while not stop.is_set():
        try:
            async with connected(users, "bob", url):
                refused.append("connected")
        except nats.errors.Error as error:
            refused.append(str(error))
        await asyncio.sleep(LOUD * EVERY_S)


async def limit(users: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Part one, and the deaths of readers."""
    times: dict[str, list[float]] = {"quiet": [], "loud": []}
    refused: list[str] = []
    flags = (*SIM, "--auth", str(users), "--sim", "step=5000,token=20", "--no-durable", "--l1", "off")
    with running_up(flags, log=args.log) as (_, url):
        async with (
            connected(users, "acme", url) as acme,
            connected(users, "bob", url),
            connected(users, "bob", url),
            connected(users, "operator", url) as operator,
        ):
            for number in range(2 * ROUNDS):
                kind = ("quiet", "loud")[number % 2]
                stop, loud = asyncio.Event(), range(LOUD if kind == "loud" else 0)
                tries = [asyncio.create_task(try_to_connect(users, url, refused, stop)) for _ in loud]
                for each in range(ASKS):
                    times[kind].append(await first_token_ms(acme, f"{number}-{each}"))
                stop.set()
                await asyncio.gather(*tries)
            free = [await free_after_kill(acme, operator, 0.0)]
            for _ in range(4):
                async with connected(users, "acme", url) as another:
                    free.append(await free_after_kill(another, operator, 0.0))
    figures = {
        kind: {
            "p50_ms": round(statistics.median(each), 1),
            "p99_ms": round(statistics.quantiles(each, n=100)[98], 1),
        }
        for kind, each in times.items()
    }
    counts = {text: refused.count(text) for text in sorted(set(refused))}
    return {**figures, "attempts_of_bob": counts, "free_after_kill_s": free}


PARTS = {"limit": limit, "silence": silence}


def main() -> None:
    """See the module's docstring."""
    parser = parser_of("accounts", __doc__)
    parser.add_argument("--silence-s", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--parts", default="limit,silence")
    parser.add_argument("--log", default=os.devnull)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        users = Path(home) / "auth"
        for plan in (
            Plan("nats://nats:4222", "default", ("acme",), accounts=True),
            Plan("nats://nats:4222", "default", ("bob",), limits=f"connections={CONNECTIONS}"),
        ):
            auth.generate(users, plan, lambda _: None)
        found = {part: asyncio.run(PARTS[part](users, args)) for part in args.parts.split(",")}
    report({**machine(), **found}, args.out)
    if not all(each["whole"] for each in found.get("silence", {}).get("streams", ())):
        raise SystemExit("a stream was cut short")


if __name__ == "__main__":
    main()
