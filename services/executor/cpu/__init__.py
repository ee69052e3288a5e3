"""The torch engine: it computes on a CPU, and is the reference for the CUDA engine."""
