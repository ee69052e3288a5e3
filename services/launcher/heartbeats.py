"""Detects services that hang: each service notes its heartbeats in a file, which its supervisor reads.

    event loop of a service ── each heartbeat ──▶ FILE ◀── `headrace up`, once a second
                                                       ◀── `headrace health`, in each container

A process hangs if for HANGS_S it has sent no heartbeat and no thread or child of it has used CPU. A process
that loads, compiles or starves uses CPU or waits for a CPU or a disk, and one under a debugger is left alone.
The file needs no broker, so a hanging broker gets no service killed.

This module imports very little: health checks start a new process every few seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from shared.errors import SetupError, Unavailable

HANGS_S = 15.0
LOADS_S = 120.0  # instead, until a service is ready: it may wait for a network
LATE_HEARTBEATS = 3
LATE_S = 1.0  # plus this: on a busy machine heartbeats are late
PARDON_S = 5.0  # after a longer gap between two checks the checking process was itself stopped

READY, CUT_OFF = "ready", "cut_off"  # cut off: ready, but its own heartbeats do not come back from the broker
_ENDED = ("stopped", "failed")  # the fleet has its goodbye
_LINE_BYTES = 160
_BUSY = frozenset("RDt")  # a thread runs or wants to, waits for a disk, is being debugged
_STOPPED = "T"


class HeartbeatNote(NamedTuple):
    """What a service writes about itself with each heartbeat."""

    pid: int
    born: int  # ticks from the boot to its start: pids are reused
    state: str
    interval_s: float
    at_s: float  # monotonic, the same for all processes of a machine
    source: str = "-"  # kind.id, "-" before the first heartbeat
    epoch: int = 0  # the incarnation in the heartbeats

    @property
    def is_late(self) -> bool:
        """Whether the next heartbeat is overdue."""
        return time.monotonic() - self.at_s > LATE_HEARTBEATS * self.interval_s + LATE_S

    @property
    def hangs_after_s(self) -> float:
        """The silence after which the service counts as hanging."""
        return max(LOADS_S if self.state == "starting" else HANGS_S, LATE_HEARTBEATS * self.interval_s)


class HeartbeatFile:
    """The file in which a service notes its heartbeats. Raises OSError if it cannot be opened."""

    def __init__(self, path: str, interval_s: float) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        born, _ = _age_and_ticks(f"/proc/{os.getpid()}/stat")
        self._process, self._interval_s = f"{os.getpid()} {born}", interval_s
        self.note("starting")

    def note(self, state: str, source: str = "-", epoch: int = 0) -> None:
        """Write a heartbeat in one call, so that a reader sees all of it. A full disk is ignored."""
        line = f"{self._process} {state} {self._interval_s:g} {time.monotonic():.3f} {source} {epoch}"
        with suppress(OSError):
            os.pwrite(self._file, line.ljust(_LINE_BYTES).encode(), 0)


def read(path: str) -> HeartbeatNote | None:
    """The last heartbeat noted at `path`, or None."""
    try:
        with open(path, encoding="ascii") as file:
            pid, born, state, interval_s, at_s, source, epoch = file.read().split()
        return HeartbeatNote(int(pid), int(born), state, float(interval_s), float(at_s), source, int(epoch))
    except (OSError, ValueError):
        return None


# ---- detection ----------------------------------------------------------------------------------


def ticks_of(pid: int) -> int | None:
    """CPU time used by a living process and its children, in ticks of 10 ms; None while a thread is busy. The
    children of a process stopped by SIGSTOP do not count: they may wait for it in a loop."""
    states, ticks = _threads(pid)
    if not states:  # the process has ended, or this is not Linux
        return None
    if set(states) == {_STOPPED}:
        return ticks
    for child in _children(pid):
        more, used = _threads(child)
        states, ticks = states + more, ticks + used
    return None if _BUSY & set(states) else ticks


class SilenceTimers:
    """How long each process, by name, has shown no sign of life. Pure."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[object, float, float]] = {}  # sign, since when, time of the last check

    def seconds(self, name: str, sign: object, now_s: float) -> float:
        """Seconds for which `sign` has not changed; 0 if it is None, which means that the process is busy."""
        before, since_s, looked_s = self._since.get(name, (None, now_s, now_s))
        if sign is None or sign != before or now_s - looked_s > PARDON_S:
            since_s = now_s
        self._since[name] = (sign, since_s, now_s)
        return now_s - since_s


