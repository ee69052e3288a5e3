"""A test that fails ends the processes that it has started, or the wait for them never ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from loadtest import faults

_SHARED = "resource_tracker"  # of multiprocessing: one for all tests of a process


@contextmanager
def ended_on_failure() -> Iterator[None]:
    """What the block has started is killed when the block raises: at once where a `with` waits for its end,
    which a time limit cannot interrupt a second time."""
    before, usual = set(faults.children(os.getpid())), subprocess.Popen.__exit__

    def leave(
        process: subprocess.Popen[str],
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is not None:
            process.kill()
        usual(process, kind, error, at)

    subprocess.Popen.__exit__ = leave  # type: ignore[method-assign, assignment]  # until the block ends
    try:
        yield
    except BaseException:
        for pid in set(faults.children(os.getpid())) - before:
            with suppress(OSError):  # it ends by itself
                if _SHARED not in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        raise
    finally:
        subprocess.Popen.__exit__ = usual  # type: ignore[method-assign]  # as it was
