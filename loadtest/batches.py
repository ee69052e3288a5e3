"""Batches through the loss of every process, their effect on interactive requests, and large files.

    python -m loadtest.batches deaths --lines 10000 --kills 5 --out batch_deaths.json
    python -m loadtest.batches valleys --out batch_valleys.json
    python -m loadtest.batches upload --megabytes 200 --out batch_upload.json

`headrace up --durable`, simulated engine. `deaths`: at random counts of answered lines SIGKILL goes to `up`,
every service and the nats-server; then `up` starts again on the same folder. At the end the output is
compared with the answers to the same requests, sent without a keeper. Tokens are counted by the scheduler:
its count is read while the executor is stopped, just before each kill.

`valleys`: 16 interactive clients, then one, then 16 requests in one instant, alone and beside a batch that
does not end meanwhile, in turn. `p99_ratio`, `one_p99_ratio`, `burst_p99_ratio`: the p99 beside the batch by
the p99 alone. The rows that the batch takes are read from the scheduler. `upload`: a file goes up over HTTP
and comes back; the resident memory of gateway and keeper is read meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from hashlib import sha256

from loadtest import faults
from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, Body, connected, cpu_name, running_up
from loadtest.processes import resident_bytes
from shared.client.client import Client, request_all
from shared.client.file_client import FileClient, asked
from shared.clock import SystemClock
from shared.errors import HeadraceError
from shared.nats import subjects
from shared.processes import bind

ENDED = ("completed", "failed", "expired", "cancelled")
FLAGS = (
    *("--durable", "--backend", "sim", "--l1", "off", "--tokenizers", "1", "--detokenizers", "1"),
    *("--heartbeat-interval-ms", "200"),
)
STEP = "step=5000"
BATCHES_POLL_S, LIMIT_S, PLAIN = 0.05, 1_800, 64

STEP_S = 0.02  # a long step: what is measured is not the machine
SIM = f"step={round(STEP_S * 1e6)}"
ROWS = 64  # of the engine
LINES = 20_000  # more than one round takes
CLIENTS, ONE = 16, 20  # interactive at a time; requests of a lone client in a round
BURSTS = 10  # of CLIENTS requests each in a round
BURST_APART_S = 0.5  # the batch has its rows back between two
ROUNDS, REQUESTS, WARM_UP = 4, 320, 4
APART_S = 0.1  # between the first requests of two clients, so that most arrive one by one
SETTLE_S, WATCH_S = 4.0, 0.01
BOUNDARY = "batches"


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
            await asyncio.sleep(BATCHES_POLL_S)


async def generated(client: Client, up_pid: int) -> int:
    """The tokens that this fleet has generated; its executor is stopped."""
    for pid in faults.pids_of(up_pid, "executor"):
        faults.send(pid, signal.SIGSTOP)
    found = await request_all(client.bus, subjects.STATUS, 10.0, lambda body: body.get("kind") == "scheduler")
    return sum(body["measured"]["tokens"]["generated"] for body in found if body.get("kind") == "scheduler")


async def run(lines: int, kills: int, compared: int, log: str = os.devnull, slots: int = 0) -> Result:
    """One batch of `lines`, through `kills` deaths of everything; `slots` of the executor, 0: its default."""
    result = Result(lines)
    moments = sorted(random.sample(range(1, lines), kills))
    started_s, batch = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as state:
        env = {"XDG_STATE_HOME": state}
        for moment in [*moments, lines]:
            with running_up((*FLAGS, "--slots", f"{slots}", "--sim", STEP), env, log) as (up_pid, url):
                async with connected(url) as client:
                    batch = batch or await submitted(client, lines)
                    found = await until(client, batch, moment)
                    if moment < lines and found["status"] not in ENDED:
                        result.killed_after.append(found["request_counts"]["completed"])
                        result.generated += await generated(client, up_pid)
                        faults.kill_all(up_pid)
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


async def first_tokens(client: Client, count: int, clients: int = 1, apart_s: float = APART_S) -> list[float]:
    """Seconds to the first text of interactive requests of several clients, each with one at a time."""
    took, numbers = list[float](), iter(range(count))

    async def ask(client_number: int) -> None:
        await asyncio.sleep(client_number * apart_s)
        for number in numbers:
            body = {"model": MODEL, "prompt": f"hello {number}", "max_tokens": 40, "ignore_eos": True}
            started_s, first_s = time.perf_counter(), 0.0
            async for frame in client.stream({**body, "slo_class": "interactive"}):
                if frame["type"] == "delta" and not first_s:
                    first_s = time.perf_counter() - started_s
            took.append(first_s)

    await asyncio.gather(*map(ask, range(clients)))
    return took


async def rows_taken(client: Client, seconds: float) -> float:
    """The share of the engine's rows that run, on average, while nothing but a batch is there."""
    shares, end_s = list[float](), time.monotonic() + seconds
    while time.monotonic() < end_s:
        found = await request_all(client.bus, subjects.STATUS, 5.0, lambda b: b.get("kind") == "scheduler")
        (scheduler,) = (body for body in found if body.get("kind") == "scheduler")
        (engine,) = scheduler["executors"].values()
        shares.append(engine["running"] / engine["slots"])
        await asyncio.sleep(0.1)
    return statistics.mean(shares)


