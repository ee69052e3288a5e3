"""Starts a `headrace up` with the flags of a bench and stops it at the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

STOP_S = 90


@contextmanager
def running_up(
    flags: Sequence[str], env: Mapping[str, str] | None = None, log: str = os.devnull
) -> Iterator[tuple[int, str]]:
    """(Process id, URL of its nats-server), once it is ready. What the services say goes to `log`. Raises
    SystemExit when it ends before that."""
    with tempfile.TemporaryDirectory() as home, Path(log).open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.launcher.cli", "up", "--port", "0", "--http", "off", *flags],
            env={**os.environ, "XDG_RUNTIME_DIR": home, "XDG_STATE_HOME": home, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith("ready"):
                break
        else:
            raise SystemExit(
                f"`headrace up {' '.join(flags)}` did not start; by hand it says why\n{''.join(printed[-5:])}"
            )
        try:
            (url,) = re.findall(r"nats://\S+", "".join(printed))
            yield process.pid, url
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=STOP_S)
