"""The ops of a mixture of experts: route, permute, dispatch, the experts' MLPs, combine."""

from kernels.moe.ref import (
    Permutation,
    combine,
    dispatch,
    experts_mlp,
    permute,
    route,
    route_by_sigmoid,
    route_of_chosen,
)

__all__ = [
    "Permutation",
    "combine",
    "dispatch",
    "experts_mlp",
    "permute",
    "route",
    "route_by_sigmoid",
    "route_of_chosen",
]
