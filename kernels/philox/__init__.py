"""Counter-based random numbers."""

from kernels.philox.ref import gumbel, philox

__all__ = ["gumbel", "philox"]
