"""What the processes of a fleet take of the machine, from /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from loadtest.faults import children

GONE = (FileNotFoundError, ProcessLookupError)
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree(pid: int) -> list[int]:
    """A process and all that it has started, without those that have just ended."""
    with suppress(*GONE):
        return [pid, *(each for child in children(pid) for each in tree(child))]
    return []


def name_of(pid: int) -> str:
    """The kind of a service, else the program."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if "services.launcher.serve" in words:
        return words[words.index("services.launcher.serve") + 1]
    return "up" if "services.launcher.cli" in words else Path(words[0]).name


def cpu_s(*pids: int) -> float:
    """The CPU time of processes so far, in user and system mode, with that of children that have ended."""
    total = 0.0
    for pid in pids:
        with suppress(*GONE):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(ticks) for ticks in fields[11:15]) / TICKS_A_SECOND
    return total


def resident_bytes(pid: int) -> int:
    """The resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def memory_bytes(pid: int) -> dict[str, int]:
    """The memory of a process by the names of smaps_rollup; pages that several share count once (Pss). Empty
    for a process that has ended, and for one of another user."""
    with suppress(*GONE, PermissionError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return {}
