"""Measures what a batch does to others: first tokens of interactive requests, memory of the gateway.

    python -m loadtest.batch_valleys --parts valleys --out valleys.json
    python -m loadtest.batch_valleys --parts upload --megabytes 200 --out upload.json

`valleys`: 16 interactive clients, then one, then 16 requests in one instant, alone and beside a batch that
does not end meanwhile, in turn. `p99_ratio`, `one_p99_ratio`, `burst_p99_ratio`: the p99 beside the batch by
the p99 alone. The rows that the batch takes are read from the scheduler. `upload`: a file goes up over HTTP
and comes back; the gateway's resident memory is read meanwhile. `headrace up --durable` with the simulated
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadtest import faults
from loadtest.batch_deaths import ENDED, FLAGS, client_at, submitted, until
from loadtest.fleet import MODEL, cpu_name
from loadtest.memory import PAGE_BYTES
from loadtest.running_up import running_up
from shared.client.client import Client, request_all
from shared.client.file_client import asked
from shared.nats import subjects

STEP_S = 0.02  # a long step: what is measured is not the machine
SIM = f"step={round(STEP_S * 1e6)}"
ROWS = 64  # of the engine
LINES = 20_000  # more than one round takes
CLIENTS, ONE = 16, 20  # interactive at a time; requests of a lone client in a round
BURSTS = 10  # of CLIENTS requests each in a round
BURST_APART_S = 0.5  # the batch has its rows back between two
ROUNDS, REQUESTS, WARM_UP = 4, 320, 4
APART_S = 0.1  # between the first requests of two clients, so that most arrive one by one
SETTLE_S, LOOK_S = 4.0, 0.01
BOUNDARY = "batch-valleys"

Body = dict[str, Any]


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
    shares, end_s = [], time.monotonic() + seconds
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
        async with client_at(url) as client:
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
    document: Body = {
        "cpu": cpu_name(),
        "step_ms": STEP_S * 1e3,
        "clients": CLIENTS,
        "rows": statistics.mean(rows),
    }
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
        self._path, self._end = Path(f"/proc/{pid}/statm"), threading.Event()
        self.before = self.most = self._now()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _now(self) -> int:
        return int(self._path.read_text().split()[1]) * PAGE_BYTES

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            self.most = max(self.most, self._now())


def upload(size: int) -> Body:
    """What the gateway and the keeper take for a file that goes up and comes back."""
    flags = (*FLAGS, "--sim", SIM, "--http", "127.0.0.1:0", "--gateways", "1")
    found: Body = {"cpu": cpu_name(), "bytes": size}
    with tempfile.TemporaryDirectory() as state, running_up(flags, {"XDG_STATE_HOME": state}) as (up, _):
        host, port = http_address(up)
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


def http_address(up: int) -> tuple[str, int]:
    """Where the gateway of `up` listens, from its note."""
    environ = Path(f"/proc/{up}/environ").read_bytes().split(b"\0")
    (home,) = (e.partition(b"=")[2].decode() for e in environ if e.startswith(b"XDG_RUNTIME_DIR="))
    (note,) = (Path(home) / "headrace").glob("*.json")
    page = urlsplit(json.loads(note.read_text())["page"])
    assert page.hostname is not None
    assert page.port is not None
    return page.hostname, page.port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", choices=["valleys", "upload"], default=["valleys", "upload"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a round, alone and beside")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    document: Body = {}
    if "upload" in given.parts:
        document["upload"] = upload(given.megabytes << 20)
    if "valleys" in given.parts:
        document["valleys"] = asyncio.run(valleys(given.rounds, given.requests))
    print(json.dumps(document, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(document))


if __name__ == "__main__":
    main()
