"""`refuse_others` is for a file that a setting names."""

from __future__ import annotations

from pathlib import Path


def refuse_others(path: Path) -> None:
    """Raises OSError for a FIFO, whose reader would wait for a writer, a socket or a device. A file, a folder
    or nothing passes: to read them ends."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(f"{path} is a FIFO, a socket or a device: a file is expected")
