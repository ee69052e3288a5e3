"""Kernels: each operation beside its torch reference. Imports nothing of services or shared."""
