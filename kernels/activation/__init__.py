"""The gate of a Llama MLP."""

from kernels.activation.ref import swiglu, swiglu_by_row

__all__ = ["swiglu", "swiglu_by_row"]
