"""The arena's contract: ranges, two-phase writes, readers in other processes, what stays after its end."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from services.kv_offload.backends.arena import SHM, Arena, segment_name, shared_arena, sweep
from shared.errors import SetupError

PAGE = 4096
CAPACITY = 64 * PAGE
_HOSTS = (f"test-{os.getpid()}-{i}" for i in itertools.count())


@pytest.fixture
def host() -> Iterator[str]:
    name = next(_HOSTS)
    yield name
    sweep(name)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Empty, and again empty once every key a test can have used is discarded."""
    made = shared_arena(next(_HOSTS), 1, CAPACITY)
    yield made
    for i in range(1000):
        with contextlib.suppress(KeyError):
            made.discard(key(i))
    assert made.free_bytes() == CAPACITY
    made.close()


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def mapped(name: str) -> mmap.mmap:
    """A reader's own mapping, as an executor makes it."""
    descriptor = os.open(SHM / name, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def test_the_segment_is_all_usable(arena: Arena) -> None:
    assert arena.generation == 1
    assert arena.name.endswith("_g1")
    assert (SHM / arena.name).stat().st_size == arena.capacity_bytes == arena.free_bytes() == CAPACITY
    assert (SHM / arena.name).stat().st_blocks * 512 >= CAPACITY, "pages are not reserved"


def test_offsets_are_whole_pages_and_the_size_is_exact(arena: Arena) -> None:
    sizes = [1, PAGE, PAGE + 1, 3 * PAGE - 1]
    assert [arena.allocate(key(i), size) for i, size in enumerate(sizes)] == [0, PAGE, 2 * PAGE, 4 * PAGE]
    assert arena.free_bytes() == CAPACITY - 7 * PAGE
    assert [arena.view(key(i)).nbytes for i in range(4)] == sizes


def test_another_process_reads_and_writes_by_offset(arena: Arena) -> None:
    arena.allocate(key(0), 5 * PAGE)
    offset = arena.allocate(key(1), 1000)
    arena.view(key(1))[:] = bytes(range(250)) * 4
    arena.seal(key(1))
    program = (
        "import mmap, os, sys; m = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0); o = int(sys.argv[2]);"
        "print(m[o:o + 1000].hex()); m[o:o + 3] = b'abc'"
    )
    command = [sys.executable, "-c", program, str(SHM / arena.name), str(offset)]
    seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert bytes.fromhex(seen) == bytes(range(250)) * 4
    assert bytes(arena.view(key(1))[:5]) == b"abc\x03\x04"
    assert (SHM / arena.name).exists(), "a reader's end deleted the segment"


@pytest.mark.parametrize("sealed", [False, True])
def test_full_arena_refuses_a_reservation_and_a_discarded_range_is_free_again(
    arena: Arena, sealed: bool
) -> None:
    offsets = [arena.allocate(key(i), 16 * PAGE) for i in range(4)]
    assert arena.free_bytes() == 0
    assert arena.allocate(key(9), 1) is None
    if sealed:
        arena.seal(key(2))
    arena.discard(key(2))
    assert arena.free_bytes() == 16 * PAGE
    assert arena.allocate(key(9), 16 * PAGE) == offsets[2]


def test_neighbours_join_when_they_are_free(arena: Arena) -> None:
    for i in range(4):
        arena.allocate(key(i), 16 * PAGE)
    for i in (0, 2, 1):
        arena.discard(key(i))
    assert arena.allocate(key(8), 49 * PAGE) is None
    assert arena.allocate(key(9), 48 * PAGE) == 0


def test_a_key_has_one_range_and_unknown_keys_are_errors(arena: Arena) -> None:
    arena.allocate(key(1), 10)
    with pytest.raises(ValueError, match="one range"):
        arena.allocate(key(1), 10)
    with pytest.raises(ValueError, match="at least 1 byte"):
        arena.allocate(key(2), 0)
    arena.seal(key(1))
    with pytest.raises(KeyError):
        arena.seal(key(1))
    for act in (arena.seal, arena.discard, arena.view):
        with pytest.raises(KeyError):
            act(key(3))
    assert arena.free_bytes() == CAPACITY - PAGE


def test_ranges_never_overlap_and_nothing_leaks(arena: Arena) -> None:
    """1,000 random steps: every live range keeps its own bytes, and at the end all is free."""
    draw = random.Random(5)
    live: dict[int, int] = {}  # key -> size
    refused = 0
    for step in range(1000):
        if live and draw.random() < 0.45:
            gone = draw.choice(sorted(live))
            assert bytes(arena.view(key(gone))) == bytes([gone % 256]) * live[gone]
            arena.discard(key(gone))
            del live[gone]
            continue
        size = draw.randrange(1, 6 * PAGE)
        if arena.allocate(key(step), size) is None:
            refused += 1
            continue
        arena.view(key(step))[:] = bytes([step % 256]) * size
        if draw.random() < 0.8:
            arena.seal(key(step))
        live[step] = size
        assert arena.free_bytes() == CAPACITY - sum(-(-size // PAGE) * PAGE for size in live.values())
    assert refused > 10
    for i in live:
        arena.discard(key(i))
    assert arena.free_bytes() == CAPACITY
    assert arena.allocate(key(0), CAPACITY) == 0


def test_a_new_generation_is_a_segment_of_its_own(host: str) -> None:
    first = shared_arena(host, 1, CAPACITY)
    assert first.name == segment_name(host, 1)
    first.allocate(key(1), 10)
    first.view(key(1))[:] = b"generation"
    reader = mapped(first.name)
    first.close()
    first.close()
    assert not (SHM / first.name).exists()
    second = shared_arena(host, 2, CAPACITY)
    assert second.allocate(key(1), 10) == 0
    second.view(key(1))[:] = b"the second"
    assert reader[:10] == b"generation"
    assert mapped(second.name)[:10] == b"the second"
    second.close()


OWNER = """
import signal, sys
from services.kv_offload.backends.arena import shared_arena
arena = shared_arena(sys.argv[1], 1, 64 * 4096)
arena.allocate(b"k", 5)
arena.view(b"k")[:] = b"bytes"
arena.seal(b"k")
print("ready", flush=True)
signal.pause()
"""


def test_readers_survive_the_owners_kill(host: str) -> None:
    command = [sys.executable, "-c", OWNER, host]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "ready\n"
        reader = mapped(segment_name(host, 1))
        owner.kill()
    sweep(host)
    assert not (SHM / segment_name(host, 1)).exists()
    arena = shared_arena(host, 2, CAPACITY)
    arena.allocate(key(1), PAGE)
    arena.view(key(1))[:] = b"x" * PAGE
    assert reader[:5] == b"bytes"
    arena.close()


def test_sweep_takes_only_what_this_host_left(host: str) -> None:
    mine, other = shared_arena(host, 7, PAGE), shared_arena(f"{host}-b", 7, PAGE)
    assert [name for name in sweep(host) if host in name] == [mine.name]
    assert (SHM / other.name).exists()
    mine.close()
    other.close()


def test_an_arena_that_shared_memory_cannot_hold_is_refused(host: str) -> None:
    with pytest.raises(SetupError, match="HEADRACE_SHM"):
        shared_arena(host, 1, 1 << 60)
    assert not (SHM / segment_name(host, 1)).exists()


def test_a_name_taken_is_refused_and_left_alone(host: str) -> None:
    first = shared_arena(host, 1, PAGE)
    with pytest.raises(FileExistsError):
        shared_arena(host, 1, PAGE)
    assert (SHM / first.name).exists()
    first.close()
    with pytest.raises(SetupError, match="cannot be part of a file name"):
        segment_name("a/b", 1)
