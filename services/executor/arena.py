"""An executor maps a host's L1 arena, the shared-memory segment of kv_offload, read-write.

It uses open + mmap: Python's SharedMemory deletes a segment when a reader ends. A name ends with its
generation and is never used twice, so a mapping stays valid for its generation after the file is unlinked.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

from shared.errors import HeadraceError

SHM = Path("/dev/shm")


class ArenaError(HeadraceError):
    """An arena cannot be mapped, or its name does not fit its generation."""

    code, type = 500, "arena_error"


class Arena:
    """A mapping of one generation. Call `close` when nothing uses `view` any more."""

    def __init__(self, name: str, generation: int) -> None:
        """Map `/dev/shm/<name>`. Raises ArenaError."""
        if not re.fullmatch(rf"[\w.-]*?(?<!\d){generation}", name, re.ASCII):
            raise ArenaError(f"the arena {name!r:.200} is not of generation {generation}: restart kv_offload")
        self.name, self.generation = name, generation
        try:
            self._file = os.open(SHM / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaError(
                f"cannot open the arena {name}: {error.strerror}; kv_offload must run on this host, as the "
                "same user and with the same /dev/shm"
            ) from error
        try:
            self.size_bytes = os.fstat(self._file).st_size
            self.view = mmap.mmap(self._file, self.size_bytes)
        except (OSError, ValueError) as error:  # an empty file is a ValueError
            os.close(self._file)
            raise ArenaError(f"cannot map the arena {name} of {self.size_bytes} bytes: {error}") from error

    def range_error(self, offsets: Sequence[int], block_bytes: int) -> str:
        """Why blocks at these offsets cannot be copied; empty when they can. Access beyond the end of a
        shrunken segment would kill the process (SIGBUS)."""
        if min(offsets) < 0 or max(offsets) + block_bytes > self.size_bytes:
            return f"an offset is outside the arena of {self.size_bytes} bytes"
        if (now_bytes := os.fstat(self._file).st_size) < self.size_bytes:
            return f"the arena has shrunk from {self.size_bytes} to {now_bytes} bytes"
        return ""

    def close(self) -> None:
        """Unmap. Raises BufferError while a view of it exists."""
        self.view.close()
        os.close(self._file)
