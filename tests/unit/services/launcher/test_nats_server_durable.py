"""The folder of durable requests: what `up` does when its disk is full."""

from __future__ import annotations

import errno
import os
from io import BytesIO
from pathlib import Path

import pytest

from services.launcher import nats_server
from services.launcher.nats_server import FullDisk

FULL = b'HTTP/1.0 503 \r\n\r\n{"status":"unavailable","error":"JetStream stream: write error: no space left"}'
OK = b'HTTP/1.0 200 OK\r\n\r\n{"status":"ok"}'


def test_full_disk_is_reported_once_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    disk = FullDisk(str(tmp_path), lines.append)
    assert not disk.has_space_again(OK)
    monkeypatch.setattr(nats_server, "SPACE_BYTES", 1 << 62)
    assert [disk.has_space_again(answer) for answer in (FULL, b"", FULL)] == [False] * 3
    assert lines == [f"the disk is full: durable requests are refused until {tmp_path} has space"]
    monkeypatch.setattr(nats_server, "SPACE_BYTES", 0)
    assert disk.has_space_again(FULL)
    assert lines[1:] == ["nats-server could not write durable requests, and there is space: it starts again"]


def test_server_with_a_read_only_disk_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, errors = list[str](), [OSError(errno.EROFS, os.strerror(errno.EROFS))]

    def create(dir: str) -> BytesIO:
        assert dir == str(tmp_path)
        for error in errors:
            raise error
        return BytesIO()

    monkeypatch.setattr(nats_server.tempfile, "TemporaryFile", create)
    disk = FullDisk(str(tmp_path), lines.append)
    assert [disk.has_space_again(FULL) for _ in range(2)] == [False] * 2
    why = f"durable requests are refused until {tmp_path} can be (Read-only file system)"
    assert lines == [f"the disk cannot be written: {why}"]
    errors.clear()
    assert disk.has_space_again(FULL)


def test_a_server_without_a_folder_of_its_own_is_left_alone() -> None:
    assert not FullDisk("", print).has_space_again(FULL)
