"""Reads the shapes of a model (one dataclass) from GGUF metadata or from a Hugging Face config.json.

Supported: the Llama family with Llama 2 and 3, SmolLM2, Mistral, Qwen2 (bias on q, k, v) and Qwen3 (norm on
each q and k head); with a mixture of experts, Mixtral and Qwen3-MoE. Unknown keys are refused by name
(known_keys.py), so a model that loads is computed as its authors intended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.executor.checkpoint.known_keys import check_gguf, check_hf, rope_type
from shared.errors import SetupError
from shared.vocab.files import unreadable

_COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context")
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
    first: int = field(default=0, repr=False)  # the first expert on this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The numbers of a model. `rope_factors` divides each rotation frequency; empty means no scaling."""

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
    experts: ExpertShapes | None = field(default=None, repr=False)  # fingerprint() adds its repr

    def sparse(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def inverse_frequencies(self) -> list[float]:
        """Radians per position of each rotated pair: `theta^(-2i/head_dim) / factor_i`."""
        plain = (self.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2))
        factors = self.rope_factors or (1.0,) * (self.head_dim // 2)
        return [each / factor for each, factor in zip(plain, factors, strict=True)]


def refuse(what: str, kinds: Sequence[str] = SUPPORTED) -> SetupError:
    """The error for an unsupported model."""
    return SetupError(f"{what} is not supported; supported are models of the kinds {', '.join(kinds)}")


# The defaults of transformers for absent keys, where they differ by kind.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
                "rope_theta": 1e6},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096,
              "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096,
              "max_window_layers": 28, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "max_position_embeddings": 32_768, "sliding_window": 4096},
}  # fmt: skip


def read_shapes(folder: Path) -> Shapes:
    """The shapes of a Hugging Face folder. Raises SetupError if config.json is absent or damaged, or the
    model is not supported."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
        return from_hf(config)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SetupError(f"{folder} has no config.json: it is not a Hugging Face model folder") from error
    except KeyError as error:
        raise SetupError(f"{file} lacks {error}; fetch the model again") from error
    except SetupError as error:
        raise SetupError(f"{folder}: {error.message}") from error
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise unreadable(file, "a model's configuration", error) from error


def from_hf(config: Mapping[str, Any]) -> Shapes:
    """Shapes from a Hugging Face config.json. Raises SetupError for an unsupported model; KeyError,
    TypeError, ValueError or ArithmeticError for a damaged file."""
    kind = str(config.get("model_type", "(none)"))
    if kind not in SUPPORTED:
        raise refuse(f"model type {kind!r}")
    check_hf(config, kind)
    config = {**_DEFAULTS[kind], **config}
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    rope: Mapping[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return _plausible(Shapes(
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
        sliding_window=_hf_window(kind, config),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=_hf_experts(kind, config),
    ))  # fmt: skip


def _plausible(shapes: Shapes) -> Shapes:
    """`shapes`. Raises ValueError for impossible numbers."""
    counts = {name: getattr(shapes, name) for name in _COUNTS}
    if min(counts.values()) <= 0 or shapes.heads % shapes.kv_heads or shapes.head_dim % 2:
        raise ValueError(f"no model has these numbers: {counts}")
    return shapes


def _hf_window(kind: str, config: Mapping[str, Any]) -> int:
    """The attention window in tokens of the layers with a window, 0 without any. Up to that many tokens
    layers with and without a window compute the same."""
    kinds = {*(config.get("layer_types") or ())}
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise refuse(f"attention of the types {sorted(kinds)}")
    window = int(config.get("sliding_window") or 0)
    if kind.startswith("qwen") and not config.get("use_sliding_window"):
        window = 0
    if "sliding_attention" in kinds and not window:
        raise refuse("sliding attention (layer_types) without a sliding_window")
    if kind not in ("qwen2", "qwen3"):
        return window
    if kinds:
        return window if "sliding_attention" in kinds else 0
    return window if int(config["max_window_layers"]) < int(config["num_hidden_layers"]) else 0


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
    kind = rope_type(rope)
    if kind == "default":
        return ()
    factor = float(rope["factor"])
    if kind == "linear":
        return (factor,) * (head_dim // 2)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    return tuple(_llama3_factor(2 * math.pi / each, factor, (low, high), original) for each in plain)


def _llama3_factor(wavelength: float, factor: float, bounds: tuple[float, float], original: float) -> float:
    """Llama 3.1: short waves stay, long waves slow down by `factor`, waves between are interpolated."""
    low, high = bounds
    smooth = (original / wavelength - low) / (high - low)
    kept = min(max(smooth, 0.0), 1.0)
    return 1.0 / ((1.0 - kept) / factor + kept)


def from_gguf(metadata: Mapping[str, Any], tensors: Collection[str]) -> Shapes:
    """Shapes from GGUF metadata (keys: the GGUF specification) and the set of tensor names. Raises SetupError
    for an unsupported model; KeyError, TypeError or ValueError for damaged metadata. The loader (gguf.py)
    reads factors that differ by frequency from the tensor `rope_freqs.weight`."""
    kind = str(metadata.get("general.architecture", "(none)"))
    if kind not in IN_GGUF:
        raise refuse(f"GGUF architecture {kind!r}", IN_GGUF)
    check_gguf(metadata, kind)
    scaling = metadata.get(f"{kind}.rope.scaling.type", "linear")
    if scaling not in ("none", "linear"):
        raise refuse(f"rope scaling {scaling!r}", IN_GGUF)
    heads = int(metadata[f"{kind}.attention.head_count"])
    hidden = int(metadata[f"{kind}.embedding_length"])
    head_dim = int(metadata.get(f"{kind}.attention.key_length", hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(metadata.get(f"{kind}.{key}", head_dim)) != head_dim:
            raise refuse(f"{key} {metadata[f'{kind}.{key}']} with heads of {head_dim}", IN_GGUF)
    factor = float(metadata.get(f"{kind}.rope.scaling.factor", 0.0)) if scaling == "linear" else 0.0
    return _plausible(Shapes(
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
        rope_factors=() if factor in (0.0, 1.0) else (factor,) * (head_dim // 2),
        max_context=int(metadata[f"{kind}.context_length"]),
        sliding_window=int(metadata.get(f"{kind}.attention.sliding_window", 0)),
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    ))  # fmt: skip
