"""How fast KV blocks go between an engine's cache and the host's arena, and what that does to the step
that computes beside it. Through the copy lane that executors use, without messages.

    python -m loadtest.kv_copies --device cpu --out kv_copies_cpu.json
    python -m loadtest.kv_copies --device cuda --out kv_copies_h200.json

On a GPU also: what pinning an arena costs, and one call of the driver a piece against one a block
(loadtest.kv_copies_gpu).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import queue
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.executor.kv_transfer.worker import CopyLane, Told
from shared.clock import SystemClock
from shared.messages import KvCopied, KvCopy, ints, longs

BLOCK_BYTES = (64 << 10, 512 << 10, 2 << 20)
JOB_BLOCKS = (1, 16, 128, 512)
PIECES = {
    "cpu": (1 << 19, 1 << 20, 2 << 20, 4 << 20, 8 << 20),
    "cuda": (4 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20),
}
REPEATS = 7
BESIDE_S = 1.5  # of each measurement of a step beside copies
QUEUED = 12  # copies, so that there is always one

_GENERATIONS = itertools.count(1)


class Rig:
    """A cache of random bytes, an arena, and a copy lane between them."""

    def __init__(self, device: str, block_bytes: int, blocks: int, path: Path) -> None:
        import torch

        from services.executor.checkpoint.kv_cache import KvCache
        from services.executor.kv_transfer.copiers import CudaCopier, HostCopier

        self.block_bytes, self.blocks = block_bytes, blocks
        values = torch.randint(-(2**31), 2**31 - 1, (blocks + 1, block_bytes // 4), dtype=torch.int32)
        shape = (blocks + 1, 1, 2, 16, 1, block_bytes // 64)
        cache = KvCache(values.view(torch.int16).view(torch.bfloat16).view(shape).to(device))
        self.copier = HostCopier(cache) if device == "cpu" else CudaCopier(cache, lambda: None)
        self._answers: queue.SimpleQueue[KvCopied] = queue.SimpleQueue()
        told = Told(
            copied=lambda epoch, copied: self._answers.put(copied),
            quiet=lambda: None,
            unmapped=lambda generation: None,
        )
        self.lane = CopyLane(self.copier, SystemClock(), told)
        self.lane.begin(1)
        self.lane.stepped(1, 0)
        self._generation = int(path.name.rpartition("_g")[2])
        self.lane.map(path.name, self._generation)
        self._random = random.Random(4)
        self._jobs = itertools.count(1)

    def put(self, blocks: int, store: bool) -> None:
        """Queue a copy of so many blocks from and to places at random."""
        chosen = self._random.sample(range(self.blocks), blocks)
        places = self._random.sample(range(self.blocks), blocks)
        self.lane.put(
            KvCopy(
                job=next(self._jobs),
                to_arena=store,
                after_step=0,
                arena_generation=self._generation,
                blocks=ints(chosen),
                offsets=longs(place * self.block_bytes for place in places),
                block_bytes=self.block_bytes,
            )
        )

    def answer(self) -> KvCopied:
        """The next copy that is done."""
        copied = self._answers.get(timeout=60)
        if copied.status != "ok":
            raise RuntimeError(f"a copy was not made: {copied}")
        return copied

    def took_us(self, blocks: int, store: bool, repeats: int = REPEATS) -> float:
        """The median time of a copy, by itself."""
        times = []
        for _ in range(repeats + 2):
            self.put(blocks, store)
            times.append(max(1, self.answer().took_us))
        return statistics.median(times[2:])


@contextmanager
def segment(size_bytes: int, *, reserved: bool = True) -> Iterator[Path]:
    """An arena's file in shared memory; `reserved`: all its pages are there."""
    path = Path("/dev/shm") / f"headrace_copies_{os.getpid()}_g{next(_GENERATIONS)}"
    with path.open("wb") as file:
        file.truncate(size_bytes)
        if reserved:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    try:
        yield path
    finally:
        path.unlink()


@contextmanager
def rig(device: str, block_bytes: int, blocks: int) -> Iterator[Rig]:
    """A rig that is gone afterwards."""
    with segment(block_bytes * blocks) as path:
        made = Rig(device, block_bytes, blocks, path)
        made.took_us(blocks, True, 1)  # every page of it is touched
        yield made
        made.lane.close(60)


def rate(block_bytes: int, blocks: int, took_us: float) -> dict[str, Any]:
    """One result."""
    copied = block_bytes * blocks
    return {"took_us": round(took_us, 1), "gb_s": round(copied / took_us / 1e3, 2)}


