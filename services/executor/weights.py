"""The weights of a model as the forward pass wants them, from any file that can name its tensors.

Projections that read the same input are joined, so that a layer is four matrix products:

    qkv [(heads + 2 * kv_heads) * head_dim, hidden] · out · gate_up [2 * intermediate, hidden] · down
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.executor.shapes import Shapes

# A part of a layer (or of the model, with layer -1) as [out, in], in halves-rotating order for q and k.
ReadTensor = Callable[[str, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are `[out, in]`, norms `[width]`."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model. `head` is `embedding` itself where they are tied. The model that computes takes the
    layers out, so that plain matrices go as packed ones come."""

    embedding: Tensor  # [vocab, hidden]
    norm: Tensor
    head: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]


def assemble(shapes: Shapes, read: ReadTensor, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read every tensor through `read` and put the model together on `device`."""

    def take(part: str, layer: int = -1) -> Tensor:
        return read(part, layer).to(device=device, dtype=dtype)

    def joined(parts: tuple[str, ...], layer: int) -> Tensor:
        return torch.cat([take(part, layer) for part in parts])

    def layer(i: int) -> LayerWeights:
        return LayerWeights(
            attention_norm=take("attention_norm", i),
            qkv=joined(("q", "k", "v"), i),
            qkv_bias=joined(("q_bias", "k_bias", "v_bias"), i) if shapes.qkv_bias else None,
            q_norm=take("q_norm", i) if shapes.qk_norm else None,
            k_norm=take("k_norm", i) if shapes.qk_norm else None,
            out=take("out", i),
            mlp_norm=take("mlp_norm", i),
            gate_up=joined(("gate", "up"), i),
            down=take("down", i),
        )

    embedding = take("embedding")
    return Weights(
        embedding=embedding,
        norm=take("norm"),
        head=embedding if shapes.tied else take("head"),
        layers=[layer(i) for i in range(shapes.layers)],
    )
