"""L1 over LMCache's StorageManager (==0.5.6): its segment, its allocator, its two-phase writes.

What of LMCache is not used, and why: its eviction is a loop of 1 s that drops bursts, so the policy is
"noop" and the core discards; its read locks are the core's leases; its store and prefetch controllers
would write and wait as they like, so no L2 is configured (`lmcache_remote` drives L2)."""

from __future__ import annotations

import os
from typing import Any

from services.kv_offload.segment import Segment, check_room, segment_name
from shared.errors import SetupError

_FOREVER_S = 2**31 - 1  # an expired write lock would hand a range to another writer: expiry is the core's


def load_lmcache() -> None:
    """Import lmcache (2–5 s) so that it phones nobody, and logs errors only (it logs each discard).

    Raises SetupError where it is not installed."""
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    try:
        import lmcache  # noqa: F401
    except ImportError as error:
        raise SetupError(f"no LMCache here ({error}): pip install 'headrace[kv]'") from error


def _open_storage(name: str, capacity_bytes: int) -> Any:
    load_lmcache()
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.storage_manager import StorageManager

    memory = L1MemoryManagerConfig(capacity_bytes, use_lazy=False, shm_name=name)
    l1 = L1ManagerConfig(memory, write_ttl_seconds=_FOREVER_S, read_ttl_seconds=_FOREVER_S)
    return StorageManager(StorageManagerConfig(l1, EvictionConfig("noop")))


def _object_key(key: bytes) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(key, "headrace", 0)  # our keys hold model, layout, rank and tenant already


def _layout(size_bytes: int) -> Any:
    from lmcache.v1.distributed.api import MemoryLayoutDesc
    from torch import Size, uint8

    return MemoryLayoutDesc([Size([size_bytes])], [uint8])


class LmcacheArena:
    """See `store.Arena`. `capacity_bytes` is a multiple of 4096. Import and start take 2–5 s and 330 MB; a
    call takes 30–80 µs."""

    def __init__(self, host: str, generation: int, capacity_bytes: int) -> None:
        self.name = segment_name(host, generation)
        self.generation = generation
        self.capacity_bytes = capacity_bytes
        check_room(capacity_bytes)
        self._storage = _open_storage(self.name, capacity_bytes)
        try:
            self._segment = Segment(self.name, capacity_bytes, create=False)
        except BaseException:
            self._storage.close()
            raise
        self._ranges: dict[bytes, tuple[int, int]] = {}  # key -> (offset, bytes)
        self._reserved: set[bytes] = set()

    def allocate(self, key: bytes, size_bytes: int) -> int | None:
        if key in self._ranges or size_bytes < 1:
            raise ValueError(f"a key has one range of at least 1 byte: {key.hex()}, {size_bytes}")
        name = _object_key(key)
        made = self._storage.reserve_write([name], _layout(size_bytes)).get(name)
        if made is None:
            return None
        offset = int(made.shm_offset)
        self._ranges[key] = (offset, size_bytes)
        self._reserved.add(key)
        return offset

    def seal(self, key: bytes) -> None:
        self._reserved.remove(key)
        self._storage.finish_write([_object_key(key)])

    def discard(self, key: bytes) -> None:
        del self._ranges[key]
        self._reserved.discard(key)
        # force: a reservation is write-locked, and only so can it be given up.
        deleted, _ = self._storage.delete_l1_keys([_object_key(key)], force=True)
        if deleted != 1:
            raise RuntimeError(f"LMCache lost the range of {key.hex()}: the arena's index is wrong, restart")

    def view(self, key: bytes) -> memoryview:
        return self._segment.view(*self._ranges[key])

    def free_bytes(self) -> int:
        used, total = self._storage.get_l1_usage()
        return int(total) - int(used)

    def close(self) -> None:
        """Takes up to two seconds: LMCache's threads end between two naps."""
        storage, self._storage = self._storage, None
        if storage is not None:
            storage.close()
        self._segment.close()
