"""A server with known latencies, to check the client: it serves both protocols, computes nothing, and records
when each request arrived and when each part of its answer was sent.

    python -m support.bench.known --http unix:/tmp/known.sock --out known.json
    python -m support.bench.known --nats nats://127.0.0.1:4222 --out known.json

It serves `slots` requests at once and the others in order of arrival: more requests wait in its queue, and
the wait belongs to the true latency. Client and server read one clock, CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support.bench.known_http import prompt_tokens, serve_http
from support.bench.known_nats import serve_nats

from loadtest.bench.pacer import Pacer
from shared.nats.bus import NatsBus

MODEL = "known"


@dataclass(frozen=True, slots=True)
class Latency:
    """What a request takes once it has a slot; the µs of every third one are `slow` times as many."""

    first_us: int = 100_000
    gap_us: int = 20_000
    slow: float = 1.0
    slots: int = 1_000_000


@dataclass(slots=True)
class Served:
    """One request as the server saw it."""

    received_us: int
    prompt_tokens: int
    pieces_us: list[int] = field(default_factory=list)


class Known:
    """Answers requests on time, from any client."""

    def __init__(self, latency: Latency, pacer: Pacer) -> None:
        self.served: list[Served] = []
        self._latency = latency
        self._pacer = pacer
        self._slots = asyncio.Semaphore(latency.slots)

    async def answer(self, body: dict[str, Any]) -> AsyncGenerator[int]:
        """The numbers of the tokens of an answer, each when it is due. It is stamped before it goes out."""
        served = Served(self._pacer.now_us(), prompt_tokens(body))
        slow = self._latency.slow if len(self.served) % 3 == 0 else 1.0
        self.served.append(served)
        async with self._slots:
            due_us = self._pacer.now_us() + round(self._latency.first_us * slow)
            for number in range(int(body["max_tokens"])):
                await self._pacer.until(due_us)
                served.pieces_us.append(self._pacer.now_us())
                yield number
                due_us += round(self._latency.gap_us * slow)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM, then write what was served."""
    parser = argparse.ArgumentParser(prog="python -m support.bench.known", description=__doc__)
    parser.add_argument("--http", default="", metavar="unix:PATH")
    parser.add_argument("--nats", default="", metavar="URL")
    parser.add_argument("--latency", default="{}", help="JSON: first_us, gap_us, slow, slots")
    parser.add_argument("--out", type=Path, required=True)
    asyncio.run(_serve(parser.parse_args(argv)))


async def _serve(given: argparse.Namespace) -> None:
    known = Known(Latency(**json.loads(given.latency)), Pacer(early_us=0))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    if given.http:
        await serve_http(known.answer, given.http.removeprefix("unix:"), MODEL)
    if given.nats:
        await serve_nats(known.answer, await NatsBus.connect(given.nats, name="known"), MODEL)
    print("ready", flush=True)
    await ended.wait()
    given.out.write_text(json.dumps([asdict(each) for each in known.served]))


if __name__ == "__main__":
    main()
