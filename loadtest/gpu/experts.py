"""A mixture of experts with its experts divided between ranks, each rank with its own tokens.

Every rank gets the tokens of all ranks and computes those of its experts; the sums go back to the ranks of
the tokens: all-gather, reduce-scatter. Sizes are known, so the host never waits. Up to about 8 ranks and 8
experts a token this moves fewer rows than two all-to-alls of each token's rows: a row goes to each rank only
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.moe import Permutation
from services.executor.model.description import ExpertShapes
from services.executor.parallel.coroutines import ForwardPass


class Kernels(Protocol):
    """The ops of kernels.moe, as a device computes them."""

    def route(self, logits: Tensor, count: int, *, renormalise: bool) -> tuple[Tensor, Tensor]: ...

    def permute(self, experts: Tensor, first: int, count: int) -> Permutation: ...

    def dispatch(self, x: Tensor, permutation: Permutation) -> Tensor: ...

    def combine(self, y: Tensor, permutation: Permutation, weights: Tensor) -> Tensor: ...

    def experts_mlp(self, x: Tensor, gate_up: Tensor, down: Tensor, bounds: Tensor) -> Tensor: ...


class Group(Protocol):
    """The ranks, and what they say: into tensors that are there, contiguous."""

    rank: int
    size: int

    def all_gather_each(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        """Each of `outs` `[size, *x.shape]`: everybody's `x`."""

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> None:
        """`out`: the sum over all ranks of their `x[rank]`; `x` is `[size, *out.shape]`."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Of one layer: the router `[experts, hidden]`, and of the experts here `gate_up` and `down`, stacked."""

    router: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Gathered:
    """See above. Every rank has the same number of tokens."""

    shapes: ExpertShapes
    group: Group
    kernels: Kernels

    def mlp(self, x: Tensor, layer: ExpertWeights) -> ForwardPass:
        """The experts' MLP of this rank's tokens `x` `[tokens, hidden]`: the same shape."""
        group, kernels, here = self.group, self.kernels, len(layer.gate_up)
        weights, chosen = _routed(kernels, self.shapes, x, layer)
        routes = torch.stack((weights.view(torch.int32), chosen))
        tokens, all_routes = x.new_empty(group.size, *x.shape), routes.new_empty(group.size, *routes.shape)

        yield lambda: group.all_gather_each((all_routes, tokens), (routes, x))
        all_weights = all_routes[:, 0].contiguous().view(torch.float32).flatten(0, 1)
        permutation = kernels.permute(all_routes[:, 1].flatten(0, 1).contiguous(), group.rank * here, here)
        rows = kernels.dispatch(tokens.flatten(0, 1), permutation)
        found = kernels.experts_mlp(rows, layer.gate_up, layer.down, permutation.bounds)
        share, out = kernels.combine(found, permutation, all_weights), torch.empty_like(x)
        yield lambda: group.reduce_scatter_into(out, share.view_as(tokens))
        return out


def _routed(kernels: Kernels, shapes: ExpertShapes, x: Tensor, layer: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Weights and experts of each token, `[tokens, per_token]`."""
    return kernels.route(F.linear(x, layer.router), shapes.per_token, renormalise=shapes.renormalise)
