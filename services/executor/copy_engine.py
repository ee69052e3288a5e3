"""Many copies between a GPU's memory and pinned memory of the host, by its copy engines, in one call of the
CUDA driver.

A kernel that reads and writes pinned memory by itself is as fast, but what it writes stands in the way of
the step beside it: docs/benchmarks/kv_copies.md. One call a copy costs the host up to 7 µs each, which
for blocks of 64 KiB is most of the time.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from shared.errors import EngineError

_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED

Addresses = NDArray[np.uint64]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),  # kind and number of a location
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CopyEngine:
    """The driver's copies. The calling thread has made the device current."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self.batches = hasattr(self._driver, "cuMemcpyBatchAsync")  # since CUDA 12.8

    def pin(self, address: int, size_bytes: int) -> int:
        """Lock pages; 0, or the error of cuda.h. Other threads run meanwhile: through torch they would stand
        still for 0.3 s a GiB, and the executor would be given up for dead."""
        error: int = self._driver.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_uint(_PORTABLE_MAPPED)
        )
        return error

    def unpin(self, address: int) -> int:
        """Unlock them; 0, or the error of cuda.h."""
        error: int = self._driver.cuMemHostUnregister(ctypes.c_void_p(address))
        return error

    def copy(
        self, targets: Addresses, sources: Addresses, sizes_bytes: NDArray[np.int64], stream: int
    ) -> None:
        """Queue a copy from each of `sources` to its target. All memory of the host among it is pinned.
        Raises EngineError."""
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
            ctypes.byref(first),  # the attributes hold from the first copy on
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )
        return error


def _check(error: int) -> None:
    if error:
        raise EngineError(f"the CUDA driver refuses a copy of KV blocks: error {error} of cuda.h")
