"""Kernels for a CPU, compiled by Numba and run on the threads of torch."""

from importlib.util import find_spec


def available() -> bool:
    """True where they can be compiled: Numba is installed."""
    return find_spec("numba") is not None
