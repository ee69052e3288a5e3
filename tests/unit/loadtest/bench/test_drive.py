"""The loops of the load client when the client itself is held up: its own lateness is counted, never
hidden."""

from __future__ import annotations

import asyncio

from support.virtual_loop import LoopClock, VirtualLoop, run

from loadtest.bench.asked import Conversation, Options, Turn
from loadtest.bench.drive import LEAD_US, Drive
from loadtest.bench.figures import figures
from loadtest.bench.pacer import Pacer
from loadtest.bench.record import Record

SERVED_US = 10_000
HELD_UP_S = 1.0


class HeldUp:
    """Answers after 10 ms; before the second request is sent, the whole process stands still for 1 s."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self.sent = 0

    async def send(self, body: dict[str, object], record: Record) -> None:
        self.sent += 1
        if self.sent == 2:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.virtual.now_s += HELD_UP_S
        await self._pacer.until(self._pacer.now_us() + SERVED_US)
        record.took("x", self._pacer.now_us())


class Failing:
    """Every request fails."""

    async def send(self, body: dict[str, object], record: Record) -> None:
        record.error = "503 absent"


def single(count: int) -> list[Conversation]:
    return [Conversation((Turn([1], 1),)) for _ in range(count)]


def test_late_sending_of_a_held_up_client_counts_from_its_scheduled_time() -> None:
    """Requests at 0.1, 0.2, … s; all from the third to the twelfth are due while it stands still. Counted
    from their sending they would have taken 10 ms each, and only one request in 20 would have seen the
    second."""

    async def held_up() -> list[Record]:
        pacer = Pacer(LoopClock(), early_us=0)
        drive = Drive(HeldUp(pacer), pacer)
        await drive.open(single(20), [100_000 * i for i in range(1, 21)])
        assert drive.started_us == LEAD_US
        return drive.records

    records = run(held_up())
    assert [record.intended_us - LEAD_US for record in records] == [100_000 * i for i in range(1, 21)]
    late_ms = [record.late_us / 1e3 for record in records]
    assert late_ms == [0, 0, *(1_000 - 100 * i for i in range(1, 11)), *[0] * 8]
    ttft_ms = [record.ttft_us / 1e3 for record in records]
    assert ttft_ms == [10, 1_010, *(1_010 - 100 * i for i in range(1, 11)), *[10] * 8]
    made = figures(records, LEAD_US, {"ttft": 100})
    assert made["max_late_ms"] == 900
    assert round(made["request_goodput"] * made["duration"]) == 10  # of 20: ten waited for longer than 100 ms


def test_a_conversation_ends_with_its_first_failure() -> None:
    async def failing() -> list[Record]:
        drive = Drive(Failing(), Pacer(LoopClock(), early_us=0), Options())
        await drive.closed([Conversation((Turn("a", 1), Turn("b", 1))), *single(2)], clients=1)
        return drive.records

    assert [record.error for record in run(failing())] == ["503 absent"] * 3
