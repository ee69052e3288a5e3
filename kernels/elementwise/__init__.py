"""Operations on one row at a time: RMS norm, the gate of an MLP, rotary position embedding; and on a GPU the
inputs of all layers, once a step, and device timestamps."""

from kernels.elementwise.ref import (
    activate,
    add_rms_norm,
    apply_rope,
    layer_norm,
    rms_norm,
    rope_table,
    swiglu,
    swiglu_by_row,
)

__all__ = [
    "activate",
    "add_rms_norm",
    "apply_rope",
    "layer_norm",
    "rms_norm",
    "rope_table",
    "swiglu",
    "swiglu_by_row",
]
