"""What `headrace batch` does with a file that is no batch."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from services.launcher.commands import batch
from services.launcher.session import Target
from shared.errors import BadRequest

MIB = 1 << 20


async def test_a_file_without_lines_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "MAX_FILE_BYTES", MIB)
    with (given := tmp_path / "disk.img").open("wb") as file:
        file.truncate(64 * MIB)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="it is not JSON"):
            await batch.submit(Target("nats://127.0.0.1:1", "m"), given)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