class Watch:
    """Finds the services of a run that hang. Call `silent_s` about once a second."""

    def __init__(self, folder: str, ticks_of: Callable[[int], int | None] = ticks_of) -> None:
        self._folder, self._ticks_of = folder, ticks_of
        self._silences = SilenceTimers()

    def path(self, name: str) -> str:
        """The heartbeat file of the service with this name."""
        return os.path.join(self._folder, f"{name}.beat")

    def unannounced(self, name: str, pid: int) -> HeartbeatNote | None:
        """The last heartbeat of a process that has ended, if the fleet has it and no goodbye after it."""
        note = read(self.path(name))
        is_living = note is not None and note.pid == pid and note.source != "-" and note.state not in _ENDED
        return note if is_living else None

    def silent_s(self, name: str, pid: int) -> float:
        """Seconds for which this process has been hanging; 0 if it does not hang."""
        note, now_s = read(self.path(name)), time.monotonic()
        if note is None or note.pid != pid:  # the process is starting
            note = HeartbeatNote(pid, 0, "starting", 0.0, 0.0)
        ticks = self._ticks_of(pid) if note.is_late else None
        silent_s = self._silences.seconds(name, None if ticks is None else (note, ticks), now_s)
        return silent_s if silent_s >= note.hangs_after_s else 0.0


# ---- the health check of a container ------------------------------------------------------------


def runtime_path(kind: str) -> str:
    """The heartbeat file of the only service of a kind in a container; empty without a runtime folder."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(folder, "headrace", f"{kind}.beat") if folder else ""


def health(kind: str) -> None:
    """`headrace health KIND`, the health check of a container: return if the service here is ready.

    Raises SetupError if no such service runs, and Unavailable if it hangs, has lost the broker, loads or
    drains. A process that hangs at two checks, HANGS_S or more apart, is killed, so that the container engine
    starts it again: an engine does not restart a container that is only unhealthy.
    """
    path = runtime_path(kind)
    if (note := read(path)) is None:
        raise SetupError(f"no {kind} runs here: set XDG_RUNTIME_DIR for the service and for this command")
    missed = f"{path}.missed"
    if note.is_late:
        _miss(kind, note, missed)
    with suppress(OSError):
        os.unlink(missed)
    if note.state != READY:
        why = "receives nothing from the nats-server" if note.state == CUT_OFF else f"is {note.state}"
        raise Unavailable(f"the {kind} here {why}")


def _miss(kind: str, note: HeartbeatNote, missed: str) -> None:
    """Note in file `missed` when the silence was first seen and the CPU time used by then. Raises
    Unavailable."""
    silent = f"the {kind} here has sent no heartbeat for {time.monotonic() - note.at_s:.0f} s"
    if _age_and_ticks(f"/proc/{note.pid}/stat")[0] != note.born:
        raise Unavailable(f"{silent}: its process has ended")
    sign, now_s = f"{note.at_s} {ticks_of(note.pid)}", time.monotonic()
    before, since_s = "", now_s
    with suppress(OSError, ValueError), open(missed, encoding="ascii") as file:
        before, since = file.read().rsplit(" ", 1)
        since_s = float(since)
    if before != sign or sign.endswith("None"):
        with open(missed, "w", encoding="ascii") as file:
            file.write(f"{sign} {now_s}")
        raise Unavailable(silent)
    if now_s - since_s >= note.hangs_after_s - LATE_S:
        os.kill(note.pid, signal.SIGKILL)
        raise Unavailable(f"{silent} and used no CPU: killed")
    raise Unavailable(silent)


# ---- the process table --------------------------------------------------------------------------


def _threads(pid: int) -> tuple[str, int]:
    """The states of a process's threads, one letter each, and the CPU ticks of the process."""
    states = ""
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            states += _stat(f"/proc/{pid}/task/{thread}/stat")[0]
    return states, _age_and_ticks(f"/proc/{pid}/stat")[1]


def _children(pid: int) -> Iterator[int]:
    """All descendants of a process."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                for child in map(int, file.read().split()):
                    yield child
                    yield from _children(child)


def _age_and_ticks(path: str) -> tuple[int, int]:
    """A process's start, in ticks since the boot, and the ticks it has used; zeros if it has ended."""
    try:
        fields = _stat(path)
    except OSError:
        return 0, 0
    return int(fields[19]), int(fields[11]) + int(fields[12])


def _stat(path: str) -> list[str]:
    """The fields of proc_pid_stat(5) after the name, from the state on."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
