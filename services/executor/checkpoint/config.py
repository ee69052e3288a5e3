"""The shape of a model: one dataclass, read from GGUF metadata or from a Hugging Face config.json.

Supported: the Llama family as Llama 2 and 3, SmolLM2, Mistral, Qwen2 (bias on q, k, v) and Qwen3 (norm on
each q and k head); with a mixture of experts, Mixtral and Qwen3-MoE. What these loaders do not know they
refuse, naming it: a model that loads is computed as its authors meant.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.errors import SetupError

SUPPORTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
IN_GGUF = ("llama", "mistral", "qwen2", "qwen3")  # experts come from safetensors only


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShapes:
    """A mixture of experts in place of the MLP, in all layers but `dense_layers`."""

    count: int
    per_token: int
    width: int  # of an expert's MLP
    renormalise: bool  # the weights of a token's experts add up to one
    dense_layers: tuple[int, ...] = ()
    first: int = field(default=0, repr=False)  # of those held here, as many as the weights have


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """A model as numbers. `rope_factors` divides each rotation frequency; empty means no scaling."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope_theta: float
    rope_factors: tuple[float, ...] = ()
    max_context: int = 2048
    sliding_window: int = 0  # 0 = every token sees its whole past
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: ExpertShapes | None = field(default=None, repr=False)  # fingerprints hold the repr, see there

    def sparse(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def inverse_frequencies(self) -> list[float]:
        """Radians per position of each rotated pair: `theta^(-2i/head_dim) / factor_i`."""
        plain = (self.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2))
        factors = self.rope_factors or (1.0,) * (self.head_dim // 2)
        return [each / factor for each, factor in zip(plain, factors, strict=True)]


def refuse(what: str, kinds: Sequence[str] = SUPPORTED) -> SetupError:
    """The error for a model that this executor does not compute."""
    return SetupError(f"{what} is not supported; supported are models of the kinds {', '.join(kinds)}")


def from_hf(config: Mapping[str, Any]) -> Shapes:
    """Shapes from a Hugging Face config.json. Raises SetupError for what is not supported."""
    kind = str(config.get("model_type", "(none)"))
    if kind not in SUPPORTED:
        raise refuse(f"model type {kind!r}")
    if config.get("hidden_act", "silu") != "silu":
        raise refuse(f"activation {config['hidden_act']!r}")
    if config.get("mlp_bias") or config.get("attention_bias"):
        raise refuse("a bias on the attention output or the MLP")
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    rope: Mapping[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    windowed = kind in ("mistral", "mixtral") or bool(config.get("use_sliding_window"))
    return Shapes(
        architecture=kind,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_factors=_hf_rope_factors(rope, theta, head_dim),
        max_context=int(config.get("max_position_embeddings", 2048)),
        sliding_window=int(config.get("sliding_window") or 0) if windowed else 0,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=_hf_experts(kind, config),
    )


def _hf_experts(kind: str, config: Mapping[str, Any]) -> ExpertShapes | None:
    if kind not in ("mixtral", "qwen3_moe"):
        return None
    count = int(config["num_local_experts"] if "num_local_experts" in config else config["num_experts"])
    per_token = int(config["num_experts_per_tok"])
    if kind == "mixtral":
        width = int(config["intermediate_size"])
        return ExpertShapes(count=count, per_token=per_token, width=width, renormalise=True)
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
    return ExpertShapes(
        count=count,
        per_token=per_token,
        width=int(config["moe_intermediate_size"]),
        renormalise=bool(config.get("norm_topk_prob", False)),
        dense_layers=tuple(
            layer for layer in range(int(config["num_hidden_layers"])) if layer in dense or (layer + 1) % step
        ),
    )


def _hf_rope_factors(rope: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise refuse("partial rotary embedding")
    if kind == "default":
        return ()
    factor = float(rope["factor"])
    if kind == "linear":
        return (factor,) * (head_dim // 2)
    if kind != "llama3":
        raise refuse(f"rope scaling {kind!r}")
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    return tuple(_llama3_factor(2 * math.pi / each, factor, (low, high), original) for each in plain)


def _llama3_factor(wavelength: float, factor: float, bounds: tuple[float, float], original: float) -> float:
    """Llama 3.1: short waves stay, long waves slow down by `factor`, those between are interpolated."""
    low, high = bounds
    smooth = (original / wavelength - low) / (high - low)
    kept = min(max(smooth, 0.0), 1.0)
    return 1.0 / ((1.0 - kept) / factor + kept)


def from_gguf(metadata: Mapping[str, Any], tensors: Collection[str]) -> Shapes:
    """Shapes from GGUF metadata and the set of tensor names. Raises SetupError for what is not supported.

    Keys as in the GGUF specification. Scaled frequencies come as the tensor `rope_freqs.weight`, which the
    weights loader reads into `rope_factors`.
    """
    kind = str(metadata.get("general.architecture", "(none)"))
    if kind not in IN_GGUF:
        raise refuse(f"GGUF architecture {kind!r}", IN_GGUF)
    if metadata.get(f"{kind}.rope.scaling.type", "none") not in ("none", "linear"):
        raise refuse(f"rope scaling {metadata[f'{kind}.rope.scaling.type']!r}")
    if f"{kind}.expert_count" in metadata:
        raise refuse("a mixture of experts in a GGUF file", IN_GGUF)
    heads = int(metadata[f"{kind}.attention.head_count"])
    hidden = int(metadata[f"{kind}.embedding_length"])
    head_dim = int(metadata.get(f"{kind}.attention.key_length", hidden // heads))
    factor = float(metadata.get(f"{kind}.rope.scaling.factor", 1.0))
    return Shapes(
        architecture=kind,
        layers=int(metadata[f"{kind}.block_count"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(metadata.get(f"{kind}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate=int(metadata[f"{kind}.feed_forward_length"]),
        vocab=len(metadata["tokenizer.ggml.tokens"]),
        norm_eps=float(metadata[f"{kind}.attention.layer_norm_rms_epsilon"]),
        rope_theta=float(metadata.get(f"{kind}.rope.freq_base", 10000.0)),
        rope_factors=() if factor == 1.0 else (factor,) * (head_dim // 2),
        max_context=int(metadata[f"{kind}.context_length"]),
        sliding_window=int(metadata.get(f"{kind}.attention.sliding_window", 0)),
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
