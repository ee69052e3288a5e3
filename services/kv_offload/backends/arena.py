"""L1: its size, its arena, and the arena's segment of shared memory.

The actor calls `plan` and `open_arena`. Executors map the segment's file by open + mmap (not by Python's
SharedMemory, which deletes it when a reader ends), so only its owner unlinks it. Owner and executors run
under one uid: the mode is 0600.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
from bisect import bisect_left, insort
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from shared.errors import SetupError
from shared.processes import available_bytes

log = logging.getLogger("headrace.kv_offload")

MIB, GIB = 1 << 20, 1 << 30
MOST_BYTES = 64 * GIB  # of auto: reserving the pages takes 0.36 s a GiB
MOST_BESIDE_CPU_BYTES = 2 * GIB  # of auto without a GPU: the engines' own KV is in the same memory
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
LEAST_BYTES = 16 * MIB  # of auto: less is not useful

SHM = Path("/dev/shm")
PAGE_BYTES = 4096
RESERVE_BYTES = 16 << 20  # at once by need: 6 ms on the event loop
_PREFIX = "headrace_l1_"
_LOCK = ".lock"


class NoRoom(SetupError):
    """/dev/shm cannot hold the arena."""


def segment_name(host: str, generation: int) -> str:
    """The segment's file name under /dev/shm. `host` is letters, digits, dots, dashes and underscores."""
    if not re.fullmatch(r"[\w.-]{1,128}", host, re.ASCII):
        raise SetupError(f"host {host!r} cannot be part of a file name: use letters, digits, . _ or -")
    return f"{_PREFIX}{host}_g{generation}"


def hold(name: str) -> int:
    """Lock the segment `name` before it is made, to show that its owner lives. The lock lasts as long as the
    returned descriptor is open: until `let_go` or the death of the process. Raises BlockingIOError if the
    segment is locked."""
    draft = SHM / f"{name}.{os.getpid()}"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.link(draft, _lock_file(name))  # locked before other processes can see it, for `sweep`
    except FileExistsError:
        os.close(descriptor)
        raise BlockingIOError(f"the segment {name} has an owner") from None
    finally:
        draft.unlink()
    return descriptor


def let_go(name: str, descriptor: int) -> None:
    """Release the lock of the segment `name`."""
    _lock_file(name).unlink(missing_ok=True)
    os.close(descriptor)


def sweep(host: str) -> list[str]:
    """Unlink this user's segments without a living owner, and return their names. These are all segments of
    `host`, and segments of other hosts with the lock file of a dead owner. Call it before the arena is made:
    the segment of a killed owner keeps its memory."""
    ours = re.compile(re.escape(segment_name(host, 0)[:-1]) + r"\d+")
    names = sorted(path.name for path in SHM.iterdir() if path.name.startswith(_PREFIX))
    locked = [name.removesuffix(_LOCK) for name in names if name.endswith(_LOCK)]
    found = dict.fromkeys([name for name in names if ours.fullmatch(name)] + locked)
    return [name for name in found if _remove_ownerless(name)]


def _remove_ownerless(name: str) -> bool:
    """Remove a segment of this user without an owner; True if there was one. No race: a name is never used
    twice."""
    lock = None
    try:
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(_lock_file(name), os.O_RDWR | os.O_NOFOLLOW)
            if os.fstat(lock).st_uid != os.getuid():
                return False
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.path.lexists(SHM / name)
        if there and (SHM / name).lstat().st_uid != os.getuid():
            return False
        for path in (SHM / name, _lock_file(name)):
            path.unlink(missing_ok=True)
        return there
    except OSError:  # its owner lives, or the file cannot be removed
        return False
    finally:
        if lock is not None:
            os.close(lock)


def _lock_file(name: str) -> Path:
    return SHM / f"{name}{_LOCK}"


def check_room(size_bytes: int) -> None:
    """Raise NoRoom if /dev/shm cannot hold `size_bytes` more."""
    if size_bytes > (free_bytes := _shm_free_bytes()):
        raise NoRoom(
            f"/dev/shm has {free_bytes >> 20} MiB left and L1 needs {size_bytes >> 20}: "
            "make L1 smaller (--l1) or /dev/shm larger (--shm-size of docker, HEADRACE_SHM of compose)"
        )


