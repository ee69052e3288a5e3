"""`headrace record` writes the event log that a running scheduler publishes to a file.

The file starts with a snapshot, which the scheduler makes on request. Recording ends with Ctrl-C, after
`--seconds`, or when the broker has lost a message; the file can be replayed in each case.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from services.launcher.console import print_line
from services.launcher.session import Target, connected
from shared.client import request_all
from shared.errors import BadRequest, EngineError, HeadraceError, Unavailable
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery, NoResponders
from shared.processes import open_private

WAIT_S = 2.0
OFFSET_HEADER, BEGINS_HEADER = "Headrace-Offset", "Headrace-Snapshot"  # as the scheduler sends them


async def record(target: Target, out: Path, scheduler: str, seconds: float | None) -> None:
    """Write the log of `scheduler` (empty: the only one) to the new file `out`. Raises BadRequest if the file
    cannot be written, Unavailable if the scheduler publishes no log, and EngineError if a message was
    lost."""
    async with connected(target.nats_url) as bus:
        chosen = scheduler or await only_scheduler(bus)
        with _created(out) as file:
            await record_from(bus, chosen, Recording(file), seconds)
            print_line(f"{out} has {file.tell()} bytes of {chosen}: headrace replay {out}")


async def record_from(bus: Bus, scheduler: str, into: Recording, seconds: float | None) -> None:
    """Record for `seconds` (None: without end) or until cancelled. Raises Unavailable, EngineError."""
    subscription = await bus.subscribe(subjects.events(scheduler), into.take)
    try:
        await begin(bus, scheduler, into)
        print_line(f"recording {scheduler}" + ("" if seconds is not None else "; Ctrl-C ends it"))
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):  # Ctrl-C ends it well
            async with asyncio.timeout(seconds):
                await into.broken.wait()
        with contextlib.suppress(HeadraceError):  # the scheduler may have ended: then the log ends here
            await _ask_snapshot(bus, scheduler)
    finally:
        await subscription.drain()
    if into.broken.is_set():
        raise EngineError("the broker lost a part of the log: the file is complete up to that part")


async def begin(bus: Bus, scheduler: str, into: Recording) -> None:
    """Start a stretch of the log, and wait until `into`, which is subscribed, has begun. Raises
    Unavailable."""
    await bus.flush()
    await _ask_snapshot(bus, scheduler)
    try:
        async with asyncio.timeout(WAIT_S):
            await into.begun.wait()
    except TimeoutError:
        raise Unavailable(
            f"no snapshot of {scheduler} came within {WAIT_S:g} s: see `headrace status`"
        ) from None


async def _ask_snapshot(bus: Bus, scheduler: str) -> None:
    """Request a snapshot, which follows all earlier events; a replay must end in the last one's state."""
    try:
        await bus.request(subjects.events_snapshot(scheduler), b"", timeout_us=int(WAIT_S * 1e6))
    except NoResponders:
        raise Unavailable(
            f"no scheduler {scheduler} publishes an event log: start it with --event-log nats; "
            "`headrace status` lists the schedulers"
        ) from None


class Recording:
    """Writes the messages of a log to a file, in order; `broken` is set when one is missing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._next = 0
        self.begun = asyncio.Event()
        self.broken = asyncio.Event()

    def take(self, delivery: Delivery) -> None:
        """Write the next message. Messages before the first snapshot are dropped."""
        begun = self.begun.is_set()
        if self.broken.is_set() or not (begun or BEGINS_HEADER in delivery.headers):
            return
        offset = int(delivery.headers[OFFSET_HEADER])
        if begun and offset != self._next:
            self.broken.set()
            return
        self.begun.set()
        self._next = offset + len(delivery.data)
        self._file.write(delivery.data)


async def only_scheduler(bus: Bus) -> str:
    """The id of the only scheduler. Raises Unavailable without any, BadRequest if there are several."""
    answers = await request_all(bus, subjects.STATUS, WAIT_S / 4)
    found = sorted(str(answer["id"]) for answer in answers if answer.get("kind") == "scheduler")
    if not found:
        raise Unavailable("no scheduler answers: see `headrace status`")
    if len(found) > 1:
        raise BadRequest(f"there are several schedulers, choose one with --scheduler: {', '.join(found)}")
    return found[0]


@contextlib.contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """A new file, removed again if it stays empty, so that a second try can create it."""
    try:
        file = open_private(path)
    except FileExistsError:
        raise BadRequest(f"{path} is there already: name another file") from None
    except OSError as error:
        raise BadRequest(f"{path} cannot be written ({error.strerror}): name another file") from None
    with file:
        try:
            yield file
        finally:
            if not file.tell():
                path.unlink()
