"""Weights from a GGUF file, dequantised.

llama.cpp stores q and k of the llama architecture with the two halves of each head interleaved, because
it rotates neighbours where everybody else rotates halves; here they are put back. Qwen's are not touched
(conversion/llama.py and convert_hf_to_gguf.py of llama.cpp).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from services.executor.gguf_tensors import GgufTensors
from services.executor.shapes import Shapes, from_gguf
from services.executor.shards import Cut, ShardOf, all_of_it
from services.executor.weights import Weights, assemble
from shared.errors import SetupError

_MODEL = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "out": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_INTERLEAVED = ("llama", "mistral")


def load_gguf(
    path: Path, dtype: torch.dtype, device: torch.device, shard_of: ShardOf = all_of_it
) -> tuple[Shapes, Weights]:
    """Shapes and weights of a part of the model in `path`. One whole tensor is in memory
    at a time, dequantised. Raises SetupError for an architecture or tensor that is not supported."""
    tensors = GgufTensors(path)
    shapes = _shapes(path, tensors)
    known = {*_MODEL.values(), _ROPE_FACTORS}
    known |= {f"blk.{layer}.{name}" for layer in range(shapes.layers) for name in _LAYER.values()}
    unknown = sorted(tensors.names - known)
    if unknown:
        raise SetupError(f"{path} has tensors that this executor does not compute: {', '.join(unknown[:3])}")

    def read(part: str, layer: int, cut: Cut | None) -> Tensor:
        values = whole(part, layer)
        return values if cut is None else cut.of(values)

    def whole(part: str, layer: int) -> Tensor:
        values = tensors.read(_MODEL[part] if layer < 0 else f"blk.{layer}.{_LAYER[part]}")
        if shapes.architecture in _INTERLEAVED and part in ("q", "k"):
            return _halves(values, shapes.heads if part == "q" else shapes.kv_heads)
        return values

    shard = shard_of(shapes)
    return shard.shapes, assemble(shard, read, dtype, device)


def _shapes(path: Path, tensors: GgufTensors) -> Shapes:
    try:
        shapes = from_gguf(tensors.metadata, tensors.names)
    except KeyError as error:
        raise SetupError(f"{path} lacks the metadata {error}; pull the model again") from error
    if _ROPE_FACTORS not in tensors.names:
        return shapes
    return dataclasses.replace(shapes, rope_factors=tuple(tensors.read(_ROPE_FACTORS).tolist()))


def _halves(values: Tensor, heads: int) -> Tensor:
    """Rows of each head from (pair, half) order back to (half, pair) order."""
    rows, width = values.shape
    return values.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
