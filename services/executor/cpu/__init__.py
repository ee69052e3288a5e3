"""The torch engine: the forward pass on a CPU, and the reference for the GPU's."""
