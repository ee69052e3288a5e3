"""The layers of a model as one rank of several has them, with random weights, for loadtest.gpu.comm.

ep   attention on a rank's own tokens, the experts divided between the ranks (Qwen3-30B-A3B)
tp   all ranks on the same tokens, each with its heads and its part of the MLP (Llama-3.1-8B)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.elementwise
import kernels.moe.ref
from loadtest.gpu.comm_attention import Attention, CudaAttention, HostAttention, Norms
from loadtest.gpu.experts import ExpertWeights, Gathered, Group
from loadtest.gpu.shape import LLAMA_8B, QWEN3_30B_A3B
from services.executor.checkpoint.config import from_hf
from services.executor.model.description import Shapes
from services.executor.parallel.coroutines import ForwardPass

_SPREAD = 0.02
_TINY = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 8,
         "num_experts_per_tok": 2}  # fmt: skip


class Talks(Group, Protocol):
    """What ranks of both kinds say."""

    def all_reduce(self, x: Tensor) -> None: ...

    def all_gather_into(self, out: Tensor, x: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    norms: Norms
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor | None
    down: Tensor | None
    experts: ExpertWeights | None


def shapes_of(kind: str, layers: int, *, tiny: bool) -> Shapes:
    """The whole model's."""
    config = {"ep": QWEN3_30B_A3B, "tp": LLAMA_8B}[kind]
    shapes = from_hf(
        {
            **config,
            **({k: v for k, v in _TINY.items() if k in config or k == "head_dim"} if tiny else {}),
            **({"num_hidden_layers": layers} if layers else {}),
        }
    )
    return replace(shapes, rope_factors=()) if tiny else shapes


class Stack:
    """A rank's layers, its KV, and a pass through them."""

    def __init__(self, kind: str, shapes: Shapes, group: Talks, device: torch.device) -> None:
        """The part of a model that a rank of `group` has; `kind` is `tp` or `ep`."""
        self.kind, self.shapes, self.device = kind, shapes, device
        ranks = group.size if kind == "tp" else 1
        self._here = replace(
            shapes,
            heads=shapes.heads // ranks,
            kv_heads=max(1, shapes.kv_heads // ranks),
            intermediate=shapes.intermediate // ranks,
        )
        on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        # Of a tensor-parallel model each rank's weights are its own; what all ranks have must be the same.
        self._shared = torch.Generator(device).manual_seed(5)
        self._own = torch.Generator(device).manual_seed(50 + group.rank)
        self._layers = [self._layer(group.size) for _ in range(shapes.layers)]
        self._final = torch.ones(shapes.hidden, dtype=self.dtype, device=device)
        self._norm, self._add_norm, self._gate, self._moe = _gpu_ops() if on_gpu else _host_ops()

    def attention(self, prompts: int, room: int) -> Attention:
        """With KV for so many prompts of so many tokens."""
        if self.device.type == "cuda":
            return CudaAttention(self._here, prompts, room, self.device)
        return HostAttention(self._here, prompts, room)

    def program(self, x: Tensor, attention: Attention, prepared: Any, group: Talks) -> ForwardPass:
        """A pass of the tokens `x` `[tokens, hidden]`; what comes out of the last norm."""
        eps, layers = self.shapes.norm_eps, self._layers
        residual = x.clone()
        normed = self._norm(residual, layers[0].attention_norm, eps)
        for i, layer in enumerate(layers):
            attended = F.linear(attention(i, F.linear(normed, layer.qkv), layer.norms, prepared), layer.out)
            if self.kind == "tp":
                yield functools.partial(group.all_reduce, attended)
            normed, residual = self._add_norm(attended, residual, layer.mlp_norm, eps)
            if layer.experts is not None:
                assert self.shapes.experts is not None, "a layer of experts is of a model that has them"
                found = yield from Gathered(self.shapes.experts, group, self._moe).mlp(normed, layer.experts)
            else:
                found = F.linear(self._gate(F.linear(normed, layer.gate_up)), layer.down)
                yield functools.partial(group.all_reduce, found)
            norm = self._final if i + 1 == len(layers) else layers[i + 1].attention_norm
            normed, residual = self._add_norm(found, residual, norm, eps)
        return normed

    def tokens(self, count: int, rank: int) -> Tensor:
        """A rank's random inputs; of a tensor-parallel model all have the same."""
        seed = 1000 + (rank if self.kind == "ep" else 0)
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (count, self.shapes.hidden)
        return torch.randn(size, generator=generator, dtype=self.dtype, device=self.device)

    def _layer(self, ranks: int) -> _Layer:
        here, hidden = self._here, self.shapes.hidden
        queries, keys = here.heads * here.head_dim, here.kv_heads * here.head_dim
        ones = functools.partial(torch.ones, dtype=self.dtype, device=self.device)
        mine = self._draw(self._own)
        both = self._draw(self._shared) if self.kind == "ep" else mine
        norms = Norms(ones(here.head_dim), ones(here.head_dim)) if here.qk_norm else Norms(None, None)
        experts = gate_up = down = None
        if self.shapes.experts is not None:
            count, width = self.shapes.experts.count, self.shapes.experts.width
            some = count // ranks
            experts = ExpertWeights(
                both(count, hidden), mine(some, 2 * width, hidden), mine(some, hidden, width)
            )
        else:
            gate_up, down = mine(2 * here.intermediate, hidden), mine(hidden, here.intermediate)
        return _Layer(
            attention_norm=ones(hidden), norms=norms, qkv=both(queries + 2 * keys, hidden),
            out=both(hidden, queries), mlp_norm=ones(hidden), gate_up=gate_up, down=down, experts=experts,
        )  # fmt: skip

    def _draw(self, generator: torch.Generator) -> Callable[..., Tensor]:
        def draw(*size: int) -> Tensor:
            values = torch.empty(size, dtype=self.dtype, device=self.device)
            return values.normal_(0.0, _SPREAD, generator=generator)

        return draw


def _host_ops() -> Any:
    return (
        kernels.elementwise.rms_norm,
        kernels.elementwise.add_rms_norm,
        kernels.elementwise.swiglu,
        kernels.moe.ref,
    )


def _gpu_ops() -> Any:
    import kernels.elementwise.gpu
    import kernels.moe.gpu

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return kernels.elementwise.gpu.add_rms_norm_(x, residual, weight, eps), residual

    return kernels.elementwise.gpu.rms_norm, add_norm, kernels.elementwise.gpu.swiglu, kernels.moe.gpu
