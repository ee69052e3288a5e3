"""Matrices in fp8 (e4m3) with a scale for each row, weights by output channel and activations by token; and
weights in 4 bits with a scale for each group of columns."""

from kernels.quantised.ref import (
    Fp8Rows,
    Int4Groups,
    dequantise,
    dequantise_rows,
    pack,
    quantise_groups,
    quantise_rows,
    unpack,
    widen_e2m1,
)

__all__ = [
    "Fp8Rows",
    "Int4Groups",
    "dequantise",
    "dequantise_rows",
    "pack",
    "quantise_groups",
    "quantise_rows",
    "unpack",
    "widen_e2m1",
]
