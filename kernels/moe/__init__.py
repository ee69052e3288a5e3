"""The ops of a mixture of experts: which experts a token goes to, its rows in their order, and back."""

from kernels.moe.ref import Permutation, combine, dispatch, experts_mlp, permute, route

__all__ = ["Permutation", "combine", "dispatch", "experts_mlp", "permute", "route"]
