"""A shared-memory segment as kv_offload makes one, for tests of its users."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_GENERATIONS = itertools.count(1)
ABSENT = 0xA5  # what the arena holds where nothing was stored


class Segment:
    """A file under /dev/shm, filled with ABSENT."""

    def __init__(self, size_bytes: int) -> None:
        self.generation = next(_GENERATIONS)
        self.name = f"headrace_test_{os.getpid()}_g{self.generation}"
        self.path = Path("/dev/shm") / self.name
        self.path.write_bytes(bytes([ABSENT]) * size_bytes)

    def read(self) -> bytes:
        return self.path.read_bytes()


@contextmanager
def segment(size_bytes: int) -> Iterator[Segment]:
    """A segment that is gone afterwards."""
    made = Segment(size_bytes)
    try:
        yield made
    finally:
        made.path.unlink(missing_ok=True)
