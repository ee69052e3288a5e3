"""Runs kernels on torch's own threads.

Torch computes with a team of OpenMP threads, which spin while they wait. A second pool would compete with it
for the cores, so kernels run on the same team, through the entry point that compilers call for `#pragma omp
parallel`. In a kernel each thread takes the next piece of work until none is left: if another process uses a
core for a while, the other threads do more.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numba import cfunc, config, types
from numpy.typing import NDArray

from kernels.cpu_jit import prebuilt, sources_digest

log = logging.getLogger("headrace.kernels")


_Parallel = Callable[[int, Any, int, int], None]  # function, data, threads, flags


@cache
def openmp() -> _Parallel | None:
    """What starts a parallel region in the OpenMP library that torch has loaded. None if it has none."""
    for name in ("libgomp.so.1", "libomp.so", "libiomp5.so"):  # LLVM's and Intel's have the same entry point
        for path in (Path(torch.__file__).parent / "lib" / name, Path(name)):
            try:
                library = ctypes.CDLL(str(path), mode=_ONLY_IF_LOADED)
                parallel: Any = library.GOMP_parallel
            except (OSError, AttributeError):
                continue
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            return cast("_Parallel", parallel)
    return None


_ONLY_IF_LOADED = 4 | 1  # RTLD_NOLOAD | RTLD_LAZY


def team_size() -> int:
    """How many threads run a kernel."""
    return torch.get_num_threads() if openmp() else 1


def bits_of(value: float) -> int:
    """A float as a number of a call; `float_of` converts it back."""
    return int.from_bytes(struct.pack("<f", value), "little", signed=True)


def _machine_code(body: Callable[..., None], pointers: int) -> Any:
    signature = types.void(*[types.CPointer(types.int64)] * pointers)
    if _first_start():
        log.info("compiling kernels for this CPU, once: %s …", body.__module__.rpartition(".")[2])
    if _cache["usable"]:
        try:
            _check_folder(config.CACHE_DIR)
            return cfunc(signature, cache=True, nogil=True)(body)
        except Exception as error:  # noqa: BLE001 - a folder without rights, a full disk, a damaged file, …
            _cache["usable"] = False
            kept = config.CACHE_DIR
            log.warning("%s cannot keep kernels: they are compiled at every start (%r)", kept, error)
    return cfunc(signature, nogil=True)(body)


_cache = {"usable": True}  # until the first error


def _check_folder(folder: str) -> None:
    """Raises OSError for a folder that cannot be written. Numba would keep the code elsewhere, by the
    checksum of a kernel's own file alone."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


@cache
def _first_start() -> bool:
    """Choose the folder of the machine code. True if it is new: this process compiles every kernel."""
    if not config.CACHE_DIR:
        config.CACHE_DIR = str(_code_folder())
    return not Path(config.CACHE_DIR).exists()


def _code_folder() -> Path:
    """The folder of the machine code, under XDG_CACHE_HOME or ~/.cache. Its name has a digest of all sources
    here: Numba only notices changes of a kernel's own file."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "headrace" / "kernels" / sources_digest()


class Kernel:
    """A function of numbers. Its machine code comes with the package, or is compiled at the first use and
    cached on disk. Any thread may call it.

    `body(p)` gets a pointer to int64: `p[0]` is the counter of pieces of work (`fetch_add`), then come the
    numbers and addresses of the call.
    """

    def __init__(self, body: Callable[..., None], pointers: int = 1) -> None:
        """With several `pointers` it is only a function that other kernels call."""
        self.name = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"  # no other kernel has it
        self._body, self._pointers = body, pointers
        self._compiling = threading.Lock()
        self._compiled: Any = None  # keeps the machine code
        self._alone: Any = None

    def __call__(self, pieces: int, *numbers: int) -> None:
        """Run on as many threads as torch uses, at most `pieces`. The caller keeps the memory at the
        addresses until this returns. The first call of a kernel that is compiled takes seconds."""
        if self._alone is None:
            self._compile()
        data = (ctypes.c_int64 * (len(numbers) + 1))(0, *numbers)
        threads = min(pieces, team_size())
        if threads > 1 and (parallel := openmp()):
            parallel(self._compiled.address, data, threads, 0)
        else:
            self._alone(data)

    @property
    def address(self) -> int:
        """The address of the machine code, a function of one pointer."""
        if self._alone is None:
            self._compile()
        return int(self._compiled.address)

    def compiled_by_numba(self) -> Any:
        """The machine code, with its `address`, compiled here."""
        return _machine_code(self._body, self._pointers)

    def _compile(self) -> None:
        with self._compiling:
            if self._alone is None:
                self._compiled = prebuilt.load(self.name) or self.compiled_by_numba()
                self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)


@cache
def shares(count: int, threads: int) -> NDArray[np.int64]:
    """Where pieces of work begin, and the end, of `count` panels that follow each other in memory. The first
    pieces are long: a thread that takes each second panel reads half of what it has read ahead for the other.
    The last ones are short, so that all threads end together."""
    starts = [0]
    while starts[-1] < count:
        starts.append(starts[-1] + max(1, (count - starts[-1]) // (2 * threads)))
    return np.array(starts, np.int64)


Number = int | NDArray[np.int64]  # an array: one for each of several equal calls


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel with its numbers, to run now or by batched_launch.py. `scratch`: its intermediate memory.
    `counters`: so many of the first numbers are 0 at the start, and the kernel changes them."""

    kernel: Kernel
    pieces: int
    numbers: tuple[Any, ...]  # each a Number
    scratch: torch.Tensor | None = None
    counters: int = 0

    def run(self) -> None:
        """Run the call; its numbers must be ints."""
        self.kernel(self.pieces, *self.numbers)
