"""RMS norm, alone and after a residual add."""

from kernels.rms_norm.ref import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
