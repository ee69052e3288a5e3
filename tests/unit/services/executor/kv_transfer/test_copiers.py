"""An arena is pinned in slices, by a driver that only writes down what it is asked."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import tempfile
from typing import Any

import pytest
import torch

from services.executor.engine import ArenaError
from services.executor.kv_transfer import copiers


class Driver:
    """Pins up to `most` slices."""

    def __init__(self, most: int = 1_000) -> None:
        self.most = most
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, size_bytes: int) -> int:
        if len(self.pinned) == self.most:
            return 2  # CUDA_ERROR_OUT_OF_MEMORY
        self.pinned[address] = size_bytes
        return 0

    def unpin(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(copiers, "PIN_BYTES", 64)
    return torch.empty(200, dtype=torch.uint8)


def pin(view: torch.Tensor, driver: Any, slices: int) -> bool:
    asked = itertools.count(1)
    return copiers._pin(view, driver, lambda took_s: took_s >= 0 and next(asked) <= slices)


def test_pinning_yields_after_each_slice(view: torch.Tensor) -> None:
    driver = Driver()
    assert pin(view, driver, 4)
    first = view.data_ptr()
    assert driver.pinned == {first: 64, first + 64: 64, first + 128: 64, first + 192: 8}


@pytest.mark.parametrize("slices", [0, 1, 3])
def test_arena_without_a_user_is_released_at_once(view: torch.Tensor, slices: int) -> None:
    driver = Driver()
    with pytest.raises(ArenaError):
        pin(view, driver, slices)
    assert not driver.pinned


def test_failed_pinning_leaves_no_part_pinned(view: torch.Tensor) -> None:
    driver = Driver(most=2)
    assert not pin(view, driver, 4)
    assert not driver.pinned


def test_a_slice_is_a_few_milliseconds_of_the_driver() -> None:
    assert copiers.PIN_BYTES * 0.3 / 2**30 < 0.003  # at 0.3 s a GiB


def test_pages_are_there_before_the_driver_pins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mincore` counts pages of shared memory that some process has."""
    size = 64 * mmap.PAGESIZE
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        pages = mmap.mmap(file.fileno(), size)
        arena = torch.frombuffer(pages, dtype=torch.uint8)
        found = (ctypes.c_ubyte * 64)()

        class Driver:
            def pin(self, address: int, size_bytes: int) -> int:
                ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), found)
                return 0

        monkeypatch.setattr(copiers, "PIN_BYTES", size)
        driver: Any = Driver()
        assert copiers._pin(arena, driver, lambda took_s: True)
        del arena
        pages.close()
    assert [each & 1 for each in found] == [1] * 64
