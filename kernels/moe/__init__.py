"""The ops of a mixture of experts: which experts a token goes to, its rows in their order, and back."""

from kernels.moe.ref import Places, combine, experts_mlp, place, route, spread

__all__ = ["Places", "combine", "experts_mlp", "place", "route", "spread"]
