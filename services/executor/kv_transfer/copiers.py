"""A copier moves blocks of a cache to and from the arena: HostCopier on a CPU, CudaCopier on a GPU.

The copy worker (worker.py) calls it. Only this module imports torch: the simulated engine uses worker.py
without torch.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.cuda import Event

from services.executor.checkpoint.kv_cache import KvCache
from services.executor.engine import Arena, ArenaError, YieldDevice, keep_device
from shared.errors import EngineError

log = logging.getLogger("headrace.executor")
PIN_BYTES = 8 << 20  # pinned at a time, in 2.5 ms: a step waits no longer for the CUDA driver
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED

_LIBC = ctypes.CDLL(None)  # it releases the GIL during a call

Addresses = NDArray[np.uint64]


class HostCopier:
    """Copies between a CPU's memory and the arena, one memcpy a block, on one core. See
    services.executor.engine.Copier.

    It uses numpy: torch would copy with all its threads and take them from the running step. Both release the
    GIL during a copy."""

    piece_bytes = 4 << 20  # 0.6 ms; the rate is the same from 0.5 to 8 MiB

    def __init__(self, cache: KvCache) -> None:
        flat = cache.tensor.view(cache.blocks + 1, -1).view(torch.uint8)
        self._blocks: NDArray[np.uint8] = flat.numpy()  # [blocks + 1, bytes_per_block], the cache itself
        self._arena: NDArray[np.uint8] | None = None

    def attach(self, arena: Arena, yield_device: YieldDevice = keep_device) -> None:
        self._arena = np.frombuffer(arena.view, dtype=np.uint8)

    def detach(self) -> None:
        self._arena = None

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        arena, size = self._arena, self._blocks.shape[1]
        assert arena is not None, "no arena is attached"
        for block, offset in zip(blocks, offsets, strict=True):
            np.copyto(arena[offset : offset + size], self._blocks[block])

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        arena, size = self._arena, self._blocks.shape[1]
        assert arena is not None, "no arena is attached"
        for block, offset in zip(blocks, offsets, strict=True):
            np.copyto(self._blocks[block], arena[offset : offset + size])

    def finish(self) -> int:
        """Copies end before they return."""
        return 0


class CudaCopier:
    """Copies between a GPU's memory and the arena, on its own stream. See services.executor.engine.Copier.

    With pinned memory the GPU's copy engines move all blocks of a piece (CopyEngine). If the arena cannot be
    pinned, blocks go one by one through the driver's buffers, at a fifth of the rate."""

    piece_bytes = 32 << 20  # 0.7 ms on an H200 at 48 GB/s; 4 MiB give 36, 128 MiB 50

    def __init__(self, cache: KvCache, computed: Callable[[], Event | None]) -> None:
        """`computed` returns the event at the end of the last forward that is or was sampled."""
        self._device = cache.tensor.device
        self._bytes = cache.tensor.view(-1).view(torch.uint8)
        self._block_bytes, self._spare = cache.bytes_per_block, cache.spare
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # no annotations in torch
        self._computed = computed
        self._engine = CopyEngine()
        self._first: Event | None = None  # the start of the copies since `finish`
        self._newest: Event | None = None  # the end of the last copy
        self._arena: Tensor | None = None
        self._pinned = False

    def attach(self, arena: Arena, yield_device: YieldDevice = keep_device) -> None:
        view = torch.frombuffer(arena.view, dtype=torch.uint8)
        self._warm_up()
        with torch.cuda.device(self._device):
            self._pinned = _pin(view, self._engine, yield_device)
        self._arena = view

    def detach(self) -> None:
        view, self._arena = self._arena, None
        if view is not None and self._pinned:
            with torch.cuda.device(self._device):
                _unpin(view, self._engine, view.numel())

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self._arena is not None, "no arena is attached"
        self._move(self._bytes, self._arena, self._addresses(blocks), offsets)

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self._arena is not None, "no arena is attached"
        self._move(self._arena, self._bytes, offsets, self._addresses(blocks))

    def finish(self) -> int:
        first, newest = self._first, self._newest
        self._first = self._newest = None
        if first is None:
            return 0
        self._stream.synchronize()  # a failed call may have started copies, too
        if newest is None:
            return 0
        took_ms: float = first.elapsed_time(newest)
        return max(1, round(1e3 * took_ms))

    def _mark(self) -> Event:
        event = Event(enable_timing=True)  # type: ignore[no-untyped-call]  # no annotations in torch
        event.record(self._stream)
        return event

    def _warm_up(self) -> None:
        """Give this thread the device's context, and do the driver's slow first copies, with the spare block:
        a rate learnt from slow copies would stop the scheduler from copying at all."""
        size = self._block_bytes
        own = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            spare, host = (
                np.array([address], dtype=np.uint64)
                for address in (self._bytes.data_ptr() + self._spare * size, own.data_ptr())
            )
            for target, source in ((host, spare), (spare, host)):
                self._engine.copy(target, source, np.array([size]), self._stream.cuda_stream)
            self._stream.synchronize()

    def _addresses(self, blocks: Sequence[int]) -> list[int]:
        return [block * self._block_bytes for block in blocks]

    def _move(self, source: Tensor, target: Tensor, begins: Sequence[int], ends: Sequence[int]) -> None:
        size = self._block_bytes
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if (event := self._computed()) is not None:
                self._stream.wait_event(event)
            if self._first is None:
                self._first = self._mark()
            if self._pinned:
                runs = within_pieces(begins, ends, size, begins if source is self._arena else ends)
                sources, targets = (
                    offsets.astype(np.uint64) + np.uint64(memory.data_ptr())
                    for offsets, memory in ((runs.begins, source), (runs.ends, target))
                )
                self._engine.copy(targets, sources, runs.sizes, self._stream.cuda_stream)
            else:
                for begin, end in zip(begins, ends, strict=True):
                    target[end : end + size].copy_(source[begin : begin + size])
            before, self._newest = self._newest, self._mark()
        if before is not None:  # one copy stays queued after the running one: the link is never idle
            before.synchronize()


