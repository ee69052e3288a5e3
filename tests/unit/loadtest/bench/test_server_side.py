"""What the load client does beside sending: the line on a terminal, and what the schedulers counted."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

from support.memory_bus import MemoryBroker
from support.virtual_loop import run

from loadtest.bench.progress import CLEAR, Progress
from loadtest.bench.record import Record
from loadtest.bench.server_side import TIERS, TOKENS, counts
from shared.nats import subjects
from shared.nats.interface import Delivery


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def two_seconds(stream: io.StringIO) -> str:
    async with Progress("8 req/s", 4, stream) as progress:
        await asyncio.sleep(0.75)
        progress.ended(Record("", 0, usage=(5, 30), ended_us=1))
        await asyncio.sleep(0.5)
    return stream.getvalue()


def test_progress_on_a_terminal_is_redrawn_every_half_second_and_left_clean() -> None:
    lines = run(two_seconds(Terminal())).split(CLEAR)[1:]
    assert lines == [
        "8 req/s ···················· 0/4  0.0 req/s, 0 tok/s  0 s",
        "8 req/s █████··············· 1/4  1.0 req/s, 30 tok/s  1 s",
        "",
    ]


def test_progress_prints_nothing_to_a_file() -> None:
    assert run(two_seconds(io.StringIO())) == ""


def status(kind: str, model: str, each: int) -> bytes:
    measured = {"tokens": dict.fromkeys(TOKENS, each), "tiers": dict.fromkeys(TIERS, 10 * each)}
    return json.dumps({"kind": kind, "executors": {"e": {"model": model}}, "measured": measured}).encode()


async def counted(*answers: bytes) -> dict[str, Any] | None:
    broker = MemoryBroker()
    for answer in answers:
        bus = broker.connect()

        def reply(delivery: Delivery, bus: Any = bus, answer: bytes = answer) -> None:
            bus.publish(delivery.reply, answer)

        await bus.subscribe(subjects.STATUS, reply)
    return await counts(broker.connect(), "m")


def test_the_schedulers_of_the_model_are_added_up() -> None:
    found = run(counted(*(status(*each) for each in SERVICES)))
    assert found == dict.fromkeys(TOKENS, 5) | dict.fromkeys(TIERS, 50)


SERVICES = [("scheduler", "m", 2), ("scheduler", "m", 3), ("scheduler", "other", 7), ("executor", "m", 9)]


def test_counters_are_absent_when_no_service_counts() -> None:
    assert run(counted()) is None
    assert run(counted(status("executor", "m", 1))) is None
