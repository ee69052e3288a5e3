"""Kills and stops processes of a running `headrace up`, found by name in the process table."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from pathlib import Path


def pids_of(up_pid: int, kind: str) -> list[int]:
    """The processes of one kind, or `nats-server`, among the children of `headrace up`, oldest first."""
    found = []
    for pid in children(up_pid):
        words = _words(pid)
        service = "services.launcher.serve" in words and kind in words
        if service or (words and words[0].endswith(kind)):
            found.append(pid)
    return sorted(found)


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def kill(pid: int) -> None:
    """SIGKILL: the process has no time for anything."""
    os.kill(pid, signal.SIGKILL)


def kill_all(up_pid: int) -> None:
    """SIGKILL for `up`, its services and its nats-server. Returns when they have gone."""
    pids = [up_pid, *children(up_pid)]
    handles = [os.pidfd_open(pid) for pid in pids]
    for pid in reversed(pids):
        send(pid, signal.SIGKILL)
    for handle in handles:
        select.select([handle], [], [], 30)
        os.close(handle)


async def stop(pid: int, seconds: float) -> None:
    """SIGSTOP, as of a machine that swaps or is suspended, and SIGCONT after `seconds`."""
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        send(pid, signal.SIGCONT)


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process, if it has not ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