class Runs(NamedTuple):
    """Copies of `sizes` bytes from the offsets `begins` to the offsets `ends`, int64 each."""

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]


def within_pieces(begins: Sequence[int], ends: Sequence[int], size: int, host: Sequence[int]) -> Runs:
    """Copies of `size` bytes, cut in two if their range in the arena (offsets `host`) crosses pinned pieces:
    the driver copies from or to one piece at a time."""
    runs = Runs(np.array(begins), np.array(ends), np.full(len(begins), size))
    at = np.array(host)
    first = PIN_BYTES - at % PIN_BYTES  # up to the end of the piece
    cut = np.flatnonzero(first < size)
    if not len(cut):
        return runs
    runs.sizes[cut] = first[cut]
    rest = Runs(runs.begins[cut] + first[cut], runs.ends[cut] + first[cut], size - first[cut])
    return Runs(*(np.concatenate(both) for both in zip(runs, rest, strict=True)))


def _pin(view: Tensor, engine: CopyEngine, yield_device: YieldDevice) -> bool:
    """Pin a mapping, in pieces: about 0.3 s a GiB. False if the driver cannot. While the driver pins a piece,
    this process can neither get memory from the system nor start a kernel: with pieces of 256 MiB one after
    the other, the first requests stood still for seconds. So its pages are made before. Raises ArenaError
    when the arena is not wanted any more."""
    for at in range(0, view.numel(), PIN_BYTES):
        address, size = view.data_ptr() + at, min(PIN_BYTES, view.numel() - at)
        make_pages(address, size)
        began_s = time.monotonic()
        error = engine.pin(address, size)
        if not error and not yield_device(time.monotonic() - began_s):
            _unpin(view, engine, at + PIN_BYTES)
            raise ArenaError("the arena went before it was pinned")
        if error:
            log.warning(
                "the arena of %d bytes cannot be pinned (CUDA error %d), copies will be slow: raise the "
                "limit of locked memory (ulimit -l)", view.numel(), error,
            )  # fmt: skip
            _unpin(view, engine, at)
            return False
    return True


def make_pages(address: int, size_bytes: int) -> None:
    """Make the pages of a mapping at the start of a page, as its first writer would. Other threads get memory
    and start kernels meanwhile. A kernel of the system that cannot makes them later."""
    _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_int(_POPULATE_WRITE))


def _unpin(view: Tensor, engine: CopyEngine, size_bytes: int) -> None:
    for at in range(0, min(size_bytes, view.numel()), PIN_BYTES):
        if error := engine.unpin(view.data_ptr() + at):
            log.error("the arena stays pinned: cuMemHostUnregister gives CUDA error %d", error)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),  # kind and number of a location
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CopyEngine:
    """Many copies between a GPU's memory and the host's pinned memory in one call of the CUDA driver, by the
    GPU's copy engines. The calling thread must have made the device current.

    A kernel that reads and writes pinned memory is as fast, but its writes slow the running step down
    (docs/benchmarks/kv_copies.md). One call a copy costs the host up to 7 µs: most of the time for blocks of
    64 KiB."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self.batches = hasattr(self._driver, "cuMemcpyBatchAsync")  # since CUDA 12.8

    def pin(self, address: int, size_bytes: int) -> int:
        """Lock pages; 0 or an error of cuda.h. ctypes releases the GIL, torch would not: all threads would
        stand still for 0.3 s a GiB, and the executor would be declared dead."""
        error: int = self._driver.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_uint(_PORTABLE_MAPPED)
        )
        return error

    def unpin(self, address: int) -> int:
        """Unlock pages; 0 or an error of cuda.h."""
        error: int = self._driver.cuMemHostUnregister(ctypes.c_void_p(address))
        return error

    def copy(
        self, targets: Addresses, sources: Addresses, sizes_bytes: NDArray[np.int64], stream: int
    ) -> None:
        """Queue a copy from each of `sources` to its target. Host memory must be pinned. Raises
        EngineError."""
        if self.batches:
            error = self._batch(targets, sources, sizes_bytes.astype(np.uint64), stream)
            if error != _NOT_SUPPORTED:
                _check(error)
                return
            self.batches = False
        at = ctypes.c_void_p(stream)
        all_of = zip(targets.tolist(), sources.tolist(), sizes_bytes.tolist(), strict=True)
        for target, source, size in all_of:
            copied = self._driver.cuMemcpyAsync(
                ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), at
            )
            _check(copied)

    def _batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> int:
        attributes, first, failed = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
        error: int = self._driver.cuMemcpyBatchAsync(
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(len(targets)),
            ctypes.byref(attributes),
            ctypes.byref(first),  # the attributes apply from the first copy on
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )
        return error


def _check(error: int) -> None:
    if error:
        raise EngineError(f"the CUDA driver refuses a copy of KV blocks: error {error} of cuda.h")
