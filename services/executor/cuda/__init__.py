"""The GPU engine: graphs, kernels, overlapped communication."""
