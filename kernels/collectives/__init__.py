"""Kernels that store to all ranks' memory: fused all-reduce + RMSNorm, and an all-gather of columns."""
