"""The engine on a CUDA GPU: Triton kernels, CUDA graphs, and slots that live on the device."""
