"""The families of models: what distinguishes the checkpoints of each from Llama's. Engines do not know them.

A family that computes nothing new is one entry here. What it computes is in model/description.py, and an
entry's `options` are fields of Shapes. Keys that every family has are in known_keys.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The tensors of a router, of the experts, and of an expert's gate, up and down; the key of config.json
    with the width of an expert's MLP."""

    router: str
    experts: str
    matrices: tuple[str, str, str]
    width: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`defaults`: what transformers assumes for absent keys of config.json, where it is not what Llama has.
    `reads`: keys, read or harmless, that this family has and some others do not. `options`: fields of Shapes.
    `tensors`: names in a layer that Llama does not have, by part; or by weight, whose parts are then one
    tensor."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertNames | None = None
    window_switch: bool = False  # a sliding window needs use_sliding_window
    in_gguf: bool = False
    interleaved: bool = False  # GGUF files have q and k for a rotation of neighbours


_BIAS = frozenset(("attention_bias",))
_SPARSE = frozenset(("num_experts", "num_local_experts", "num_experts_per_tok"))
_QWEN: Mapping[str, Any] = {"max_position_embeddings": 32_768, "sliding_window": 4096}
_QWEN_DENSE: Mapping[str, Any] = {**_QWEN, "num_key_value_heads": 32, "max_window_layers": 28}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(reads=_BIAS, in_gguf=True, interleaved=True),
    "mistral": Family(
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        in_gguf=True,
        interleaved=True,
    ),
    "mixtral": Family(
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "norm_topk_prob": True,
        },
        reads=_SPARSE,
        experts=ExpertNames(
            router="block_sparse_moe.gate", experts="block_sparse_moe.experts", matrices=("w1", "w3", "w2"),
            width="intermediate_size",
        ),
    ),
    "phi3": Family(
        defaults={
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        },
        reads=frozenset((
            "original_max_position_embeddings", "partial_rotary_factor", "auto_map",  # of its first code
        )),
        tensors={"qkv": "self_attn.qkv_proj.weight", "gate_up": "mlp.gate_up_proj.weight"},
    ),
    "qwen2": Family(
        defaults=_QWEN_DENSE, options={"qkv_bias": True}, window_switch=True, in_gguf=True,
    ),
    "qwen3": Family(
        defaults={**_QWEN_DENSE, "head_dim": 128}, reads=_BIAS, options={"qk_norm": True},
        window_switch=True, in_gguf=True,
    ),
    "qwen3_moe": Family(
        defaults={**_QWEN, "num_key_value_heads": 4},
        reads=_SPARSE | _BIAS | {
            "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
        },
        options={"qk_norm": True},
        experts=ExpertNames(
            router="mlp.gate", experts="mlp.experts", matrices=("gate_proj", "up_proj", "down_proj"),
            width="moe_intermediate_size",
        ),
        window_switch=True,
    ),
}  # fmt: skip
