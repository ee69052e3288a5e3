"""The operations in torch: the definition of each, and what an engine without a kernel of its own runs.

They compute in the dtype of x. Attention reads a cache, whose layout is an engine's; so it is not here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import swiglu
from kernels.moe import combine, dispatch, experts_mlp, permute, route
from kernels.norm import rms_norm
from services.executor.model.description import Add, Experts, Gate, HeadNorm, Norm, Projection
from services.executor.model.program import Placed, Step, Table, Values


def split_heads(x: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[tokens, heads, dim]` of `x` `[tokens, (heads + 2 * kv_heads) * dim]`."""
    each = x.view(len(x), heads + 2 * kv_heads, -1)
    query, key, value = torch.split(each, [heads, kv_heads, kv_heads], 1)
    return query, key, value


def _norm(placed: Placed) -> Step:
    weight, eps = placed.dense(placed.op.weight), placed.op.eps

    def step(values: Values) -> None:
        values.x = rms_norm(values.residual, weight.to(values.residual.dtype), eps)

    return step


def _projection(placed: Placed) -> Step:
    weight, bias = placed.dense(placed.op.weight), placed.op.bias
    added = None if bias is None else placed.dense(bias)

    def step(values: Values) -> None:
        kind = values.x.dtype
        values.x = F.linear(values.x, weight.to(kind), None if added is None else added.to(kind))

    return step


def _head_norm(placed: Placed) -> Step:
    op = placed.op
    query_weight, key_weight = placed.dense(op.query), placed.dense(op.key)

    def step(values: Values) -> None:
        query, key, value = split_heads(values.x, op.heads, op.kv_heads)
        query = rms_norm(query, query_weight.to(query.dtype), op.eps)
        key = rms_norm(key, key_weight.to(key.dtype), op.eps)
        values.x = torch.cat((query, key, value), 1).view(values.x.shape)

    return step


def _gate(placed: Placed) -> Step:
    def step(values: Values) -> None:
        values.x = swiglu(values.x)

    return step


def _experts(placed: Placed) -> Step:
    op = placed.op
    gate_up, down, router = (placed.dense(each) for each in (op.gate_up, op.down, op.router))

    def step(values: Values) -> None:
        logits = F.linear(values.x, router.to(values.x.dtype))
        weights, chosen = route(logits, op.per_token, renormalise=op.renormalise)
        permuted = permute(chosen, op.first, len(gate_up))
        found = experts_mlp(dispatch(values.x, permuted), gate_up, down, permuted.ends)
        values.x = combine(found, permuted, weights)

    return step


def _add(placed: Placed) -> Step:
    def step(values: Values) -> None:
        values.residual = values.residual + values.x

    return step


REFERENCE: Table = {
    (Norm,): _norm,
    (Projection,): _projection,
    (HeadNorm,): _head_norm,
    (Gate,): _gate,
    (Experts,): _experts,
    (Add,): _add,
}
