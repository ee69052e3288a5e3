"""Where a log goes: a file, or a subject that `headrace record` listens to."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import BinaryIO

from shared.bus import Bus
from shared.errors import SetupError

log = logging.getLogger("headrace.replay")

FILE_FLUSH_US = 1_000_000
BATCH_US = 256_000
BATCH_BYTES = 60 * 1024  # with its headers below 64 KiB
OFFSET_HEADER = "Headrace-Offset"  # bytes of the log before these, so that a loss shows
BEGINS_HEADER = "Headrace-Snapshot"  # these bytes begin a stretch of the log


class FileSink:
    """A new file; one that is there stays, and the name gets a number. Raises SetupError."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = _create(path.expanduser())
        self._flushed_us = 0
        log.info("the event log goes to %s", self.path)

    def begin(self) -> None:
        """A reader of a file finds every stretch by itself."""

    def write(self, data: bytes, now_us: int) -> None:
        """Into the buffer."""
        self._file.write(data)
        self.flush(now_us)

    def flush(self, now_us: int) -> None:
        """To the file, once a second."""
        if now_us - self._flushed_us >= FILE_FLUSH_US:
            self._flushed_us = now_us
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _create(path: Path) -> tuple[Path, BinaryIO]:
    if path.is_dir():
        raise SetupError(f"the event log {path} is a folder: name a file in `event_log`")
    tried, number = path, 1
    while True:
        try:
            return tried, tried.open("xb", buffering=256 * 1024)
        except FileExistsError:
            number += 1
            tried = path.with_name(f"{path.stem}-{number}{path.suffix}")
        except OSError as error:
            raise SetupError(
                f"the event log {path} cannot be written ({error.strerror}): name another file in `event_log`"
            ) from None


class BusSink:
    """Messages on a subject: pieces of one stream of bytes, each with its offset."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject
        self._waiting = bytearray()
        self._offset = 0
        self._begins = False
        self._sent_us = 0

    def begin(self) -> None:
        """What is written next begins a message of its own."""
        self.push()
        self._begins = True

    def write(self, data: bytes, now_us: int) -> None:
        """Whole frames share a message as far as they fit; only a long one is cut."""
        if self._waiting and len(self._waiting) + len(data) > BATCH_BYTES:
            self.push()
        self._waiting += data
        if len(self._waiting) >= BATCH_BYTES:
            self.push()
        self.flush(now_us)

    def flush(self, now_us: int) -> None:
        """Send what waits, some times a second."""
        if now_us - self._sent_us >= BATCH_US:
            self._sent_us = now_us
            self.push()

    def close(self) -> None:
        self.push()

    def push(self) -> None:
        """Send all that waits, now."""
        data, self._waiting = bytes(self._waiting), bytearray()
        for start in range(0, len(data), BATCH_BYTES):
            headers = {OFFSET_HEADER: str(self._offset)}
            if self._begins:
                headers[BEGINS_HEADER] = "1"
                self._begins = False
            piece = data[start : start + BATCH_BYTES]
            self._bus.publish(self._subject, piece, headers=headers)
            self._offset += len(piece)
