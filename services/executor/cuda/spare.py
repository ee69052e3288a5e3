"""Processors that the libraries' products leave free, for what runs beside them.

A product with a program for each processor, one of which must wait for a processor that talks, runs twice as
long; on fewer processors it runs a few per cent longer. Counts at the launch, so at the capture of a graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def spare(count: int) -> Iterator[None]:
    """Within this, products of torch and cuBLAS use `count` of the processors less; 0: all."""
    if not count:
        yield
        return
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(count)  # what _grouped_mm goes by
    _cublas_processors(properties.multi_processor_count - count)
    try:
        yield
    finally:
        _cublas_processors(0)
        torch._C._set_sm_carveout_experimental(before)


def _cublas_processors(count: int) -> None:
    """0: all. Not every release of torch tells cuBLAS itself."""
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    try:
        library = ctypes.CDLL(f"libcublas.so.{major}")
    except OSError:  # linked in otherwise: then torch's own products alone leave processors free
        return
    handle: int = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # torch annotates it not
    library.cublasSetSmCountTarget(ctypes.c_void_p(handle), ctypes.c_int(count))
