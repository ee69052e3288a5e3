"""`headrace record`: a running scheduler's event log from its subject into a file.

The log begins with the snapshot that the scheduler makes when it is asked, and ends with Ctrl-C, after
`--seconds`, or where the broker lost a piece: what is in the file is whole in any case.
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
    """Write the log of `scheduler` (empty: the only one there) to the new file `out`. Raises BadRequest when
    it cannot be written, Unavailable when nobody publishes a log, EngineError when a piece was lost."""
    async with connected(target.nats_url) as bus:
        chosen = scheduler or await _only_scheduler(bus)
        with _created(out) as file:
            await record_from(bus, chosen, Recording(file), seconds)
            print_line(f"{out} has {file.tell()} bytes of {chosen}: headrace replay {out}")


async def record_from(bus: Bus, scheduler: str, into: Recording, seconds: float | None) -> None:
    """Listen until the time is over, or somebody cancels. Raises Unavailable, EngineError."""
    subscription = await bus.subscribe(subjects.events(scheduler), into.take)
    try:
        await bus.flush()
        await _ask_snapshot(bus, scheduler)
        try:
            await asyncio.wait_for(into.begun.wait(), WAIT_S)
        except TimeoutError:
            raise Unavailable(
                f"no snapshot of {scheduler} came within {WAIT_S:g} s: see `headrace status`"
            ) from None
        print_line(f"recording {scheduler}" + ("" if seconds is not None else "; Ctrl-C ends it"))
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):  # Ctrl-C ends it well
            async with asyncio.timeout(seconds):
                await into.broken.wait()
        with contextlib.suppress(HeadraceError):  # the scheduler may have gone: then there is no more
            await _ask_snapshot(bus, scheduler)
    finally:
        await subscription.drain()
    if into.broken.is_set():
        raise EngineError("the broker lost a piece of the log: the file ends there, and is whole up to it")


async def _ask_snapshot(bus: Bus, scheduler: str) -> None:
    """Everything until now comes with it; as the last word it is what a replay must end with."""
    try:
        await bus.request(subjects.events_snapshot(scheduler), b"", timeout_us=int(WAIT_S * 1e6))
    except NoResponders:
        raise Unavailable(
            f"no scheduler {scheduler} publishes an event log: start it with --event-log nats; "
            "`headrace status` shows which there are"
        ) from None


class Recording:
    """Pieces of a log into a file, in their order."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._next = 0
        self.begun = asyncio.Event()
        self.broken = asyncio.Event()

    def take(self, delivery: Delivery) -> None:
        """The next piece; those before the first snapshot are of no use."""
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


async def _only_scheduler(bus: Bus) -> str:
    answers = await request_all(bus, subjects.STATUS, WAIT_S / 4)
    found = sorted(str(answer["id"]) for answer in answers if answer.get("kind") == "scheduler")
    if not found:
        raise Unavailable("no scheduler answers: see `headrace status`")
    if len(found) > 1:
        raise BadRequest(f"there are several schedulers, choose one with --scheduler: {', '.join(found)}")
    return found[0]


@contextlib.contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """A new file, which goes again if nothing was written: a second try would find it there."""
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
