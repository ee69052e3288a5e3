"""A fleet in the background: `headrace run` starts it, and it ends after `keep_alive_s` without a request.

The note of a running fleet (`session.RunState`) is a lock, too: each `run` holds it shared for as long as it
uses the fleet. A fleet that wants to end takes it exclusively and removes the note first, so no `run` finds a
fleet that is ending. The kernel releases the locks of a killed process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from services.launcher import session
from services.launcher.nats_server import is_free
from services.launcher.session import RunState
from shared import codec
from shared.config import Loaded
from shared.errors import SetupError, WireError
from shared.messages import Heartbeat
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery
from shared.processes import module_command, with_import_path
from shared.telemetry.counters import SchedulerCounter

UNTIL_IDLE = "--until-idle"  # the flag of `up`
LAST_LINES = 10  # shown of a start that failed
END_S = 60.0  # for a started fleet to end after SIGTERM; an idle one takes less than a second
NOTICE_S = 2.0  # of a wait without a word
_WORKERS = ("scheduler", "detokenizer")  # their loads change with every request

Report = Callable[[str], None]


@contextmanager
def fleet_of(loaded: Loaded, prepare: Callable[[], None], report: Report) -> Generator[RunState]:
    """The running fleet of these settings, started if there is none. It does not end during the block.

    `prepare` is called before a start, and `report` gets the lines that the fleet prints meanwhile. Raises
    SetupError if it does not start; then, and at any other exception before it is ready, none of its
    processes is left.
    """
    path = session.path_for(loaded.settings)
    held = _hold(path)
    if held is None:
        with _locked(path.parent):  # one start at a time
            held = _hold(path)
            if held is None:
                prepare()
                _start(loaded, path, report)
                held = _hold(path)
    if held is None:
        raise SetupError("the fleet has ended just after its start: try again")
    note, lock = held
    try:
        yield note
    finally:
        os.close(lock)


def retire(path: Path) -> bool:
    """Remove the note at `path`, so that no further `run` finds this fleet. False while a `run` uses it."""
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            session.remove(path, os.getpid())
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
    return True


async def until_idle(bus: Bus, fleet: str, keep_alive_s: float, may_end: Callable[[], bool]) -> None:
    """Return once no request has run in `fleet` for `keep_alive_s` and `may_end` agrees."""
    loads: dict[str, tuple[tuple[str, int], ...]] = {}
    used = asyncio.Event()

    def on_heartbeat(delivery: Delivery) -> None:
        with contextlib.suppress(WireError):  # a message of another version
            envelope = codec.decode(delivery.data)
            beat, source = envelope.message, envelope.source
            if isinstance(beat, Heartbeat) and beat.kind in _WORKERS:
                if SchedulerCounter.REQUESTS.loaded(beat.load) or loads.get(source) != beat.load:
                    used.set()
                loads[source] = beat.load

    await bus.subscribe(subjects.heartbeat_all(fleet), on_heartbeat)
    while True:
        used.clear()
        try:
            async with asyncio.timeout(keep_alive_s):
                await used.wait()
        except TimeoutError:
            if may_end():
                return


def stop(path: Path, report: Report) -> list[RunState]:
    """End every `up` of the fleet whose note is at `path`, and wait for their end; each NOTICE_S is
    reported. Raises SetupError if there is none."""
    notes = session.runs(path)
    if not notes:
        raise SetupError(f"no fleet {path.stem} runs here: there is no note of one at {path}")
    with ExitStack() as stack:
        handles: dict[int, RunState] = {}
        for note in notes:
            try:
                handle = os.pidfd_open(note.pid)
                stack.callback(os.close, handle)
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            except ProcessLookupError:
                continue
            except PermissionError:
                raise SetupError(f"the fleet {note.fleet} is another user's: process {note.pid}") from None
            handles[handle] = note
        began_s, notice_s = time.monotonic(), NOTICE_S
        while handles and (waited_s := time.monotonic() - began_s) < END_S:
            if waited_s >= notice_s:
                what = f"fleet {path.stem} drains: requests that run have the time of drain_timeout_s"
                report(f"{what}; {waited_s:.0f} s so far")
                notice_s = waited_s + NOTICE_S
            for handle in select.select(handles, [], [], min(notice_s, END_S) - waited_s)[0]:
                del handles[handle]
    for note in handles.values():
        raise SetupError(f"process {note.pid} has not ended within {END_S:g} s: it drains its requests")
    return notes


def _hold(path: Path) -> tuple[RunState, int] | None:
    """The note at `path` and its lock, shared; None if no fleet runs or it is about to end."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)
    note = session.read(path)
    with contextlib.suppress(FileNotFoundError):
        if note is not None and os.path.samestat(os.fstat(lock), path.stat()):
            return note, lock
    os.close(lock)
    return None


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SetupError(f"{folder} cannot be used for run files ({error}): set --cache-dir") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.access(folder, os.W_OK):
            raise SetupError(f"{folder} cannot be written: set --cache-dir")
        yield
    finally:
        os.close(lock)


def _start(loaded: Loaded, note: Path, report: Report) -> None:
    """Start `headrace up` in a session of its own and return once its note is written. Raises SetupError."""
    settings = loaded.settings
    address = settings.http_address
    given = loaded.origins["http"] != "default"
    if not given and isinstance(address, tuple) and not is_free(address[1]):  # another server has it
        settings = settings.model_copy(update={"http": "127.0.0.1:0"})
    process = subprocess.Popen(
        module_command("services.launcher.cli", "up", UNTIL_IDLE),
        env=with_import_path({**os.environ, **settings.to_env()}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # it outlives this command, its terminal and Ctrl-C
    )
    assert process.stdout is not None
    with process.stdout as lines:  # when it is closed, the fleet discards what it prints
        try:
            _await_note(process, lines, note, report)
        except BaseException:
            process.terminate()
            lines.read()  # to its end: it could not end while the pipe is full
            process.wait()
            raise


def _await_note(process: subprocess.Popen[str], lines: IO[str], note: Path, report: Report) -> None:
    seen: list[str] = []
    for line in lines:
        seen.append(line.rstrip())
        report(seen[-1])
        known = session.read(note)
        if known is not None and known.pid == process.pid:
            return
    *before, last = seen[-LAST_LINES:] or ["it printed nothing"]
    print("\n".join(before), file=sys.stderr)
    raise SetupError(f"the fleet did not start: {last.partition('): ')[2] or last}")
