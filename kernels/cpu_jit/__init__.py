"""Kernels for a CPU, compiled by Numba and run on torch's threads.

`NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma,+f16c` makes them those of an AVX2 machine on any other.
"""

import os
from importlib.util import find_spec

BYTES = ("avx2", "f16c")  # CPU features that products of bytes and half bytes need


def available() -> bool:
    """Whether Numba is installed."""
    return find_spec("numba") is not None


def has(*features: str) -> bool:
    """Whether Numba is installed and the CPU, or the one that kernels are compiled for, has all these
    features, by LLVM's names: `avx512bf16`."""
    if not available():
        return False
    if named := os.environ.get("NUMBA_CPU_FEATURES"):
        return {f"+{feature}" for feature in features} <= set(named.split(","))
    from llvmlite.binding import get_host_cpu_features

    found = get_host_cpu_features()
    return all(found.get(feature, False) for feature in features)


def has_amx() -> bool:
    """Whether products in bfloat16 run in AMX's tiles."""
    if not available():
        return False
    from kernels.cpu_jit import amx

    return amx.usable()
