"""Matrices of weights in 4 bits, with a scale for each group of columns."""

from kernels.int4.ref import Int4Groups, dequantise, pack, product, quantise_groups, unpack

__all__ = ["Int4Groups", "dequantise", "pack", "product", "quantise_groups", "unpack"]
