"""A folder as L2: what it may hold, what goes first, what dead writers have left, and a disk that fails."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.kv_offload.backends import folder as folders
from services.kv_offload.backends.folder import Folder
from services.kv_offload.backends.interface import RefusedWrite, RemoteError, connector, open_remote
from shared.errors import SetupError

MIB = 1 << 20
VALUE = bytes(range(256)) * 4096  # 1 MiB
SLOT = memoryview(bytearray(MIB))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Folder]]:
    every: list[Folder] = []

    def opened(mib: int = 0) -> Folder:
        every.append(Folder(f"{tmp_path}/kv", mib * MIB))
        return every[-1]

    yield opened
    for each in every:
        each.close()


@dataclass
class Disk:
    """A disk of 100 MiB: what the folder does not hold, and other programs do not, is free."""

    folder: Path
    others: int = 0

    def __call__(self, path: str) -> SimpleNamespace:
        free = 100 - held_mib(self.folder) - self.others
        return SimpleNamespace(f_blocks=100, f_bavail=max(free, 0), f_frsize=MIB)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(tmp_path / "kv")
    monkeypatch.setattr(os, "statvfs", disk)
    return disk


def held_mib(folder: Path) -> int:
    return len([*folder.glob("*.data")]) if folder.exists() else 0


def put(folder: Folder, *numbers: int) -> None:
    """Put values; each is older than the next. A full folder is tried again, as its caller does."""
    for number in numbers:
        for _ in range(3):
            with suppress(RefusedWrite):
                folder.put(f"{number:04}", memoryview(VALUE))
                break
            folder._look()
        with suppress(FileNotFoundError):  # removed already
            os.utime(folder._file(f"{number:04}"), (number, number))


def present(folder: Folder, *numbers: int) -> list[int]:
    return [
        number
        for number, there in zip(numbers, folder.has([f"{n:04}" for n in numbers]), strict=True)
        if there
    ]


@pytest.mark.parametrize("limit_mib", [0, 50])
def test_a_folder_holds_half_of_a_free_disk_or_its_limit_and_keeps_the_last_used(
    opened: Callable[..., Folder], disk: Disk, limit_mib: int
) -> None:
    folder = opened(limit_mib)
    put(folder, *range(1, 31))
    assert folder.get("0001", SLOT) == MIB  # used now
    put(folder, *range(31, 200))
    assert 45 <= held_mib(disk.folder) <= 50
    kept = present(folder, *range(1, 200))
    assert kept == [1, *range(201 - len(kept), 200)]


def test_files_of_other_programs_take_room_that_the_folder_gives_back(
    opened: Callable[..., Folder], disk: Disk
) -> None:
    for limit_mib, others, most in ((0, 40, 30), (80, 35, 60), (80, 40, 55)):
        disk.others = 0
        folder = opened(limit_mib)
        put(folder, *range(1, 61))
        held = held_mib(disk.folder)
        disk.others = others
        folder._look()
        assert held_mib(disk.folder) < held
        assert most * 8 // 10 <= held_mib(disk.folder) <= most * 9 // 10


def test_a_look_follows_when_other_programs_fill_the_disk_and_no_value_is_written(
    opened: Callable[..., Folder], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look, looked = 0, Folder._look, threading.Event()

    def noted(folder: Folder) -> None:
        nonlocal looks
        look(folder)
        looks += 1
        looked.set()

    monkeypatch.setattr(folders, "DISK_POLL_S", 0.01)
    folder = opened()
    put(folder, *range(1, 21))
    monkeypatch.setattr(Folder, "_look", noted)
    disk.others = 70
    assert looked.wait(60)
    assert 9 <= held_mib(disk.folder) <= 15
    assert folder.has(["0001", "0020"]) == [False, True]


def test_hosts_that_share_a_folder_share_its_limit(opened: Callable[..., Folder], disk: Disk) -> None:
    """Each may have a tenth of it more than it saw."""
    hosts = [opened(40) for _ in range(4)]
    for number in range(400):
        put(hosts[number % 4], number)
        assert held_mib(disk.folder) <= 36 + 4 * 4
    assert present(hosts[0], 399, 0) == [399]


def test_the_length_of_values_is_never_removed_and_files_of_others_stay(
    opened: Callable[..., Folder], disk: Disk
) -> None:
    folder = opened()
    folder.put("size", memoryview(b"x" * 136))
    os.utime(folder._file("size"), (1, 1))
    (disk.folder / "notes.data").write_bytes(VALUE)
    put(folder, *range(2, 120))
    assert folder.get("size", memoryview(bytearray(136))) == 136
    assert (disk.folder / "notes.data").read_bytes() == VALUE


@pytest.mark.parametrize("set_s", [0, 2, -2, 600, -600, 172_800, -172_800])
def test_parts_of_dead_writers_are_removed_and_parts_of_others_stay(
    opened: Callable[..., Folder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_s: int
) -> None:
    """Also if the clock was set, by so many seconds, before the values of now were written."""
    now_s, folder = [0.0], opened(100)
    monkeypatch.setattr(folders, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    put(folder, 1)
    dead, slow = (tmp_path / "kv" / f"headrace@0x00000000@0@{name}.tmp" for name in ("a.00", "b.00"))
    for part in (dead, slow):
        part.write_bytes(VALUE)
        os.utime(part, (1_000_000, 1_000_000))
    os.utime(folder._file("0001"), (1_000_000 + set_s, 1_000_000 + set_s))
    folder._look()
    now_s[0] = folders.PARTIAL_S
    slow.write_bytes(2 * VALUE)
    folder._look()
    assert dead.exists()
    now_s[0] += 1
    folder._look()
    assert (dead.exists(), slow.exists()) == (False, True)
    assert present(folder, 1) == [1]


def test_a_write_that_the_disk_ends_in_the_middle_is_refused_and_leaves_nothing(
    opened: Callable[..., Folder], tmp_path: Path
) -> None:
    folder = opened()
    put(folder, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, hard))
    try:
        with pytest.raises(RefusedWrite, match="takes no value: File too large"):
            folder.put("0002", memoryview(VALUE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*(tmp_path / "kv").glob("*.tmp")] == []
    assert (present(folder, 1, 2), folder.get("0001", SLOT), bytes(SLOT)) == ([1], MIB, VALUE)
    put(folder, 2)
    assert present(folder, 1, 2) == [1, 2]


@pytest.mark.parametrize(("number", "reason"), [(30, "Read-only file system"), (13, "Permission denied")])
def test_a_folder_that_becomes_read_only_is_read_and_refuses_in_the_words_of_the_system(
    opened: Callable[..., Folder], monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    folder = opened()
    put(folder, 1)

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, reason)

    for call in ("utime", "unlink", "rename"):
        monkeypatch.setattr(os, call, refused)
    with pytest.raises(RefusedWrite, match=f"takes no value: {reason}"):
        folder.put("0002", memoryview(VALUE))
    with pytest.raises(RemoteError, match=f"did not delete 0001: {reason}"):
        folder.delete("0001")
    assert (folder.get("0001", SLOT), bytes(SLOT), folder.has(["0001"])) == (MIB, VALUE, [True])


def test_a_folder_that_is_removed_holds_nothing_and_is_made_again(
    opened: Callable[..., Folder], tmp_path: Path
) -> None:
    folder = opened(3)
    put(folder, 1, 2, 3)
    for file in (tmp_path / "kv").iterdir():
        file.unlink()
    (tmp_path / "kv").rmdir()
    assert (folder.has(["0001"]), folder.get("0001", SLOT)) == ([False], 0)
    put(folder, 4, 5, 6, 7, 8)
    assert 8 in present(folder, 4, 5, 6, 7, 8)


def test_a_value_is_found_under_the_name_of_earlier_versions(
    opened: Callable[..., Folder], tmp_path: Path
) -> None:
    """LMCache's client wrote it."""
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / "headrace@0x00000000@0@hr1:ab:00ff.data").write_bytes(VALUE)
    assert opened().get("hr1:ab:00ff", SLOT) == MIB


def test_threads_share_a_folder_and_its_limit_is_in_its_url(tmp_path: Path) -> None:
    connect = connector(f"file://{tmp_path}/a%20b?gib=0.25")
    folder = connect()
    assert (folder is connect(), isinstance(folder, Folder)) == (True, True)
    assert (folder._path, folder._limit_bytes) == (f"{tmp_path}/a b", 1 << 28)  # type: ignore[attr-defined]
    for wrong in ("gib=", "gib=-1", "mib=5", "gib=1e3"):
        with pytest.raises(SetupError, match=r"file:///folder\?gib=100"):
            open_remote(f"file://{tmp_path}?{wrong}")
