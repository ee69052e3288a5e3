"""Kernels that store to all ranks: a sum with the norm behind it, and columns of which each rank has some."""
