"""RMS norm, alone and after a residual add."""

from kernels.elementwise.ref import add_rms_norm, apply_rope, rms_norm, rope_table, swiglu, swiglu_by_row

__all__ = ["add_rms_norm", "apply_rope", "rms_norm", "rope_table", "swiglu", "swiglu_by_row"]
