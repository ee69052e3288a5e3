"""A Unix socket that one process serves: a file that is made at the start and removed at the end.

https://man7.org/linux/man-pages/man7/unix.7.html. A killed process leaves its file: nothing listens there,
and the next start replaces it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from urllib.parse import quote

from shared.errors import SetupError

PREFIX = "unix:"  # of a path in the setting `http`


class UnixListener:
    """A listening socket and its file. The umask sets its rights: usually only this user may connect."""

    def __init__(self, path: str) -> None:
        """Raises SetupError if another process listens there, or if it is a file of another kind."""
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _make_free(path)
            self.socket.bind(path)
            self.socket.listen()
            self._file = _identity(path)
        except OSError as error:
            self.socket.close()
            raise SetupError(
                f"the gateway cannot listen on {path} ({error.strerror or error}): set `http` to another path"
            ) from None

    def check(self) -> None:
        """Raises SetupError if the file was removed or replaced: then no client finds this process."""
        if _identity(self.path) != self._file:
            raise SetupError(f"the socket {self.path} was removed or replaced")

    def remove(self) -> None:
        """Remove the file, unless another process has replaced it."""
        if _identity(self.path) == self._file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def url_of(path: str, *, tls: bool = False) -> str:
    """The URL of a server on a Unix socket, in the form of requests-unixsocket, aiohttp and others."""
    return f"http{'s' * tls}+unix://{quote(path, safe='')}"


def _identity(path: str) -> tuple[int, int, int] | None:
    """Differs between a file and a later one at the same path, even with the same inode number; chmod keeps
    it."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _make_free(path: str) -> None:
    """Remove a socket on which nothing listens. Raises OSError if there is anything else."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener with a full queue is one, too
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, "another process listens there")
