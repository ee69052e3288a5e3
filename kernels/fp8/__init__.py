"""Matrices in fp8 (e4m3) with a scale for each row: weights by output channel, activations by token."""

from kernels.fp8.ref import Fp8Rows, dequantise, quantise_rows

__all__ = ["Fp8Rows", "dequantise", "quantise_rows"]
