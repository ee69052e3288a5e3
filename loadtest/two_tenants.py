"""Measures the effect of one tenant on another: its time to the first token, alone and under each load.

    python -m loadtest.two_tenants --out two_tenants.json
    python -m loadtest.two_tenants --loads flood,unread --count 100

A fresh `headrace up` with the simulated engine for each load. Tenant b sends one request at a time over HTTP.
Tenant a has a process of its own:

    flood         5,000 requests at once, over NATS, and again every five seconds
    rate          200 a second, over NATS
    long          64 prompts of the whole context at a time
    interactive   the flood in class interactive
    unread        1,000 streams over HTTP, of which it reads nothing
    grammars      64 requests at a time with grammars that are slow to check and to compile
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loadtest.clients import request_bytes
from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, SIM, Body, connected, machine, running_up
from shared.client.client import Client
from shared.errors import HeadraceError
from shared.processes import bind

KEYS = "a key-a\nb key-b\n"
PATH, HEADERS = "/v1/completions", "authorization: Bearer {}\r\nconnection: close\r\n"
STEP_US, TOKEN_US, STEP_TOKENS, WINDOW = 5_000, 20, 1_024, 2
LONGEST_STEP_S = (STEP_US + TOKEN_US * STEP_TOKENS) / 1e6
CONTEXT = 8_192
REQUEST_S = 60.0
BURST, BURST_EVERY_S, RATE, STREAMS, AT_A_TIME = 5_000, 5.0, 200, 1_000, 64
WARM_UP, PAUSE_S = 5, 0.02


@dataclass
class Server:
    """A `headrace up`: where its two doors are."""

    nats: str
    http: tuple[str, int]


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """A server for both tenants, until the end of the block."""
    with tempfile.NamedTemporaryFile("w") as keys, bind("127.0.0.1", 0) as free:
        keys.write(KEYS)
        keys.flush()
        host, port = free.getsockname()[:2]
        free.close()
        sim = (*SIM, "--sim", f"step={STEP_US},token={TOKEN_US}", "--step-tokens", str(STEP_TOKENS))
        flags = (*sim, "--l1", "off", "--http", f"{host}:{port}", "--http-keys", keys.name)
        with running_up(flags) as (_, url):
            yield Server(url, (host, port))


# ---- tenant b: one request at a time --------------------------------------------------------------------


@dataclass
class Felt:
    """What tenant b saw."""

    first_token_s: list[float] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)  # by status
    broken: int = 0  # streams that ended without their end

    def figures(self) -> Body:
        """The summary, and every single time."""
        times = sorted(self.first_token_s)
        return {
            "requests": len(times) + self.refused.total() + self.broken,
            "refused": {str(status): count for status, count in sorted(self.refused.items())},
            "broken_streams": self.broken,
            "ttft_p50_ms": round(statistics.median(times) * 1e3, 1) if times else None,
            "ttft_p99_ms": round(statistics.quantiles(times, n=100)[98] * 1e3, 1) if len(times) > 1 else None,
            "ttft_ms": [round(each * 1e3, 1) for each in self.first_token_s],
        }


async def ask(address: tuple[str, int], felt: Felt, number: int) -> None:
    """One streamed answer of eight tokens."""
    body = {"model": MODEL, "prompt": f"Number {number}.", "max_tokens": 8, "ignore_eos": True}
    began_s, first_s, ended = time.monotonic(), 0.0, False
    reader, writer = await asyncio.open_connection(*address, limit=2**20)
    writer.write(request_bytes({**body, "stream": True}, PATH, HEADERS.format("key-b")))
    status = int((await reader.readline()).split()[1])
    while line := await reader.readline():
        if line.startswith(b"data: {") and not first_s and b'"text":""' not in line:
            first_s = time.monotonic() - began_s
        ended = ended or line == b"data: [DONE]\n"
    writer.close()
    if status != 200:
        felt.refused[status] += 1
    elif not ended:
        felt.broken += 1
    else:
        felt.first_token_s.append(first_s)


async def feel(address: tuple[str, int], count: int) -> Felt:
    """Ask `count` times, one after the other."""
    for number in range(WARM_UP):
        await ask(address, Felt(), -number)
    felt = Felt()
    for number in range(count):
        try:
            async with asyncio.timeout(REQUEST_S):
                await ask(address, felt, number)
        except (TimeoutError, OSError, IndexError):
            felt.broken += 1
        await asyncio.sleep(PAUSE_S)
    return felt


# ---- tenant a: its loads, each until it is killed ---------------------------------------------------------


@contextlib.asynccontextmanager
async def tenant_a(server: Server) -> AsyncIterator[Client]:
    """Tenant a over NATS."""
    async with connected(server.nats) as client:
        yield client.as_tenant("a")


async def one(client: Client, body: Body) -> str:
    """The end of a request: "ok" or the code of its error."""
    try:
        await client.complete({"model": MODEL, **body}, timeout_s=REQUEST_S)
    except HeadraceError as error:
        return str(error.code)
    return "ok"


def short(number: int, **more: Any) -> Body:
    """A request of 128 tokens."""
    return {"prompt": f"word {number} " * 8, "max_tokens": 128, "ignore_eos": True, **more}


async def flood(server: Server, on_start: Callable[[], None], **more: Any) -> None:
    """BURST requests at once, again and again."""
    async with tenant_a(server) as client:
        tasks: set[asyncio.Task[str]] = set()
        for burst in itertools.count():
            tasks |= {
                asyncio.create_task(one(client, short(burst * BURST + i, **more))) for i in range(BURST)
            }
            await asyncio.sleep(0.1)
            on_start()
            await asyncio.sleep(BURST_EVERY_S)
            tasks = {task for task in tasks if not task.done()}


async def interactive(server: Server, on_start: Callable[[], None]) -> None:
    """The flood in the highest class."""
    await flood(server, on_start, slo_class="interactive")


async def rate(server: Server, on_start: Callable[[], None]) -> None:
    """RATE requests a second."""
    async with tenant_a(server) as client:
        tasks: set[asyncio.Task[str]] = set()
        for number in itertools.count():
            tasks.add(asyncio.create_task(one(client, short(number))))
            tasks = {task for task in tasks if not task.done()} if number % 100 == 0 else tasks
            if number == RATE:
                on_start()
            await asyncio.sleep(1 / RATE)


async def in_turn(server: Server, on_start: Callable[[], None], body: Callable[[int], Body]) -> None:
    """AT_A_TIME requests at a time."""
    numbers = itertools.count()
    async with tenant_a(server) as client:

        async def worker() -> None:
            while True:
                if await one(client, body(next(numbers))) != "ok":
                    await asyncio.sleep(0.01)

        workers = [asyncio.create_task(worker()) for _ in range(AT_A_TIME)]
        await asyncio.sleep(2)
        on_start()
        await asyncio.gather(*workers)


async def long(server: Server, on_start: Callable[[], None]) -> None:
    """Prompts of the whole context, no two alike."""

    def body(number: int) -> Body:
        return {"prompt": [300 + number % 5_000] * (CONTEXT - 64), "max_tokens": 32, "ignore_eos": True}

    await in_turn(server, on_start, body)


async def grammars(server: Server, on_start: Callable[[], None]) -> None:
    """Grammars with as many states as are let through, and some more, no two alike."""

    def body(number: int) -> Body:
        dice = random.Random(number)
        most = dice.choice((40, 63, 200, 1_000))
        pattern = (
            f"({number}[a-z]{{1,{most}}}|(x|xy|y){{1,{dice.randint(2, 60)}}}){{1,{dice.randint(1, 60)}}}"
        )
        fields = {f"f{i}": {"type": "string", "pattern": pattern} for i in range(dice.randint(1, 40))}
        schema = {"type": "object", "properties": fields, "required": list(fields)}
        kind = {"regex": pattern} if number % 2 else {"json": schema}
        return {"prompt": "x", "max_tokens": 64, "structured_outputs": kind}

    await in_turn(server, on_start, body)


async def unread(server: Server, on_start: Callable[[], None]) -> None:
    """STREAMS connections that ask for a long answer and take nothing of it."""
    loop = asyncio.get_running_loop()
    deaf: list[socket.socket] = []
    while True:
        if len(deaf) < STREAMS:
            each = socket.socket()
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.setblocking(False)
            await loop.sock_connect(each, server.http)
            body = {"model": MODEL, "prompt": f"deaf {len(deaf)}", "max_tokens": 7_000, "ignore_eos": True}
            await loop.sock_sendall(
                each, request_bytes({**body, "stream": True}, PATH, HEADERS.format("key-a"))
            )
            deaf.append(each)
        elif len(deaf) == STREAMS:
            await asyncio.sleep(2)
            on_start()
            await asyncio.sleep(3_600)


Load = Callable[[Server, Callable[[], None]], Awaitable[None]]
LOADS: dict[str, Load] = {each.__name__: each for each in (flood, rate, long, interactive, unread, grammars)}


@contextlib.contextmanager
def loaded(server: Server, load: str) -> Iterator[None]:
    """Tenant a at work, in a process of its own."""
    if load == "alone":
        yield
        return
    host, port = server.http
    command = [sys.executable, "-m", "loadtest.two_tenants", "--be", load, server.nats, f"{host}:{port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise SystemExit(f"the load {load} did not begin")
        yield
    finally:
        process.kill()
        process.wait()


def be(load: str, nats: str, http: str) -> None:
    """Be tenant a."""
    host, port = http.split(":")
    on_start = iter([True])

    def mark() -> None:
        if next(on_start, False):
            print("on", flush=True)

    asyncio.run(LOADS[load](Server(nats, (host, int(port))), mark))  # type: ignore[arg-type]  # coroutines


def measure(loads: list[str], count: int) -> Body:
    """What tenant b feels under each load."""
    found: Body = {}
    for load in ("alone", *loads):
        with running() as server, loaded(server, load):
            found[load] = asyncio.run(feel(server.http, count)).figures()
        alone, now = found["alone"]["ttft_p99_ms"], found[load]["ttft_p99_ms"]
        if now is not None:
            found[load]["ratio"] = round(now / alone, 2)
            found[load]["bound_ms"] = round(3 * alone + WINDOW * LONGEST_STEP_S * 1e3, 1)
        print(load, {name: value for name, value in found[load].items() if name != "ttft_ms"}, flush=True)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = parser_of("two_tenants", __doc__)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--be", nargs=3, metavar=("LOAD", "NATS", "HTTP"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.be:
        be(*given.be)
        return
    bound = f"3 x p99 alone + {WINDOW} steps of {LONGEST_STEP_S * 1e3:.1f} ms"
    loads = measure(given.loads.split(","), given.count)
    shown = {load: {k: v for k, v in each.items() if k != "ttft_ms"} for load, each in loads.items()}
    report({**machine(), "bound": bound, "loads": loads}, given.out, shown=shown)


if __name__ == "__main__":
    main()
