"""Kernels that compute the inputs of all layers once a step, and a kernel that writes device timestamps."""
