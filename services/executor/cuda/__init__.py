"""The GPU engine runs steps as CUDA graphs and overlaps collectives with compute."""
