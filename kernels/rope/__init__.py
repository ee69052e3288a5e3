"""Rotary position embedding."""

from kernels.rope.ref import apply_rope, rope_table

__all__ = ["apply_rope", "rope_table"]
