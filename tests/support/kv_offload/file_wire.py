"""A transport between peers of one machine for tests: the address of an arena is the name of its file."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from services.kv_offload.backends.interface import RemoteError


class FileWire:
    """See `wire.Wire`. Its reads can be made to fail, to hang and to bring wrong bytes."""

    def __init__(self, path: Path) -> None:
        self.address = str(path).encode()
        self.fails = False
        self.wrong = False
        self.begun = threading.Event()  # a read has begun
        self.going = threading.Event()  # cleared: reads hang until their end
        self.going.set()
        self.closed = False

    def read(
        self, address: bytes, offsets: Sequence[int], value_bytes: int, end_s: float
    ) -> list[memoryview]:
        self.begun.set()
        if not self.going.wait(max(end_s - time.monotonic(), 0)) or self.fails:
            raise RemoteError("the peer is gone")
        try:
            memory = Path(address.decode()).read_bytes()
        except (OSError, ValueError) as error:
            raise RemoteError(f"the peer is gone: {error}") from error
        values = [bytearray(memory[offset : offset + value_bytes]) for offset in offsets]
        if self.wrong:
            values[-1][-1] ^= 1
        return [memoryview(value) for value in values]

    def close(self) -> None:
        self.closed = True
