"""`headrace shadow --policy X` reads a scheduler's event log over NATS, and prints what X would have done.

It keeps the last stretches of the log in memory, and each minute has the program of `headrace replay` compare
them. It sends nothing to the fleet but requests for a snapshot.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

from services.launcher.commands.record import BEGINS_HEADER, Recording, begin, only_scheduler
from services.launcher.console import print_line
from services.launcher.session import Target, connected
from shared.errors import BadRequest
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery

REPORTS_IN_A_STRETCH = 10  # a report covers 10 to 20 of them, or less: a busy scheduler begins more stretches

Compared = Callable[[bytes], list[str]]  # a log -> the lines to print


async def shadow(target: Target, scheduler: str, interval_s: float, compared: Compared) -> None:
    """Print a report about `scheduler` (empty: the only one) every `interval_s` and at Ctrl-C. Raises
    Unavailable if it publishes no log or has ended, BadRequest."""
    if not interval_s > 0:
        raise BadRequest("--interval is above 0")
    async with connected(target.nats_url) as bus:
        chosen = scheduler or await only_scheduler(bus)
        print_line(f"in the shadow of {chosen}, a report every {interval_s:g} s; Ctrl-C prints the last one")
        await follow(bus, chosen, interval_s, compared)


async def follow(bus: Bus, scheduler: str, interval_s: float, compared: Compared) -> None:
    """As `shadow`, until cancelled."""
    stretches = Stretches()
    subscription = await bus.subscribe(subjects.events(scheduler), lambda piece: stretches.take(piece))
    age = reported = 0
    try:
        while True:
            if stretches.recording.broken.is_set():
                print_line("the broker lost a part of the log: the comparison begins again")
                stretches = Stretches()
            begun = stretches.recording.begun.is_set()
            if not begun or age >= REPORTS_IN_A_STRETCH or stretches.size == reported:
                await begin(bus, scheduler, stretches.recording)  # it fails if the scheduler has ended
                age = 0
            reported, age = stretches.size, age + 1
            await asyncio.sleep(interval_s)
            await _print(stretches, compared)
    except asyncio.CancelledError:  # Ctrl-C
        await _print(stretches, compared)
    finally:
        await subscription.drain()


async def _print(stretches: Stretches, compared: Compared) -> None:
    """In a thread: messages of the log arrive meanwhile."""
    for line in [*await asyncio.to_thread(compared, stretches.data), ""]:
        print(line, flush=True)


class Stretches:
    """The last whole stretch of a log and the present one, in memory."""

    def __init__(self) -> None:
        self._now, self._before = io.BytesIO(), b""
        self.recording = Recording(self._now)
        self.size = 0  # bytes that have come, with those that are dropped

    def take(self, piece: Delivery) -> None:
        """Keep the next message; the first one of a stretch drops what came before the last stretch."""
        if BEGINS_HEADER in piece.headers and not self.recording.broken.is_set():
            self._before = self._now.getvalue()
            self._now.seek(0)
            self._now.truncate()
        self.recording.take(piece)
        self.size += len(piece.data)

    @property
    def data(self) -> bytes:
        """A log that can be replayed."""
        return self._before + self._now.getvalue()
