"""Starts services as forks of one process that has imported what all of them share, which takes each of them
a quarter of a CPU second otherwise (Linux only).

    `headrace up` ── socket, log pipe ──▶ fork server ── fork ──▶ ends at once ── fork ──▶ service
         └────────────────── socket: argv, environment, once it is our child ─────────────────▲

`up` adopts the service when the process between ends, as it is a subreaper (prctl(2)) meanwhile: it gets the
exit status, and the service dies with it. No library is imported before the fork that reads variables of the
service's own environment, like torch and NumPy, or starts threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.processes import LIBC, die_with_parent, importing, module_command, with_import_path

SERVE = tuple(module_command("services.launcher.serve"))
IMPORTED = (SERVE[-1], "shared.actor.runtime", "shared.config", "shared.nats.bus", "uvloop")
IMPORTED_LATER = (
    "shared.api",
)  # of most services: after the first one, which waits for no more than it needs
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # each line of a log arrives at once
FORK_WAIT_S = 30.0  # a server that hangs is given up: the first answer takes the time of the imports
_ROOM = 2_000  # bytes of a service's command line that `ps` shows
_PR_SET_CHILD_SUBREAPER = 36
_ARGV_START, _ARGV_END = 45, 46  # in /proc/self/stat, counted from the state


@dataclass(eq=False, slots=True)
class Forked:
    """A running service, with what the supervisor uses of `asyncio.subprocess.Process`."""

    pid: int
    returncode: int | None = None

    async def wait(self) -> int:
        """Wait for its end. Returns the exit status. Call it once."""
        loop, ended, handle = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(self.pid)
        try:
            loop.add_reader(handle, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])  # noqa: ASYNC222 - it has ended
        return self.returncode


class ForkServer:
    """Use it on the main thread: the process ends with the thread that started it, as do the services."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """`env`: from which Python reads how to run. Raises OSError, also where some builds of Python, old
        kernels or sandboxes lack pidfd_open."""
        if LIBC is None or not hasattr(os, "pidfd_open"):
            raise OSError(errno.ENOSYS, "prctl or pidfd_open is missing")
        os.close(os.pidfd_open(os.getpid()))
        self._turn = asyncio.Lock()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                module_command(__name__, str(theirs.fileno()), "-" * _ROOM),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    async def start(self, argv: Sequence[str], env: Mapping[str, str], output: int) -> Forked:
        """Run `argv`, which begins with SERVE, with stdout and stderr to `output`. Raises OSError if the
        process has ended or hangs."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            ours, theirs = socket.socketpair()
            with ours:
                _adopt(on=True)
                try:
                    with theirs:
                        socket.send_fds(self._socket, [b"1"], [theirs.fileno(), output])
                    async with asyncio.timeout(FORK_WAIT_S):
                        answer = await loop.sock_recv(self._socket, 1)
                    if not answer or not (pid := ours.recv(4)):
                        raise ConnectionError("the fork server has ended, or cannot fork")
                finally:
                    _adopt(on=False)
                ours.sendall(json.dumps([argv, dict(env)]).encode())
        return Forked(int.from_bytes(pid))

    def close(self) -> None:
        """End the process, not the services. A second call does nothing."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def started_ahead() -> Generator[ForkServer | None]:
    """One that imports while this process reads its settings; None where it cannot work. It gets no settings:
    one may have a password that no service needs."""
    from shared.config import PREFIX

    others = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
    try:
        forks = ForkServer(with_import_path({**others, **UNBUFFERED}))
    except OSError:
        yield None
        return
    try:
        yield forks
    finally:
        forks.close()


def _adopt(*, on: bool) -> None:
    if LIBC is not None:
        LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def main() -> int:
    """Serve until the other end of the socket closes; in each service, run it."""
    control, up = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    _show(sys.orig_argv[:-1])
    _import(IMPORTED)
    while fds := socket.recv_fds(control, 1, 2)[1]:
        given, output = fds
        if (between := os.fork()) == 0:
            if pid := os.fork():
                os.write(given, pid.to_bytes(4))
                os._exit(0)
            control.close()
            return _serve(given, output, up)
        os.waitpid(between, 0)
        os.close(given)
        os.close(output)
        control.send(b"1")
        _import(IMPORTED_LATER)
    return 0


def _import(names: Sequence[str]) -> None:
    with importing():  # later collections in a service would write to each object, hence copy its page
        for name in names:
            importlib.import_module(name)


def _serve(given: int, output: int, up: int) -> int:
    with os.fdopen(given) as spec:
        argv, env = json.load(spec)
    die_with_parent(signal.SIGKILL, parent=up)()
    os.setsid()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    _show(argv)
    sys.argv = argv[len(SERVE) - 1 :]
    status: int = importlib.import_module(SERVE[-1]).main()
    return status


def _show(argv: Sequence[str]) -> None:
    """Make this the command line in the process table."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(stat[_ARGV_START]), int(stat[_ARGV_END])
    if not start < end:
        return  # some sandboxes show neither
    text = os.fsencode("\0".join(argv))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


if __name__ == "__main__":
    raise SystemExit(main())
