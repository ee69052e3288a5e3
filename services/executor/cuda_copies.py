"""Blocks of a cache in a GPU's memory, to and from the arena, on a stream of their own.

Through pinned memory the GPU's copy engines move all blocks of a piece (services.executor.copy_engine). An
arena that cannot be pinned is copied block by block through the driver's own buffers: a fifth of the rate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from mmap import mmap

import numpy as np
import torch
from torch import Tensor
from torch.cuda import Event

from services.executor.copy_engine import CopyEngine
from services.executor.kv_cache import KvCache

log = logging.getLogger("headrace.executor")


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
        self._arena: Tensor | None = None
        self._pinned = False

    def attach(self, arena: mmap) -> None:
        view = torch.frombuffer(arena, dtype=torch.uint8)
        self._warm_up()
        self._pinned = _pin(view, self._device, self._engine)
        self._arena = view

    def detach(self) -> None:
        view, self._arena = self._arena, None
        if view is not None and self._pinned:
            _unpin(view, self._device, self._engine)

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self._arena is not None, "no arena is attached"
        self._move(self._bytes, self._arena, self._places(blocks), offsets)

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self._arena is not None, "no arena is attached"
        self._move(self._arena, self._bytes, offsets, self._places(blocks))

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
                self._engine.copy(target, source, size, self._stream.cuda_stream)
            self._stream.synchronize()

    def _places(self, blocks: Sequence[int]) -> list[int]:
        return [block * self._block_bytes for block in blocks]

    def _move(self, source: Tensor, target: Tensor, begins: Sequence[int], ends: Sequence[int]) -> None:
        size = self._block_bytes
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if (event := self._computed()) is not None:
                self._stream.wait_event(event)
            if self._pinned:
                sources = np.asarray(begins, dtype=np.uint64) + np.uint64(source.data_ptr())
                targets = np.asarray(ends, dtype=np.uint64) + np.uint64(target.data_ptr())
                self._engine.copy(targets, sources, size, self._stream.cuda_stream)
            else:
                for begin, end in zip(begins, ends, strict=True):
                    target[end : end + size].copy_(source[begin : begin + size])
            self._stream.synchronize()


def _pin(view: Tensor, device: torch.device, engine: CopyEngine) -> bool:
    """Lock the pages of a mapping and give the GPU an address for them: about 0.3 s a GiB."""
    with torch.cuda.device(device):
        error = engine.pin(view.data_ptr(), view.numel())
        if error:
            log.warning(
                "the arena of %d bytes cannot be pinned (CUDA error %d), copies will be slow: raise the "
                "limit of locked memory (ulimit -l)", view.numel(), error,
            )  # fmt: skip
    return error == 0


def _unpin(view: Tensor, device: torch.device, engine: CopyEngine) -> None:
    with torch.cuda.device(device):
        if error := engine.unpin(view.data_ptr()):
            log.error("the arena stays pinned: cuMemHostUnregister gives CUDA error %d", error)