def by_size(device: str, before: Callable[[Rig], None] = lambda rig: None) -> list[dict[str, Any]]:
    """Rates by size of block and of job, nothing beside them."""
    rows = []
    for block_bytes in BLOCK_BYTES:
        with rig(device, block_bytes, max(JOB_BLOCKS)) as made:
            before(made)
            for blocks in JOB_BLOCKS:
                for store in (True, False):
                    took_us = made.took_us(blocks, store)
                    row = {"block_bytes": block_bytes, "blocks": blocks, "to_arena": store}
                    rows.append(row | rate(block_bytes, blocks, took_us))
    return rows


def by_piece(device: str) -> list[dict[str, Any]]:
    """Rates by the bytes copied in one call, and how long such a call is: a stop waits for it."""
    rows = []
    block_bytes, blocks = 512 << 10, 512
    with rig(device, block_bytes, blocks) as made:
        for piece_bytes in PIECES[device]:
            made.copier.piece_bytes = piece_bytes
            in_piece = piece_bytes // block_bytes
            for store in (True, False):
                took_us = made.took_us(blocks, store)
                piece_us = round(made.took_us(in_piece, store), 1)
                row = {"piece_bytes": piece_bytes, "to_arena": store, "piece_us": piece_us}
                rows.append(row | rate(block_bytes, blocks, took_us))
    return rows


def beside(device: str, step: Callable[[], float], before: Callable[[Rig], None]) -> list[dict[str, Any]]:
    """A step's time by itself and while copies run without a pause, and their rate. `step` runs one and
    gives its milliseconds."""
    rows = []
    for block_bytes in BLOCK_BYTES:
        blocks = min(512, (128 << 20) // block_bytes)
        with rig(device, block_bytes, blocks) as made:
            before(made)
            for store in (True, False):
                alone_ms = _steps(step, lambda: None)
                copied, wall_s, busy_ms = _with_copies(made, blocks, store, step)
                rows.append(
                    {
                        "block_bytes": block_bytes,
                        "to_arena": store,
                        "step_alone_ms": round(alone_ms, 3),
                        "step_beside_ms": round(busy_ms, 3),
                        "slower_percent": round(100 * (busy_ms / alone_ms - 1), 1),
                        "gb_s": round(copied / wall_s / 1e9, 2),
                    }
                )
    return rows


def _steps(step: Callable[[], float], between: Callable[[], None]) -> float:
    times, end_s = [], time.monotonic() + BESIDE_S
    while time.monotonic() < end_s:
        times.append(step())
        between()
    return statistics.median(times)


def _with_copies(made: Rig, blocks: int, store: bool, step: Callable[[], float]) -> tuple[int, float, float]:
    """Bytes copied, in how many seconds, and the median step meanwhile."""
    copied = 0
    for _ in range(QUEUED):
        made.put(blocks, store)

    def refill() -> None:
        nonlocal copied
        while made.lane.queued < QUEUED:
            made.put(blocks, store)
        while not made._answers.empty():
            copied += made.answer().bytes

    began_s = time.monotonic()
    busy_ms = _steps(step, refill)
    wall_s = time.monotonic() - began_s
    while made.lane.queued or made.lane.since_us:
        made.answer()
    while not made._answers.empty():
        made.answer()
    return copied, wall_s, busy_ms


def cpu_step() -> Callable[[], float]:
    """Products like those of a small model's decode step: 16 rows through 60 matrices, on one core of two,
    so that it is seen what the copies cost it besides a core."""
    import torch

    torch.set_num_threads(1)
    weights = [torch.randn(1_536, 576) for _ in range(60)]
    rows = torch.randn(16, 576)

    def step() -> float:
        began_s = time.perf_counter()
        for weight in weights:
            torch.mm(rows, weight.T)
        return (time.perf_counter() - began_s) * 1e3

    return step


def cpu() -> dict[str, Any]:
    """Everything that is measured on a CPU."""
    return {
        "by_size": by_size("cpu"),
        "by_piece": by_piece("cpu"),
        "beside": beside("cpu", cpu_step(), lambda made: None),
    }


def main() -> None:
    """Measure and write."""
    import torch

    parser = argparse.ArgumentParser(description="copies of KV blocks between the cache and the arena")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.device == "cuda":
        from loadtest.kv_copies_gpu import gpu as measure
    else:
        measure = cpu
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    found = {"device": args.device, **machine, "load": os.getloadavg(), **measure()}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, rows in found.items():
        print(name, *(rows if isinstance(rows, list) else [rows]), sep="\n  ")


if __name__ == "__main__":
    main()