async def valleys(rounds: int, requests: int) -> Body:
    """First tokens alone and beside a batch, in turn, and the rows of the batch."""
    took: dict[str, list[float]] = {
        f"{case}{where}": [] for case in ("", "one_", "burst_") for where in ("alone", "beside")
    }
    rows = list[float]()
    flags = (*FLAGS, "--sim", SIM, "--slots", str(ROWS))

    async def measure(client: Client, name: str) -> None:
        took[name] += await first_tokens(client, requests, CLIENTS)
        took[f"one_{name}"] += await first_tokens(client, ONE)
        for number in range(BURSTS):
            await asyncio.sleep(BURST_APART_S + number * STEP_S / BURSTS)  # at any part of a step
            took[f"burst_{name}"] += await first_tokens(client, CLIENTS, CLIENTS, apart_s=0.0)

    with tempfile.TemporaryDirectory() as state, running_up(flags, {"XDG_STATE_HOME": state}) as (_, url):
        async with connected(url) as client:
            await first_tokens(client, WARM_UP)
            for _ in range(rounds):
                await measure(client, "alone")
                batch = await submitted(client, LINES)
                await until(client, batch, 1)
                await asyncio.sleep(SETTLE_S)  # the window has grown
                rows.append(await rows_taken(client, 2.0))
                await measure(client, "beside")
                found = await asked(client, subjects.batches(client.tenant, "cancel"), {"id": batch})
                assert found["status"] not in ENDED, "the batch ended meanwhile: more lines are needed"
                await until(client, batch, LINES + 1)
    document: Body = {"step_ms": STEP_S * 1e3, "clients": CLIENTS, "rows": statistics.mean(rows)}
    for name, each in took.items():
        cuts = statistics.quantiles(each, n=100)
        document[name] = {"requests": len(each), "p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}
    for name in ("", "one_", "burst_"):
        beside, alone = document[f"{name}beside"], document[f"{name}alone"]
        document[f"{name}p99_ratio"] = beside["p99_ms"] / alone["p99_ms"]
    return document


def line_of(number: int) -> bytes:
    """A line of about a kilobyte."""
    body = {"model": MODEL, "prompt": f"{number} " + "word " * 180, "max_tokens": 1}
    return json.dumps({"custom_id": f"r{number}", "url": "/v1/completions", "body": body}).encode() + b"\n"


def form_of(size: int) -> Iterator[bytes]:
    """The form of an upload of about `size` bytes, in pieces."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
    yield f'{head}purpose"\r\n\r\nbatch\r\n{head}file"; filename="in.jsonl"\r\n\r\n'.encode()
    yield from content_of(size)
    yield f"\r\n--{BOUNDARY}--\r\n".encode()


def content_of(size: int) -> Iterator[bytes]:
    """The content of the file."""
    number, left = 0, size
    while left > 0:
        piece = b"".join(line_of(number + i) for i in range(64))[:left]
        number, left = number + 64, left - len(piece)
        yield piece


class Resident:
    """The largest resident memory of a process within a block, above the one at its start, in bytes."""

    def __init__(self, pid: int) -> None:
        self._pid, self._end = pid, threading.Event()
        self.before = self.most = resident_bytes(pid)
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(WATCH_S):
            self.most = max(self.most, resident_bytes(self._pid))


def upload(size: int) -> Body:
    """What the gateway and the keeper take for a file that goes up and comes back."""
    with bind("127.0.0.1", 0) as free:
        host, port = free.getsockname()[:2]
    flags = (*FLAGS, "--sim", SIM, "--http", f"{host}:{port}", "--gateways", "1")
    found: Body = {"bytes": size}
    with tempfile.TemporaryDirectory() as state, running_up(flags, {"XDG_STATE_HOME": state}) as (up, _):
        watched = {kind: Resident(faults.pids_of(up, kind)[0]) for kind in ("gateway", "keeper")}
        with watched["gateway"], watched["keeper"]:
            started_s, peer = time.monotonic(), http.client.HTTPConnection(host, port, timeout=600)
            headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
            peer.request("POST", "/v1/files", form_of(size), headers, encode_chunked=True)
            made = json.loads(peer.getresponse().read())
            assert made.get("bytes") == size, made
            found["upload_s"] = time.monotonic() - started_s
            started_s = time.monotonic()
            peer.request("GET", f"/v1/files/{made['id']}/content")
            response, digest = peer.getresponse(), sha256()
            while piece := response.read(1 << 20):
                digest.update(piece)
            found["download_s"] = time.monotonic() - started_s
        wanted = sha256()
        for piece in content_of(size):
            wanted.update(piece)
        assert digest.digest() == wanted.digest(), "the file came back changed"
        found |= {f"{kind}_mib": (each.most - each.before) / 2**20 for kind, each in watched.items()}
        found |= {f"{kind}_before_mib": each.before / 2**20 for kind, each in watched.items()}
    return found


def main() -> None:
    """One part; an error if a line is missing, doubled or changed."""
    parser = parser_of("batches", __doc__)
    parser.add_argument("part", choices=("deaths", "valleys", "upload"))
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--compared", type=int, default=1_000, help="lines sent again without a keeper")
    parser.add_argument("--slots", type=int, default=0, help="rows of the executor; those at a kill are lost")
    parser.add_argument("--log", default=os.devnull, help="a file for the services' log")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a round, alone and beside")
    parser.add_argument("--megabytes", type=int, default=200)
    given = parser.parse_args()
    report({"cpu": cpu_name(), given.part: part(given)}, given.out)


def part(given: argparse.Namespace) -> Body:
    """Its figures. Raises SystemExit."""
    if given.part == "upload":
        return upload(given.megabytes << 20)
    if given.part == "valleys":
        return asyncio.run(valleys(given.rounds, given.requests))
    result = asyncio.run(run(given.lines, given.kills, given.compared, given.log, given.slots))
    if result.once != result.lines or result.equal != result.compared:
        raise SystemExit(f"a line is missing, doubled or changed: {result}")
    return {**asdict(result), "slots": given.slots, "passes": round(result.passes, 4)}


if __name__ == "__main__":
    main()
