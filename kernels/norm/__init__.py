"""RMS norm, alone and after a residual add."""

from kernels.norm.ref import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
