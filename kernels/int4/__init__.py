"""Matrices of weights in 4 bits, with a scale for each group of columns."""

from kernels.int4.ref import Int4Groups, dequantise, pack, quantise_groups, unpack, widen_e2m1

__all__ = ["Int4Groups", "dequantise", "pack", "quantise_groups", "unpack", "widen_e2m1"]
