"""Measures loads of KV from pinned memory beside decode steps of the 8B engine: their rate and cost."""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadtest.driver import Driver
from loadtest.gpu.rig import Built
from services.executor.engine import Arena

BATCH, CONTEXT, STEPS = 64, 1024, 160
ARENA_BYTES, BLOCKS = 4 << 30, 1024


def restore(built: Built) -> list[dict[str, Any]]:
    """Bandwidth of loads and stores, and the median step with and without them, for sizes of a piece."""
    backend = built.backend
    copier: Any = backend.copier
    size = backend.info.bytes_per_block
    found = []
    with _segment(ARENA_BYTES) as path:
        arena = Arena(path.name, int(path.name.rpartition("_g")[2]))
        copier.attach(arena)
        blocks = list(range(backend.info.blocks - BLOCKS, backend.info.blocks))
        offsets = [i * size for i in range(BLOCKS)]
        for way in ("none", "load", "store"):
            for piece in (8, 32) if way != "none" else (0, 0):
                found.append(_beside(built, copier, way, piece << 20, (blocks, offsets)))
                print("restore", found[-1], flush=True)
        copier.detach()
        arena.close()
    return found


@contextmanager
def _segment(size_bytes: int) -> Iterator[Path]:
    """An arena's file in shared memory, all of its pages allocated."""
    path = Path("/dev/shm") / f"headrace_restore_{os.getpid()}_g1"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    try:
        yield path
    finally:
        path.unlink()


def _beside(
    built: Built, copier: Any, way: str, piece_bytes: int, where: tuple[list[int], list[int]]
) -> dict[str, Any]:
    stop = threading.Event()
    moved = [0, 0.0]

    def copy() -> None:
        size, began_s = built.backend.info.bytes_per_block, time.monotonic()
        each, move = piece_bytes // size, copier.load if way == "load" else copier.store
        at = 0
        while not stop.is_set():
            move(where[0][at : at + each], where[1][at : at + each])
            at = (at + each) % (len(where[0]) - each)
            moved[0] += each * size
        copier.finish()
        moved[1] = time.monotonic() - began_s

    driver = Driver(built.backend)
    driver._free = [block for block in driver._free if block < where[0][0]]
    tables = dict(driver.open(slot, CONTEXT, CONTEXT + STEPS + 1) for slot in range(BATCH))
    plans = [
        driver.plan(
            [(slot, CONTEXT - 1 + step, 1, step > 0) for slot in range(BATCH)], tables if not step else {}
        )
        for step in range(STEPS)
    ]
    worker = threading.Thread(target=copy)
    if way != "none":
        worker.start()
    ends_s = driver.run(plans)
    stop.set()
    if way != "none":
        worker.join()
    driver.close()
    steps_ms = [1e3 * (b - a) for a, b in itertools.pairwise(ends_s[16:-1])]
    return {
        "way": way, "piece_mib": piece_bytes >> 20, "gb_s": moved[0] / moved[1] / 1e9 if moved[1] else 0.0,
        "step_p50_ms": statistics.median(steps_ms), "step_mean_ms": statistics.fmean(steps_ms),
    }  # fmt: skip
