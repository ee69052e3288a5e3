"""Headrace's kernels: each has a torch reference (ref.py) next to it. Nothing here imports services or
shared."""
