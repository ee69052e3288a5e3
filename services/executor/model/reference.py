"""The operations in torch: the definition of each, and what an engine without a kernel of its own runs.

They compute in the dtype of x. Attention reads a cache, whose layout is an engine's; so it is not here.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import swiglu
from kernels.moe import combine, dispatch, experts_mlp, permute, route
from kernels.norm import rms_norm
from services.executor.model.description import Add, Experts, Gate, HeadNorm, Norm, Projection
from services.executor.model.program import Placed, Table, Values


def split_heads(x: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[tokens, heads, dim]` of `x` `[tokens, (heads + 2 * kv_heads) * dim]`."""
    each = x.view(len(x), heads + 2 * kv_heads, -1)
    query, key, value = torch.split(each, [heads, kv_heads, kv_heads], 1)
    return query, key, value


def _norm(placed: Placed, values: Values) -> None:
    weight = placed.dense(placed.op.weight)
    values.x = rms_norm(values.residual, weight.to(values.residual.dtype), placed.op.eps)


def _projection(placed: Placed, values: Values) -> None:
    op, kind = placed.op, values.x.dtype
    bias = None if op.bias is None else placed.dense(op.bias).to(kind)
    values.x = F.linear(values.x, placed.dense(op.weight).to(kind), bias)


def _head_norm(placed: Placed, values: Values) -> None:
    op, kind = placed.op, values.x.dtype
    query, key, value = split_heads(values.x, op.heads, op.kv_heads)
    query = rms_norm(query, placed.dense(op.query).to(kind), op.eps)
    key = rms_norm(key, placed.dense(op.key).to(kind), op.eps)
    values.x = torch.cat((query, key, value), 1).view(values.x.shape)


def _gate(placed: Placed, values: Values) -> None:
    values.x = swiglu(values.x)


def _experts(placed: Placed, values: Values) -> None:
    op, x = placed.op, values.x
    gate_up, down, router = (placed.dense(each) for each in (op.gate_up, op.down, op.router))
    weights, chosen = route(F.linear(x, router.to(x.dtype)), op.per_token, renormalise=op.renormalise)
    permuted = permute(chosen, op.first, len(gate_up))
    found = experts_mlp(dispatch(x, permuted), gate_up, down, permuted.bounds)
    values.x = combine(found, permuted, weights)


def _add(placed: Placed, values: Values) -> None:
    values.residual = values.residual + values.x


_DEFINITIONS = {
    Norm: _norm,
    Projection: _projection,
    HeadNorm: _head_norm,
    Gate: _gate,
    Experts: _experts,
    Add: _add,
}
REFERENCE: Table = {(kind,): partial(partial, run) for kind, run in _DEFINITIONS.items()}
