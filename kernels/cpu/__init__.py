"""Kernels for a CPU, compiled by Numba and run on the threads of torch."""
