"""Child processes that never outlive their parent."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded before any fork


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn`: the child gets signal `number` when the thread that started it ends (Linux).

    So start children from the main thread. A parent that ended during the fork counts, too.
    """
    parent = os.getpid()

    def arm() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
            if os.getppid() != parent:
                os.kill(os.getpid(), number)

    return arm


def leave(status: int) -> int:
    """The exit status; but with another thread still at work, an engine that is loading say, end the
    process here: native code must not see the interpreter go down around it."""
    if threading.active_count() > 1:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
