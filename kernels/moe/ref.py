"""A mixture of experts in torch (Shazeer et al. 2017, arXiv:1701.06538): the reference of kernels.moe.gpu.

logits ─ route ─▶ experts, weights [tokens, k]
experts ─ permute ─▶ the row of each (token, expert) pair among rows sorted by expert
x [tokens] ─ dispatch ─▶ [pairs] ─ products, one group of rows an expert ─▶ [pairs] ─ combine ─▶ [tokens]
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise.ref import swiglu


@dataclass(frozen=True, slots=True)
class Permutation:
    """The rows of pairs sorted by expert, and within an expert by token.

    `bounds` `[experts here + 1]` int32: the first row of each expert, and one after the last row of all.
    `rows` `[tokens, k]` int32: the row of each pair, -1 for an expert of another rank.
    """

    bounds: Tensor
    rows: Tensor


def route(logits: Tensor, count: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The `count` most probable experts of each row of `logits` `[tokens, experts]`, the most probable first:
    their weights `[tokens, count]` float32, with a sum of one if `renormalise`, and their numbers, int32."""
    weights, experts = logits.float().softmax(-1).topk(count, -1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts.int()


def route_of_chosen(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same, where the weights are a softmax of the chosen experts' logits alone (gpt-oss)."""
    chosen, experts = logits.float().topk(count, -1)
    return chosen.softmax(-1), experts.int()


def route_by_sigmoid(
    logits: Tensor, count: int, bias: Tensor, groups: int, top_groups: int, scale: float, *, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """The same by sigmoids: `bias` `[experts]` is added to choose, not to weigh, and the experts of the
    `top_groups` of `groups` with the best two of a group together are looked at (DeepSeek-V3,
    arXiv:2412.19437)."""
    scores = logits.float().sigmoid()
    by_group = (scores + bias.float()).view(len(logits), groups, -1)
    best = by_group.topk(2, -1)[0].sum(-1).topk(top_groups, -1)[1]
    out = torch.ones_like(by_group, dtype=torch.bool).scatter_(
        1, best[..., None].expand(-1, -1, by_group.shape[2]), False
    )
    experts = by_group.masked_fill(out, -torch.inf).flatten(1).topk(count, -1)[1]
    weights = scores.gather(1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts.int()


def permute(experts: Tensor, first: int, count: int) -> Permutation:
    """Sort the pairs of `experts` `[tokens, k]` with the experts `first` to `first + count`."""
    flat = experts.flatten().long() - first
    flat = torch.where((flat >= 0) & (flat < count), flat, count)
    order = flat.argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    bounds = F.pad(F.one_hot(flat, count + 1).sum(0)[:count].cumsum(0), (1, 0))
    rows = torch.where(flat < count, rows, -1)
    return Permutation(bounds.int(), rows.view(experts.shape).int())


def dispatch(x: Tensor, permutation: Permutation) -> Tensor:
    """The rows of `x` `[tokens, width]` in the order of their pairs: `[tokens * k, width]`; rows after the
    last bound are undefined."""
    tokens, k = permutation.rows.shape
    out = x.new_empty(tokens * k, x.shape[1])
    token, slot = (permutation.rows >= 0).nonzero(as_tuple=True)
    out[permutation.rows[token, slot].long()] = x[token]
    return out


def combine(y: Tensor, permutation: Permutation, weights: Tensor) -> Tensor:
    """The weighted float32 sum of each token's rows of `y` `[pairs, width]`: `[tokens, width]`. Pairs of
    other ranks add nothing."""
    here = permutation.rows >= 0
    rows = y[permutation.rows.clamp(min=0).flatten().long()].view(*permutation.rows.shape, y.shape[1]).float()
    rows = torch.where(here[..., None], rows, 0.0)  # weights of 0 would not do: undefined rows may be NaN
    return (rows * weights[..., None]).sum(1).to(y.dtype)


def experts_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    bounds: Tensor,
    act: str = "silu",
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Each expert's MLP of its rows of `x` `[pairs, hidden]`, in the dtype of `x`; rows after the last bound
    are undefined. `gate_up` is `[experts, 2 * width, hidden]`, `down` `[experts, hidden, width]`; `biases` of
    both, `[experts, out]`."""
    out, dtype = torch.empty_like(x), x.dtype
    for expert, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        if end > begin:
            first, second = (None if bias is None else bias[expert].to(dtype) for bias in biases)
            gated = swiglu(F.linear(x[begin:end], gate_up[expert].to(dtype), first), act)
            out[begin:end] = F.linear(gated, down[expert].to(dtype), second)
    return out
