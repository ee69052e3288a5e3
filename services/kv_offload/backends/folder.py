"""`Folder`: an L2 of files, in a folder that several hosts may share with each other and with other programs.

    put   FILE.<random>.tmp ──write──▶ rename ──▶ FILE.data        a reader never sees a part of a value
    get   FILE.data ──▶ its time of change is now                  so that time orders files by their last use
    upkeep, a thread:   all files ──too many bytes──▶ the least recently used are removed

The folder may hold as many bytes as its disk has free, or the number in its URL. No process knows what others
write, so each looks at the whole folder again when it has written half of what was left for it. Times are
those of the file system, and order the files by their use, which is all that a clock that was set can change.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote

from services.kv_offload.backends.interface import DamagedValue, RefusedWrite, Remote, RemoteError

log = logging.getLogger("headrace.kv_offload")

FORM = "file:///folder or file:///folder?gib=100 (the most it may hold)"
_LIMIT = re.compile(r"(?:gib=([0-9]{1,6}(?:\.[0-9]{1,3})?))?")
DISK_POLL_S = 10.0  # between looks at the disk, which other programs fill, too
ROOM_PERCENT = 10  # of the limit: made by an eviction, and written at most before the next look
LEFT_FREE = 20  # a limit of its own leaves 1/20 of the disk free
PARTIAL_S = 600.0  # an unfinished file that has been as it is for so long has no writer
CLOSE_S = 2.0  # most time to wait for the end of a look; its thread is a daemon
SMALL_BYTES = 4_096  # such files (lengths of values) stay: they take no room worth a miss of all values
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_GONE = (errno.ENOENT, errno.ESTALE)
_PREFIX, _VALUE, _PARTIAL = "headrace@", ".data", ".tmp"


def build(parts: SplitResult, _deadline_s: float) -> Callable[[], Remote] | None:
    """The folder at a URL, one that all threads share, since it counts what they write; None for a URL of
    another form."""
    limit = _LIMIT.fullmatch(parts.query)
    if parts.netloc or not parts.path.startswith("/") or limit is None:
        return None
    folder = Folder(unquote(parts.path), int(float(limit[1] or 0) * (1 << 30)))
    return lambda: folder


@dataclass(frozen=True, slots=True)
class _File:
    used_s: float  # in the time of the file system
    held_bytes: int
    path: str
    small: bool


class Folder:
    """See `interface.Remote`. Threads may share it, and should: it counts what they write. Calls have no
    deadline, since a thread that waits for a disk cannot be ended."""

    def __init__(self, path: str, limit_bytes: int = 0) -> None:
        """`limit_bytes`: the most that the folder holds; 0: as many as its disk has free."""
        self._path, self._limit_bytes = path, limit_bytes
        self._turn = threading.Lock()  # for what follows
        self._left_bytes = 0  # for puts until the next look
        self._largest_bytes = 0  # of the values
        self._look_at_bytes = 0  # a smaller rest asks for a look
        self._held_bytes = -1  # at the last look, and what was put since; -1: before the first look
        self._put_bytes = self._running_bytes = 0  # of puts that have ended, and that run
        self._looking = threading.Lock()
        self._partial_s = dict[_File, float]()  # since when a look finds an unfinished file as it is
        self._wake = threading.Event()
        self._upkeep: tuple[threading.Thread, threading.Event] | None = None  # and what ends it

    def put(self, name: str, value: memoryview) -> None:
        self._start()
        try:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._file(name))
                return
            with self._hold_room(value.nbytes):
                try:
                    self._write(name, value)
                except FileNotFoundError:  # the folder was removed
                    Path(self._path).mkdir(parents=True, exist_ok=True)
                    self._write(name, value)
        except OSError as error:
            if error.errno in _FULL:
                self._wake.set()
            if error.errno in (*_FULL, *_READ_ONLY):
                raise RefusedWrite(f"the folder {self._path} takes no value: {error.strerror}") from error
            raise self._broken(error) from error

    def get(self, name: str, into: memoryview) -> int:
        if into.readonly:
            raise ValueError("a value cannot be read into a read-only buffer")
        self._start()
        try:
            with open(self._file(name), "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                read, rest = 0, into.cast("B")
                while found.st_size == into.nbytes and read < into.nbytes:
                    if not (count := file.readinto(rest[read:])):
                        break
                    read += count
                if read != into.nbytes:
                    raise DamagedValue(f"the value of {name} is not {into.nbytes} bytes long: delete it")
                self._touch(file.fileno())
                return read
        except OSError as error:
            if error.errno in _GONE:
                return 0
            raise self._broken(error) from error

    def delete(self, name: str) -> None:
        try:
            os.unlink(self._file(name))
        except OSError as error:
            if error.errno not in _GONE:
                raise RemoteError(
                    f"the folder {self._path} did not delete {name}: {error.strerror}"
                ) from error

    def has(self, names: list[str]) -> list[bool]:
        self._start()
        return [self._has_file(name) for name in names]

    def close(self) -> None:
        with self._turn:
            upkeep, self._upkeep = self._upkeep, None
        if upkeep is not None:
            thread, ended = upkeep
            ended.set()
            self._wake.set()
            thread.join(CLOSE_S)

    # ---- files ----------------------------------------------------------------------------------

    def _file(self, name: str) -> str:
        """The name that LMCache's client gave it in earlier versions."""
        return f"{self._path}/{_PREFIX}0x00000000@0@{name}{_VALUE}"

    def _has_file(self, name: str) -> bool:
        try:
            os.stat(self._file(name))
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise self._broken(error) from error
        return True

    def _write(self, name: str, value: memoryview) -> None:
        whole = self._file(name)
        part = f"{whole.removesuffix(_VALUE)}.{secrets.token_hex(8)}{_PARTIAL}"
        try:
            with open(part, "xb", buffering=0) as file:
                rest = value.cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
            os.rename(part, whole)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    def _touch(self, file: int) -> None:
        """The file was used now: without a number, in the time of the file system."""
        with contextlib.suppress(OSError):  # read-only: then others evict
            os.utime(file)

    def _broken(self, error: OSError) -> RemoteError:
        return RemoteError(f"the folder {self._path} cannot be reached: {error.strerror}. Is its disk there?")

    # ---- room -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _hold_room(self, size_bytes: int) -> Iterator[None]:
        """The room of a value that is written now. Raises RefusedWrite while there is none, OSError."""
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        if self._held_bytes < 0:
            self._look()
        with self._turn:
            fits = size_bytes <= self._left_bytes
            if fits:
                self._left_bytes -= size_bytes
                self._held_bytes += size_bytes
                self._running_bytes += size_bytes
            if not fits or self._left_bytes < self._look_at_bytes:
                self._wake.set()
        if not fits:
            raise RefusedWrite(f"the folder {self._path} is full: room is made, or others fill its disk")
        try:
            yield
        finally:
            with self._turn:
                self._running_bytes -= size_bytes
                self._put_bytes += size_bytes

    def _start(self) -> None:
        with self._turn:
            if self._upkeep is None:
                ended = threading.Event()
                thread = threading.Thread(
                    target=self._watch_disk, args=(ended,), name="l2-folder", daemon=True
                )
                self._upkeep = thread, ended
                thread.start()

    def _watch_disk(self, ended: threading.Event) -> None:
        while True:
            asked = self._wake.wait(DISK_POLL_S)
            if ended.is_set():
                return
            self._wake.clear()
            with contextlib.suppress(OSError):  # a call finds it, too
                if asked or self._limit(self._held_bytes) < self._held_bytes:
                    self._look()

    def _look(self) -> None:
        """Count all files; remove the least recently used near the limit, and what dead writers have left."""
        with self._looking:
            self._look_alone()

    def _look_alone(self) -> None:
        Path(self._path).mkdir(parents=True, exist_ok=True)
        with self._turn:
            before = self._put_bytes
        files = sorted(self._files(), key=lambda file: file.used_s)
        now_s, before_s, self._partial_s = time.monotonic(), self._partial_s, dict[_File, float]()
        for part in [file for file in files if file.path.endswith(_PARTIAL)]:
            since_s = before_s.get(part, now_s)
            if now_s - since_s > PARTIAL_S and _remove(part):
                files.remove(part)
            else:
                self._partial_s[part] = since_s
        held = sum(file.held_bytes for file in files)
        limit, count = self._limit(held), 0
        room = max(limit * ROOM_PERCENT // 100, self._largest_bytes)
        for file in files:
            if held <= limit - room:
                break
            if not file.small and file.path.endswith(_VALUE) and _remove(file):
                held, count = held - file.held_bytes, count + 1
        if count:
            log.info("L2: %d least recently used files of %s are removed", count, self._path)
        with self._turn:
            held += self._put_bytes - before + self._running_bytes  # perhaps not among the files
            self._left_bytes = min(max(limit - held, 0), room)
            self._look_at_bytes = self._left_bytes // 2
            self._held_bytes = held

    def _files(self) -> Iterator[_File]:
        with os.scandir(self._path) as found:
            for entry in found:
                if entry.name.startswith(_PREFIX) and entry.name.endswith((_VALUE, _PARTIAL)):
                    with contextlib.suppress(FileNotFoundError):  # another host has removed it
                        about = entry.stat(follow_symlinks=False)
                        held = max(about.st_size, about.st_blocks * 512)
                        yield _File(about.st_mtime, held, entry.path, about.st_size <= SMALL_BYTES)

    def _limit(self, held: int) -> int:
        """The bytes that the folder may hold, which has `held` now."""
        disk = os.statvfs(self._path)
        room = held + disk.f_bavail * disk.f_frsize
        if self._limit_bytes:
            return min(self._limit_bytes, max(room - disk.f_blocks * disk.f_frsize // LEFT_FREE, 0))
        return room // 2


def _remove(file: _File) -> bool:
    """False if it has gone."""
    with contextlib.suppress(OSError):
        os.unlink(file.path)
        return True
    return False
