"""Measures the GPU engine against its device: each figure beside a floor measured in the same run.

python -m loadtest.gpu --out gpu_h200.json            (see docs/benchmarks/gpu.md)
"""