class Segment:
    """A mapping of the segment. A page is reserved before a process may use it (0.36 s a GiB), so a full
    /dev/shm is an error here, not a SIGBUS in the executor that first uses a page: all pages at the start, or
    `by_need` as ranges are taken."""

    def __init__(self, name: str, size_bytes: int, *, by_need: bool = False) -> None:
        self.name, self._path = name, SHM / name
        self._size_bytes, self._reserved = size_bytes, 0
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if by_need:
                os.ftruncate(self._file, size_bytes)
            else:
                os.posix_fallocate(self._file, 0, size_bytes)
                self._reserved = size_bytes
            self._map = mmap.mmap(self._file, size_bytes)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            raise NoRoom(f"cannot reserve {size_bytes >> 20} MiB in /dev/shm: {error}") from error
        self._view = memoryview(self._map)

    def reserve(self, end: int) -> bool:
        """Reserve the pages up to offset `end` and some more. False if /dev/shm has no room for them."""
        if end > self._reserved:
            size = min(max(end - self._reserved, RESERVE_BYTES), self._size_bytes - self._reserved)
            try:
                os.posix_fallocate(self._file, self._reserved, size)
            except OSError:
                return False
            self._reserved += size
        return True

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """The bytes from `offset` on, writable."""
        return self._view[offset : offset + size_bytes]

    def close(self) -> None:
        """Unmap and unlink."""
        self._path.unlink(missing_ok=True)
        # A view in a worker thread keeps the mapping until it is released.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class FreeList:
    """Free ranges of a segment, in order and never adjacent; takes the first that fits."""

    def __init__(self, size_bytes: int) -> None:
        self._ranges = [(0, size_bytes)]  # (offset, bytes)

    def allocate(self, size_bytes: int) -> int | None:
        """Take a free range of that size and return its offset; None if there is none."""
        for i, (offset, room) in enumerate(self._ranges):
            if room >= size_bytes:
                rest = (offset + size_bytes, room - size_bytes)
                self._ranges[i : i + 1] = [rest] if rest[1] else []
                return offset
        return None

    def give(self, offset: int, size_bytes: int) -> None:
        """Free a taken range, and join it with free neighbours."""
        i = bisect_left(self._ranges, (offset, 0))
        end = offset + size_bytes
        if i < len(self._ranges) and self._ranges[i][0] == end:
            end += self._ranges.pop(i)[1]
        if i > 0 and sum(self._ranges[i - 1]) == offset:
            offset = self._ranges.pop(i - 1)[0]
        insort(self._ranges, (offset, end - offset))

    def free_bytes(self) -> int:
        return sum(room for _, room in self._ranges)


class Arena:
    """L1: one segment of shared memory with a range for each key. Used from one thread.

    A segment's name is never used twice: its generation is new at each start. A process that maps an older
    segment keeps its bytes, also after the file is unlinked or its owner is killed.

    Without a segment it only counts: kv_offload starts with one of 0 bytes, and keeps it if L1 is off."""

    def __init__(self, capacity_bytes: int, generation: int = 1, segment: Segment | None = None) -> None:
        """`capacity_bytes`: of the segment, a multiple of 4096. `shared_arena` makes one with a segment."""
        self.name = segment.name if segment is not None else ""  # of the file under /dev/shm
        self.capacity_bytes = capacity_bytes
        self.generation = generation
        self._segment = segment
        self._free = FreeList(capacity_bytes)
        self.placed: dict[bytes, tuple[int, int]] = {}  # key -> (offset, bytes)
        self._reserved: set[bytes] = set()

    def allocate(self, key: bytes, size_bytes: int) -> int | None:
        """Reserve `size_bytes` for `key`. Returns the offset in the segment, a multiple of 4096; None if
        there is no room. Raises ValueError if the key has a range already, or for a size below 1."""
        if key in self.placed or size_bytes < 1:
            raise ValueError(f"a key has one range of at least 1 byte: {key.hex()}, {size_bytes}")
        offset = self._free.allocate(pages(size_bytes))
        if offset is None:
            return None
        if self._segment is not None and not self._segment.reserve(offset + pages(size_bytes)):
            self._free.give(offset, pages(size_bytes))
            return None
        self.placed[key] = (offset, size_bytes)
        self._reserved.add(key)
        return offset

    def seal(self, key: bytes) -> None:
        """Mark the reserved range of `key` as written. Raises KeyError if nothing is reserved."""
        self._reserved.remove(key)

    def discard(self, key: bytes) -> None:
        """Free the range of `key`, reserved or sealed, even if it is being read. Raises KeyError."""
        offset, size_bytes = self.placed.pop(key)
        self._reserved.discard(key)
        self._free.give(offset, pages(size_bytes))

    def view(self, key: bytes) -> memoryview:
        """The bytes of `key`, reserved or sealed, writable. Release it before `close`. Raises KeyError."""
        if self._segment is None:
            raise KeyError(key)
        return self._segment.view(*self.placed[key])

    def free_bytes(self) -> int:
        """Bytes in no range; a range takes whole pages of 4096 bytes."""
        return self._free.free_bytes()

    def close(self) -> None:
        """Unmap and unlink; no effect the second time. Other processes keep their mapping."""
        if self._segment is not None:
            self._segment.close()


def shared_arena(host: str, generation: int, capacity_bytes: int, *, by_need: bool = False) -> Arena:
    """An empty arena in a new segment. `by_need`: see Segment. Raises NoRoom, SetupError, FileExistsError."""
    name = segment_name(host, generation)
    check_room(capacity_bytes)
    return Arena(capacity_bytes, generation, Segment(name, capacity_bytes, by_need=by_need))


# ---- how large it is, and its start --------------------------------------------------------------


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
    except BlockingIOError:
        raise
    except OSError as error:  # no permission, read-only, no inode
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
