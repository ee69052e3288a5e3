"""Chooses the size of L1, and opens its arena. The actor calls `plan` and `open_arena`."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from services.kv_offload.backends.builtin import (
    PAGE_BYTES,
    SHM,
    Arena,
    NoRoom,
    hold,
    let_go,
    segment_name,
    shared_arena,
    sweep,
)
from shared.errors import SetupError
from shared.processes import available_bytes

log = logging.getLogger("headrace.kv_offload")

MIB, GIB = 1 << 20, 1 << 30
MOST_BYTES = 64 * GIB  # of auto: reserving the pages takes 0.36 s a GiB
MOST_BESIDE_CPU_BYTES = 2 * GIB  # of auto without a GPU: the engines' own KV is in the same memory
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
LEAST_BYTES = 16 * MIB  # of auto: less is not useful


@dataclass(frozen=True, slots=True)
class Plan:
    """The arena to open. `bytes` 0: no tiers."""

    host: str  # in the segment's name
    bytes: int
    by_need: bool = False  # auto without a GPU: opened once it is shared, pages reserved as they are taken


@dataclass(slots=True)
class Opened:
    """An arena, and the lock which shows that its owner lives."""

    arena: Arena
    lock: int

    def close(self) -> None:
        """Unmap and unlink the segment, and release the lock."""
        self.arena.close()
        let_go(self.arena.name, self.lock)


def plan(l1: str, fleet: str, host_id: str) -> Plan:
    """The arena for the settings, after removing segments of dead owners. Raises SetupError for an invalid
    size."""
    label = f"{fleet[:40]}-{sha256(host_id.encode()).hexdigest()[:12]}"
    remove_dead(label)
    gpu = any(driver.exists() for driver in GPU_DRIVERS)
    most = MOST_BYTES if gpu else MOST_BESIDE_CPU_BYTES
    size = size_bytes(l1, available_bytes(), _shm_free_bytes(), most)
    return Plan(label, size, by_need=l1 == "auto" and not gpu)


def size_bytes(l1: str, available_bytes: int, shm_free_bytes: int, most_bytes: int = MOST_BYTES) -> int:
    """The bytes of L1. `l1` is "off" (0), MiB, or "auto": a quarter of the available memory, at most
    `most_bytes` and half of the free part of /dev/shm, and 0 if that is less than LEAST_BYTES."""
    if l1 == "off":
        return 0
    if l1 == "auto":
        size = min(available_bytes // 4, shm_free_bytes // 2, most_bytes) // PAGE_BYTES * PAGE_BYTES
        if size < LEAST_BYTES:
            log.warning("no L1: /dev/shm has %d MiB free; enlarge it (HEADRACE_SHM)", shm_free_bytes // MIB)
            return 0
        return size
    if not re.fullmatch(r"[1-9]\d{0,8}", l1):
        raise SetupError(f"l1 is {l1!r}: give the MiB of memory for KV copies, auto or off")
    return int(l1) * MIB


def open_arena(plan: Plan, generation: int) -> Opened:
    """Lock the name and make the arena. Blocks for seconds. Raises NoRoom if /dev/shm cannot hold it, and
    SetupError."""
    name = segment_name(plan.host, generation)
    try:
        lock = hold(name)
    except PermissionError as error:
        raise NoRoom(f"{error}: let this user write there, or start without tiers (--l1 off)") from None
    try:
        remove_dead(plan.host)
        return Opened(shared_arena(plan.host, generation, plan.bytes, by_need=plan.by_need), lock)
    except BaseException:
        let_go(name, lock)
        raise


def remove_dead(host: str) -> None:
    """Remove segments of dead owners in /dev/shm."""
    for dead in sweep(host):
        log.info("removed the segment %s: its owner is dead", dead)


def _shm_free_bytes() -> int:
    stat = os.statvfs(SHM)
    return stat.f_bavail * stat.f_frsize
