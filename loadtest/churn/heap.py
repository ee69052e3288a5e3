"""What a Python process has allocated, written to a file whenever a signal asks for it.

A process with the folder of `sitecustomize` on its PYTHONPATH answers; so do its forks. Resident memory grows
with what is held, and with pages that are only partly used; what is allocated grows with the former alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import ClassVar

ASK = signal.SIGRTMIN + 7
SITE = "from loadtest.churn.heap import answer\nanswer({folder!r})\n"


_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    """The figures of mallinfo(3), sums over all arenas."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _FIELDS]


def sitecustomize(folder: Path) -> None:
    """Write the module that makes a process answer into `folder`."""
    (folder / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))


def answer(folder: str) -> None:
    """Write sizes to `folder` at each signal."""
    mallinfo2 = None
    with suppress(AttributeError):  # another C library
        mallinfo2 = ctypes.CDLL(None).mallinfo2  # once: each call of CDLL allocates
        mallinfo2.restype = _Mallinfo2

    def write(number: int, frame: FrameType | None) -> None:
        path = Path(folder) / str(os.getpid())
        # objects of Python's own allocator (512 bytes and less), and bytes in use of the C library's
        found = {"blocks": sys.getallocatedblocks()}
        if mallinfo2 is not None:
            info = mallinfo2()
            found["malloc_bytes"] = info.uordblks + info.hblkhd
        Path(f"{path}.part").write_text(json.dumps(found))
        os.replace(f"{path}.part", path)

    signal.signal(ASK, write)


def answers(pid: int) -> bool:
    """Whether a process catches the signal, which would end it otherwise."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (ASK - 1) & 1)
    return False
