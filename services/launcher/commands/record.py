"""`headrace record` writes the event log that a running scheduler publishes to a file.

The file starts with a snapshot, which the scheduler makes on request. Recording ends with Ctrl-C, after
`--seconds`, or when the broker has lost a message; the file can be replayed in each case.

`headrace shadow --policy X` reads a scheduler's event log over NATS, and prints what X would have done.

It keeps the last stretches of the log in memory, and each minute has the program of `headrace replay` compare
them. It sends nothing to the fleet but requests for a snapshot.

`headrace policy` prints the policy of each scheduler; `headrace policy set kind=name,...` changes it.

A scheduler applies a change between two steps, and keeps it until the next change or its own end: a scheduler
that starts has the setting `policy`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from services.launcher import session
from services.launcher.console import load, load_test_module, print_line
from shared import bodies
from shared.client.client import request_all
from shared.errors import BadRequest, EngineError, HeadraceError, Unavailable
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery, NoResponders
from shared.processes import open_private

WAIT_S = 2.0
OFFSET_HEADER, BEGINS_HEADER = "Headrace-Offset", "Headrace-Snapshot"  # as the scheduler sends them


async def record(target: session.Target, out: Path, scheduler: str, seconds: float | None) -> None:
    """Write the log of `scheduler` (empty: the only one) to the new file `out`. Raises BadRequest if the file
    cannot be written, Unavailable if the scheduler publishes no log, and EngineError if a message was
    lost."""
    async with session.connected(target.nats_url) as bus:
        chosen = scheduler or await only_scheduler(bus)
        with _create(out) as file:
            await record_from(bus, chosen, Recording(file), seconds)
            print_line(f"{out} has {file.tell()} bytes of {chosen}: headrace replay {out}")


async def record_from(bus: Bus, scheduler: str, into: Recording, seconds: float | None) -> None:
    """Record for `seconds` (None: without end) or until cancelled. Raises Unavailable, EngineError."""
    subscription = await bus.subscribe(subjects.events(scheduler), into.on_piece)
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

    def on_piece(self, delivery: Delivery) -> None:
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
def _create(path: Path) -> Iterator[BinaryIO]:
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


REPORTS_IN_A_STRETCH = 10  # a report covers 10 to 20 of them, or less: a busy scheduler begins more stretches

Compared = Callable[[bytes], list[str]]  # a log -> the lines to print


async def shadow(target: session.Target, scheduler: str, interval_s: float, compared: Compared) -> None:
    """Print a report about `scheduler` (empty: the only one) every `interval_s` and at Ctrl-C. Raises
    Unavailable if it publishes no log or has ended, BadRequest."""
    if not interval_s > 0:
        raise BadRequest("--interval is above 0")
    async with session.connected(target.nats_url) as bus:
        chosen = scheduler or await only_scheduler(bus)
        print_line(f"in the shadow of {chosen}, a report every {interval_s:g} s; Ctrl-C prints the last one")
        await follow(bus, chosen, interval_s, compared)


async def follow(bus: Bus, scheduler: str, interval_s: float, compared: Compared) -> None:
    """As `shadow`, until cancelled."""
    stretches = Stretches()
    subscription = await bus.subscribe(subjects.events(scheduler), lambda piece: stretches.on_piece(piece))
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

    def on_piece(self, piece: Delivery) -> None:
        """Keep the next message; the first one of a stretch drops what came before the last stretch."""
        if BEGINS_HEADER in piece.headers and not self.recording.broken.is_set():
            self._before = self._now.getvalue()
            self._now.seek(0)
            self._now.truncate()
        self.recording.on_piece(piece)
        self.size += len(piece.data)

    @property
    def data(self) -> bytes:
        """A log that can be replayed."""
        return self._before + self._now.getvalue()


async def policy(target: session.Target, fleet: str, change: str | None, model: str) -> int:
    """Print a line for each scheduler of `fleet`, or only of `model`; with `change` after that. Returns 1 if
    a scheduler has refused it or has not answered. Raises Unavailable without a scheduler, BadRequest."""
    if change is not None and not change.strip():
        raise BadRequest("name a policy: headrace policy set kind=name,...")
    services = await session.services_of(target, fleet)
    schedulers = [s for s in services if s.get("kind") == "scheduler" and model in ("", s.get("model"))]
    if not schedulers:
        raise Unavailable(f"no scheduler of {model or 'the fleet'} answers: see `headrace status`")
    if change is None:
        for scheduler in schedulers:
            print(f"{_named(scheduler)}: {scheduler.get('policy', 'unknown')}")
        return 0
    async with session.connected(target.nats_url) as bus:
        return await set_policy(bus, schedulers, change)


async def set_policy(bus: Bus, schedulers: list[session.Facts], change: str) -> int:
    """Change the policy of these schedulers, print what each answers, and return 1 unless all have agreed."""
    targets = (subjects.policy(str(scheduler["id"])) for scheduler in schedulers)
    answers = await asyncio.gather(
        *(session.ask_scheduler(bus, bodies.Change, each, change) for each in targets)
    )
    for scheduler, answer in zip(schedulers, answers, strict=True):
        if answer is not None and "error" in answer:
            print(f"{_named(scheduler)}: unchanged: {answer['error']['message']}")
        elif answer is not None and "after" in answer:
            lines = f"before {answer['before']}\n  after  {answer['after']}"
            print(f"{_named(scheduler)}:\n  {lines}")
        else:
            print(f"{_named(scheduler)}: no answer: `headrace policy` shows whether it has changed")
    return 0 if all(answer is not None and "after" in answer for answer in answers) else 1


def _named(scheduler: session.Facts) -> str:
    return f"scheduler {scheduler['id']}, model {scheduler.get('model', '?')}"


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add("out", type=Path, help="the file to write; it must not exist")
    add("--seconds", type=float, help="how long; default: until Ctrl-C")
    add("--scheduler", default="", metavar="ID", help="which scheduler, if there are several")
    parser.set_defaults(
        run=lambda given: asyncio.run(
            record(session.find_target(load(given)), given.out, given.scheduler, given.seconds)
        )
    )


def shadow_command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add(  # `policy` is a setting
        "--policy", dest="other", required=True, metavar="KIND=NAME,...", help="the other policy"
    )
    add("--scheduler", default="", metavar="ID", help="which scheduler, if there are several")
    add("--interval", type=float, default=60.0, metavar="SECONDS", help="default 60")
    parser.set_defaults(run=_on_shadow)


def _on_shadow(given: argparse.Namespace) -> None:
    compared = load_test_module("simulator").shadow(given.other)
    asyncio.run(shadow(session.find_target(load(given)), given.scheduler, given.interval, compared))


def policy_command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add("action", nargs="?", choices=["set"])
    add("change", nargs="?", metavar="KIND=NAME,...", help="kinds that are not named stay as they are")
    add(  # `model` is a setting
        "--model", dest="of_model", default="", metavar="NAME", help="only schedulers of this model"
    )
    parser.set_defaults(
        run=lambda given: asyncio.run(
            policy(*session.find_fleet(given), (given.change or "") if given.action else None, given.of_model)
        )
    )
