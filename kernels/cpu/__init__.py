"""Kernels for a CPU, compiled by Numba and run on the threads of torch."""

from importlib.util import find_spec


def available() -> bool:
    """True where they can be compiled: Numba is installed."""
    return find_spec("numba") is not None


def has(feature: str) -> bool:
    """True where they can be compiled for a CPU with a feature, by LLVM's name of it: `avx512bf16`."""
    if not available():
        return False
    from llvmlite.binding import get_host_cpu_features

    return bool(get_host_cpu_features().get(feature, False))
