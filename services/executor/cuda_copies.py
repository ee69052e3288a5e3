"""Blocks of a cache in a GPU's memory, to and from the arena, on a stream of their own.

Through pinned memory the GPU's copy engines move all blocks of a piece (services.executor.copy_engine). An
arena that cannot be pinned is copied block by block through the driver's own buffers: a fifth of the rate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.cuda import Event

from services.executor.arena import Arena
from services.executor.copy_engine import CopyEngine
from services.executor.kv_cache import KvCache

log = logging.getLogger("headrace.executor")

PIN_BYTES = 256 << 20  # pinned at a time, in 80 ms


class CudaCopier:
    """See services.executor.backend.Copier."""

    piece_bytes = 32 << 20  # 0.7 ms on an H200 at 48 GB/s; 4 MiB give 36, 128 MiB 50

    def __init__(self, cache: KvCache, computed: Callable[[], Event | None]) -> None:
        """`computed` gives what marks the end of the newest forward that is or was sampled."""
        self._device = cache.tensor.device
        self._bytes = cache.tensor.view(-1).view(torch.uint8)
        self._block_bytes, self._spare = cache.bytes_per_block, cache.spare
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch annotates it not
        self._computed = computed
        self._engine = CopyEngine()
        self._first: Event | None = None  # the beginning of what was asked since `finish`
        self._newest: Event | None = None  # the end of what was asked last
        self._arena: Tensor | None = None
        self._pinned = False

    def attach(self, arena: Arena) -> None:
        view = torch.frombuffer(arena.view, dtype=torch.uint8)
        self._warm_up()
        with torch.cuda.device(self._device):
            self._pinned = _pin(view, self._engine)
        self._arena = view

    def detach(self) -> None:
        view, self._arena = self._arena, None
        if view is not None and self._pinned:
            with torch.cuda.device(self._device):
                _unpin(view, self._engine, view.numel())

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self._arena is not None, "no arena is attached"
        self._move(self._bytes, self._arena, self._places(blocks), offsets)

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self._arena is not None, "no arena is attached"
        self._move(self._arena, self._bytes, offsets, self._places(blocks))

    def finish(self) -> int:
        first, newest = self._first, self._newest
        self._first = self._newest = None
        if first is None:
            return 0
        self._stream.synchronize()  # of one that failed, too, there may be copies on the way
        if newest is None:
            return 0
        took_ms: float = first.elapsed_time(newest)
        return max(1, round(1e3 * took_ms))

    def _mark(self) -> Event:
        event = Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch annotates it not
        event.record(self._stream)
        return event

    def _warm_up(self) -> None:
        """Give this thread the device's context, and make the driver's first copies, which take long, between
        the spare block and memory that nobody reads: a rate learnt from them would keep all others away."""
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

    def _places(self, blocks: Sequence[int]) -> list[int]:
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
                    places.astype(np.uint64) + np.uint64(memory.data_ptr())
                    for places, memory in ((runs.begins, source), (runs.ends, target))
                )
                self._engine.copy(targets, sources, runs.sizes, self._stream.cuda_stream)
            else:
                for begin, end in zip(begins, ends, strict=True):
                    target[end : end + size].copy_(source[begin : begin + size])
            before, self._newest = self._newest, self._mark()
        if before is not None:  # one is always queued behind the one that runs: the link is never idle
            before.synchronize()


class Runs(NamedTuple):
    """Copies of `sizes` bytes from `begins` to `ends`, int64 each."""

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]


def within_pieces(begins: Sequence[int], ends: Sequence[int], size: int, host: Sequence[int]) -> Runs:
    """Copies of `size` bytes, cut in two where their place in the arena, `host`, lies across two pinned
    pieces: the driver copies from and to one at a time."""
    runs = Runs(np.array(begins), np.array(ends), np.full(len(begins), size))
    at = np.array(host)
    first = PIN_BYTES - at % PIN_BYTES  # up to the end of the piece
    cut = np.flatnonzero(first < size)
    if not len(cut):
        return runs
    runs.sizes[cut] = first[cut]
    rest = Runs(runs.begins[cut] + first[cut], runs.ends[cut] + first[cut], size - first[cut])
    return Runs(*(np.concatenate(both) for both in zip(runs, rest, strict=True)))


def _pin(view: Tensor, engine: CopyEngine) -> bool:
    """Lock the pages of a mapping and give the GPU an address for them: about 0.3 s a GiB, in pieces. While
    the driver is at it nobody in this process gets memory from the system: with one call for all of it an
    executor is silent for so long that it is given up for dead."""
    for at in range(0, view.numel(), PIN_BYTES):
        error = engine.pin(view.data_ptr() + at, min(PIN_BYTES, view.numel() - at))
        if error:
            log.warning(
                "the arena of %d bytes cannot be pinned (CUDA error %d), copies will be slow: raise the "
                "limit of locked memory (ulimit -l)", view.numel(), error,
            )  # fmt: skip
            _unpin(view, engine, at)
            return False
    return True


def _unpin(view: Tensor, engine: CopyEngine, size_bytes: int) -> None:
    for at in range(0, size_bytes, PIN_BYTES):
        if error := engine.unpin(view.data_ptr() + at):
            log.error("the arena stays pinned: cuMemHostUnregister gives CUDA error %d", error)
