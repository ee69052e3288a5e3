"""The weights of a model as the forward pass wants them, from any file that can name its tensors.

Projections that read the same input are joined, so that a layer is four matrix products:

    qkv [(heads + 2 * kv_heads) * head_dim, hidden] · out · gate_up [2 * intermediate, hidden] · down

Those of experts are stacked: gate_up [experts, 2 * width, hidden], down [experts, hidden, width].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.executor.shards import Cut, Shard

# A part of a layer (or of the model, with layer -1) as [out, in], in halves-rotating order for q and k;
# with a cut, what that leaves of it. The parts of experts come as they are kept: "experts_gate_up" and
# "experts_down".
ReadTensor = Callable[[str, int, Cut | None], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are `[out, in]`, norms `[width]`. With a `router` `[experts, hidden]` it is sparse,
    and `gate_up` and `down` are those of all experts."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    router: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model. `head` is `embedding` itself where they are tied. The model that computes takes the
    layers out, so that plain matrices go as packed ones come."""

    embedding: Tensor  # [vocab, hidden]
    norm: Tensor
    head: Tensor  # [vocab, hidden], of one of several ranks its rows
    layers: list[LayerWeights]


def assemble(shard: Shard, read: ReadTensor, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read every tensor of a rank's part through `read` and put it together on `device`."""
    shapes = shard.shapes

    def take(part: str, layer: int = -1) -> Tensor:
        return read(part, layer, shard.cuts.get(part)).to(device=device, dtype=dtype)

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
            gate_up=take("experts_gate_up", i) if shapes.sparse(i) else joined(("gate", "up"), i),
            down=take("experts_down" if shapes.sparse(i) else "down", i),
            router=take("router", i) if shapes.sparse(i) else None,
        )

    embedding = take("embedding")
    if not shapes.tied:
        head = take("head")
    else:
        cut = shard.cuts.get("head")
        head = embedding if cut is None else embedding[cut.begin : cut.end]
    missing = shard.head_rows - len(head)
    return Weights(
        embedding=embedding,
        norm=take("norm"),
        head=F.pad(head, (0, 0, 0, missing)) if missing else head,
        layers=[layer(shard.first_layer + i) for i in range(shapes.layers)],
    )
