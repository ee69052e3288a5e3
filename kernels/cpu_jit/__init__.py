"""Kernels for a CPU, compiled by Numba and run on the threads of torch."""

from importlib.util import find_spec

INT8 = ("avx512bf16", "avx512vnni")  # what products of int8 need


def available() -> bool:
    """True where they can be compiled: Numba is installed."""
    return find_spec("numba") is not None


def has(*features: str) -> bool:
    """True where they can be compiled for a CPU with all these features, by LLVM's names: `avx512bf16`."""
    if not available():
        return False
    from llvmlite.binding import get_host_cpu_features

    found = get_host_cpu_features()
    return all(found.get(feature, False) for feature in features)
