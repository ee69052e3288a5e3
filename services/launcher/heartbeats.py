"""Whether a service lives: it notes each of its heartbeats in a file, which whoever keeps it running reads.

    event loop of a service ── each heartbeat ──▶ FILE ◀── `headrace up`, once a second
                                                  ◀── `headrace health`, in each container

A process hangs that has neither beaten nor used any CPU for HANGS_S, in no thread and no child. One that
loads, compiles or starves uses some, or waits for a CPU or a disk; one that a debugger holds is left alone. A
file needs no broker, so a broker that hangs has no service killed.

Imports next to nothing: health checks run every few seconds beside the services, for ever.
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
LATE_S = 1.0  # and this: a busy machine heartbeats late
PARDON_S = 5.0  # whoever looks less often was stopped itself

READY, CUT_OFF = "ready", "cut_off"  # deaf: ready, but the broker does not bring it its own heartbeats
_LINE_BYTES = 120
_BUSY = frozenset("RDt")  # a thread runs or wants to, waits for a disk, is being debugged
_STOPPED = "T"


class HeartbeatNote(NamedTuple):
    """What a service says of itself with a heartbeat."""

    pid: int
    born: int  # ticks from the boot to its start: a pid is used again
    state: str
    interval_s: float
    at_s: float  # monotonic, the same for all processes of a machine

    @property
    def late(self) -> bool:
        """Whether the next heartbeat should have come."""
        return time.monotonic() - self.at_s > LATE_HEARTBEATS * self.interval_s + LATE_S

    @property
    def hangs_after_s(self) -> float:
        """From when on its silence counts."""
        return max(LOADS_S if self.state == "starting" else HANGS_S, LATE_HEARTBEATS * self.interval_s)


class HeartbeatFile:
    """Where a service notes its heartbeats. Raises OSError where it cannot."""

    def __init__(self, path: str, interval_s: float) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        born, _ = _age_and_ticks(f"/proc/{os.getpid()}/stat")
        self._who, self._interval_s = f"{os.getpid()} {born}", interval_s
        self.note("starting")

    def note(self, state: str) -> None:
        """It heartbeats. A full disk is no reason not to."""
        line = f"{self._who} {state} {self._interval_s:g} {time.monotonic():.3f}"
        with suppress(OSError):
            os.pwrite(
                self._file, line.ljust(_LINE_BYTES).encode(), 0
            )  # at once: a reader sees all or nothing


def read(path: str) -> HeartbeatNote | None:
    """The last heartbeat noted there; None where there is none."""
    try:
        with open(path, encoding="ascii") as file:
            pid, born, state, interval_s, at_s = file.read().split()
        return HeartbeatNote(int(pid), int(born), state, float(interval_s), float(at_s))
    except (OSError, ValueError):
        return None


# ---- who hangs ----------------------------------------------------------------------------------


def ticks_of(pid: int) -> int | None:
    """CPU time of a living process and its children so far, in ticks of 10 ms; None while one of their
    threads is busy. Of a process that was stopped (SIGSTOP) its children do not count, which may wait for it
    in a loop."""
    states, ticks = _threads(pid)
    if not states:  # it has ended, or this is no Linux
        return None
    if set(states) == {_STOPPED}:
        return ticks
    for child in _children(pid):
        more, used = _threads(child)
        states, ticks = states + more, ticks + used
    return None if _BUSY & set(states) else ticks


class SilenceTimers:
    """Since when processes, by name, have shown no sign of life. Pure."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[object, float, float]] = {}  # sign, since, last looked

    def seconds(self, name: str, sign: object, now_s: float) -> float:
        """How long `sign` has been the same; None is one of life."""
        before, since_s, looked_s = self._since.get(name, (None, now_s, now_s))
        if sign is None or sign != before or now_s - looked_s > PARDON_S:
            since_s = now_s
        self._since[name] = (sign, since_s, now_s)
        return now_s - since_s


class Watch:
    """Finds who hangs among the services of a run. Look about once a second."""

    def __init__(self, folder: str, ticks_of: Callable[[int], int | None] = ticks_of) -> None:
        self._folder, self._ticks_of = folder, ticks_of
        self._silences = SilenceTimers()

    def path(self, name: str) -> str:
        """Where the service of this name notes its heartbeats."""
        return os.path.join(self._folder, f"{name}.beat")

    def silent_s(self, name: str, pid: int) -> float:
        """How long this process has been hanging; 0: it does not."""
        note, now_s = read(self.path(name)), time.monotonic()
        if note is None or note.pid != pid:  # it starts
            note = HeartbeatNote(pid, 0, "starting", 0.0, 0.0)
        ticks = self._ticks_of(pid) if note.late else None
        silent_s = self._silences.seconds(name, None if ticks is None else (note, ticks), now_s)
        return silent_s if silent_s >= note.hangs_after_s else 0.0


# ---- the health check of a container ------------------------------------------------------------


def runtime_path(kind: str) -> str:
    """Where the only service of a kind notes its heartbeats: the runtime folder; empty where there is none. A
    container has one for itself."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(folder, "headrace", f"{kind}.beat") if folder else ""


def health(kind: str) -> None:
    """`headrace health KIND`: return when the service of this kind that runs here is ready. Raises
    SetupError, Unavailable. For the health check of a container.

    A process that hangs, has lost the broker, still loads or already drains is not healthy. One that hangs at
    two checks in a row, HANGS_S or more apart, is killed, so that the engine starts it again: none restarts
    what is merely unhealthy.
    """
    path = runtime_path(kind)
    if (note := read(path)) is None:
        raise SetupError(f"no {kind} runs here: set XDG_RUNTIME_DIR for it and for this command")
    missed = f"{path}.missed"
    if note.late:
        _miss(kind, note, missed)
    with suppress(OSError):
        os.unlink(missed)
    if note.state != READY:
        why = "hears nothing of the nats-server" if note.state == CUT_OFF else f"is {note.state}"
        raise Unavailable(f"the {kind} here {why}")


def _miss(kind: str, note: HeartbeatNote, missed: str) -> None:
    """Remember when it was first found silent, and what it had done by then. Raises Unavailable."""
    silent = f"the {kind} here has not beaten for {time.monotonic() - note.at_s:.0f} s"
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
    """The states of a process's threads, a letter each, and the CPU ticks they have used."""
    states = ""
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            states += _stat(f"/proc/{pid}/task/{thread}/stat")[0]
    return states, _age_and_ticks(f"/proc/{pid}/stat")[1]


def _children(pid: int) -> Iterator[int]:
    """All below a process."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                for child in map(int, file.read().split()):
                    yield child
                    yield from _children(child)


def _age_and_ticks(path: str) -> tuple[int, int]:
    """When a process began, in ticks since the boot, and how many it has used; zeros once it is gone."""
    try:
        fields = _stat(path)
    except OSError:
        return 0, 0
    return int(fields[19]), int(fields[11]) + int(fields[12])


def _stat(path: str) -> list[str]:
    """The fields of proc_pid_stat(5) behind the name, from the state on."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
