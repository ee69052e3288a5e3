"""The families of models: what distinguishes the checkpoints of each from Llama's. Engines do not know them.

A family is one entry here. What it computes is in model/description.py: an entry's `options` are fields of
Shapes, and what it `computes` fields of Options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.executor.model.description import ALL_HEADS, CLAMPED, GELU, LAYER_NORM, SILU, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The tensors of a router, of the experts, and of an expert's gate, up and down; the key of config.json
    with the width of an expert's MLP."""

    router: str
    experts: str
    matrices: tuple[str, str, str]
    width: str
    stacked: bool = False  # all experts are one tensor, `[experts, in, out]`; rows of gate and up alternate


def _nothing(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


_BOTH: Mapping[str, Any] = {"qkv_bias": True, "out_bias": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`defaults`: what transformers assumes for absent keys of config.json, where it is not what Llama has.
    `reads`: keys, read or harmless, that this family has and some others do not. `options`: fields of Shapes.
    `computes`: fields of Options, of config.json with the defaults. `biases`: fields of Shapes of a key that
    is true. `fixed`: keys that have one value. `tensors`: names in a layer that Llama does not have, by part;
    or by weight, whose parts are then one tensor."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    computes: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _nothing
    biases: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"attention_bias": _BOTH})
    fixed: Mapping[str, object] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertNames | None = None
    architecture: str = ""  # as `architectures` names it, in small letters, if it is not the model type
    eps: str = "rms_norm_eps"  # the key of the norms' epsilon
    act: str = "hidden_act"  # the key of the activation
    acts: Mapping[str, str] = field(default_factory=lambda: {"silu": SILU})  # by its name there
    windows: bool = True  # False: a sliding window is never computed
    full_each: int = 0  # each so many-th layer has no window; 0: all have one
    local_rope: bool = False  # what scales rotations is for layers without a window
    window_switch: bool = False  # a sliding window needs use_sliding_window
    in_gguf: bool = False
    gguf: str = ""  # the architecture in GGUF files, if it is not the model type; norms have the offset there
    interleaved: bool = False  # GGUF files have q and k for a rotation of neighbours


def _mlp_bias(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"mlp_bias": bool(config.get("mlp_bias"))}


def _gemma(config: Mapping[str, Any]) -> Mapping[str, Any]:
    by = float(config["query_pre_attn_scalar"])
    return {
        "attention_scale": 0.0 if by == config["head_dim"] else by**-0.5,
        "attention_cap": _number(config, "attn_logit_softcapping", 0.0),
        "logit_cap": _number(config, "final_logit_softcapping", 0.0),
        "embedding_scale": float(config["hidden_size"]) ** 0.5,
        "post_norms": True,
        "norm_offset": 1.0,
    }


def _granite(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **_mlp_bias(config),
        "attention_scale": _number(config, "attention_multiplier", 1.0),
        "embedding_scale": _number(config, "embedding_multiplier", 1.0),
        "residual_scale": _number(config, "residual_multiplier", 1.0),
        "logit_scale": 1.0 / _number(config, "logits_scaling", 1.0),
    }


def _only_post_norms(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"pre_norms": False, "post_norms": True}


def _olmo(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_only_post_norms(config), "qk_norm_kind": ALL_HEADS}


def _exaone4(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **_only_post_norms(config),
        "unrotated": _without_window(config) if config["sliding_window"] else (),
    }


def _starcoder2(config: Mapping[str, Any]) -> Mapping[str, Any]:
    biased = bool(config["use_bias"])
    return {"layer_norm": True, "norm_bias": True, "gated": False, "mlp_bias": biased}


def _stablelm(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"layer_norm": True, "norm_bias": True, "parallel": bool(config.get("use_parallel_residual"))}


def _cohere(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "layer_norm": True, "parallel": True, "neighbours": True,
        "logit_scale": _number(config, "logit_scale", 1.0), "qk_norm_kind": LAYER_NORM,
    }  # fmt: skip


def _cohere2(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_cohere(config), "qk_norm_kind": "", "unrotated": _without_window(config)}


def _glm4(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"post_norms": True, "neighbours": True}


def _glm4_moe(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "routing": Routing(
            sigmoid=True,
            groups=int(config["n_group"]),
            top_groups=int(config["topk_group"]),
            scale=_number(config, "routed_scaling_factor", 1.0),
        ),
        "shared_width": int(config["n_shared_experts"]) * int(config["moe_intermediate_size"]),
    }


def _gpt_oss(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "sinks": True, "act": CLAMPED, "experts_bias": True, "routing": Routing(chosen_softmax=True),
    }  # fmt: skip


def _number(config: Mapping[str, Any], key: str, absent: float) -> float:
    """A positive number; without it `absent`. Raises ValueError for another one."""
    value = config.get(key)
    if value is None:
        return absent
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}, and no positive number")
    return float(value)


def layer_kinds(config: Mapping[str, Any], full_each: int) -> tuple[bool, ...]:
    """Whether each layer has a window: as `layer_types` names them, else all but each so many-th, by
    `sliding_window_pattern` (a number, or LLLG), or `full_each`. Raises ValueError for another pattern."""
    if kinds := config.get("layer_types"):
        return tuple(kind == "sliding_attention" for kind in kinds)
    each = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or full_each
    if isinstance(each, str) and each == "L" * (len(each) - 1) + "G":
        each = len(each)
    if not isinstance(each, int) or each < 1:
        raise ValueError(f"sliding_window_pattern is {each!r}")
    return tuple(bool((i + 1) % each) for i in range(int(config["num_hidden_layers"])))


def _without_window(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers that see the whole past: each fourth one if the config names none."""
    kinds = layer_kinds(config, 4)
    return tuple(i for i, windowed in enumerate(kinds) if not windowed)


_BIAS = frozenset(("attention_bias",))
_SPARSE = frozenset(("num_experts", "num_local_experts", "num_experts_per_tok"))
_QWEN: Mapping[str, Any] = {"max_position_embeddings": 32_768, "sliding_window": 4096}
_QWEN_DENSE: Mapping[str, Any] = {**_QWEN, "num_key_value_heads": 32, "max_window_layers": 28}

_PATTERN = frozenset(("sliding_window_pattern", "_sliding_window_pattern", "cache_implementation"))
_GELU = {"gelu_pytorch_tanh": GELU}
_GEMMA: Mapping[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}  # fmt: skip
_GEMMA_KEYS = frozenset((
    "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "cache_implementation",
))  # fmt: skip
_GEMMA_FIXED: Mapping[str, object] = {
    "use_bidirectional_attention": False, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA_NORMS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
_POST_NORMS = {each: name for each, name in _GEMMA_NORMS.items() if each != "mlp_norm"}
_NORM_BIASES = {
    "attention_norm_bias": "input_layernorm.bias", "mlp_norm_bias": "post_attention_layernorm.bias",
}  # fmt: skip
_COHERE: Mapping[str, Any] = {
    "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}  # fmt: skip
_GLM: Mapping[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 0.00000015625, "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        reads=_BIAS | {"mlp_bias"}, computes=_mlp_bias, windows=False, in_gguf=True, interleaved=True,
    ),
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
    "gemma2": Family(
        defaults={
            **_GEMMA, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        reads=_BIAS | _GEMMA_KEYS, computes=_gemma, tensors=_GEMMA_NORMS, act="hidden_activation",
        acts=_GELU, full_each=2, fixed=_GEMMA_FIXED,
    ),
    "gemma3_text": Family(
        defaults={
            **_GEMMA, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
            "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6,
        },
        reads=(_BIAS | _GEMMA_KEYS | _PATTERN | {"rope_local_base_freq"}) - {"attn_logit_softcapping"},
        options={"qk_norm": True}, computes=_gemma, tensors=_GEMMA_NORMS, architecture="gemma3forcausallm",
        act="hidden_activation", acts=_GELU, full_each=6, local_rope=True, in_gguf=True, gguf="gemma3",
        fixed={**_GEMMA_FIXED, "attn_logit_softcapping": None},
    ),
    "gpt_oss": Family(
        defaults={
            "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5, "sliding_window": 128, "rope_theta": 150_000.0, "attention_bias": True,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        reads=_BIAS | _SPARSE | {"experts_per_token", "initial_context_length"},
        computes=_gpt_oss,
        fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        tensors={"sinks": "self_attn.sinks", "router_bias": "mlp.router.bias"},
        experts=ExpertNames(
            router="mlp.router", experts="mlp.experts", width="intermediate_size", stacked=True,
            matrices=("gate_up_proj", "gate_up_proj", "down_proj"),
        ),
        full_each=2,
    ),
    "granite": Family(
        reads=_BIAS | {
            "mlp_bias", "attention_multiplier", "embedding_multiplier", "residual_multiplier",
            "logits_scaling",
        },
        computes=_granite, windows=False,
    ),
    "olmo2": Family(
        defaults={"rms_norm_eps": 1e-5}, reads=_BIAS, options={"qk_norm": True}, computes=_olmo,
        tensors=_POST_NORMS, windows=False,
    ),
    "olmo3": Family(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
        reads=_BIAS, options={"qk_norm": True}, computes=_olmo, tensors=_POST_NORMS, full_each=4,
        local_rope=True,
    ),
    "exaone4": Family(
        defaults={
            "rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        reads=_PATTERN, options={"qk_norm": True}, computes=_exaone4, tensors=_POST_NORMS, full_each=4,
    ),
    "starcoder2": Family(
        defaults={
            "num_key_value_heads": 2, "max_position_embeddings": 4096, "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "tie_word_embeddings": True,
        },
        reads=frozenset((
            "use_bias", "norm_epsilon", "residual_dropout", "embedding_dropout", "activation_function",
            "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
        )),
        computes=_starcoder2, biases={"use_bias": _BOTH}, eps="norm_epsilon", acts=_GELU,
        fixed={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
        tensors={
            **_NORM_BIASES, "up": "mlp.c_fc.weight", "up_bias": "mlp.c_fc.bias",
            "down": "mlp.c_proj.weight", "down_bias": "mlp.c_proj.bias",
        },
    ),
    "stablelm": Family(
        defaults={
            "num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        reads=frozenset((
            "layer_norm_eps", "partial_rotary_factor", "use_qkv_bias", "use_parallel_residual",
        )),
        computes=_stablelm, biases={"use_qkv_bias": {"qkv_bias": True}}, eps="layer_norm_eps",
        fixed={"qk_layernorm": False}, tensors=_NORM_BIASES, windows=False,
    ),
    "cohere": Family(
        defaults={**_COHERE, "rope_theta": 500_000.0},
        reads=_BIAS | {"layer_norm_eps", "logit_scale", "use_qk_norm"},
        computes=_cohere, biases={"attention_bias": _BOTH, "use_qk_norm": {"qk_norm": True}},
        eps="layer_norm_eps", windows=False,
    ),
    "cohere2": Family(
        defaults={**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
        reads=_BIAS | _PATTERN | {
            "layer_norm_eps", "logit_scale", "use_embedding_sharing", "use_parallel_embedding",
        },
        computes=_cohere2, eps="layer_norm_eps", full_each=4,
        fixed={
            "use_qk_norm": False, "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
            "use_gated_activation": True, "use_parallel_block": True, "layer_switch": 4,
            "order_of_interleaved_layers": "local_attn_first",
        },
    ),
    "glm": Family(
        defaults=_GLM, reads=_BIAS | {"partial_rotary_factor"}, computes=lambda config: {"neighbours": True},
        biases={"attention_bias": {"qkv_bias": True}}, tensors={"gate_up": "mlp.gate_up_proj.weight"},
        windows=False,
    ),
    "glm4": Family(
        defaults=_GLM, reads=_BIAS | {"partial_rotary_factor"}, computes=_glm4,
        biases={"attention_bias": {"qkv_bias": True}},
        tensors={
            "gate_up": "mlp.gate_up_proj.weight",
            "attention_post_norm": "post_self_attn_layernorm.weight",
            "mlp_post_norm": "post_mlp_layernorm.weight",
        },
        windows=False,
    ),
    "glm4_moe": Family(
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_routed_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
        },
        reads=_BIAS | _SPARSE | {
            "partial_rotary_factor", "moe_intermediate_size", "norm_topk_prob", "n_group", "topk_group",
            "n_shared_experts", "n_routed_experts", "routed_scaling_factor", "first_k_dense_replace",
            "use_qk_norm", "num_nextn_predict_layers", "num_mtp_layers",
        },
        computes=_glm4_moe,
        biases={"attention_bias": {"qkv_bias": True}, "use_qk_norm": {"qk_norm": True}},
        tensors={
            "router_bias": "mlp.gate.e_score_correction_bias",
            "shared_gate": "mlp.shared_experts.gate_proj.weight",
            "shared_up": "mlp.shared_experts.up_proj.weight",
            "shared_down": "mlp.shared_experts.down_proj.weight",
        },
        experts=ExpertNames(
            router="mlp.gate", experts="mlp.experts", matrices=("gate_proj", "up_proj", "down_proj"),
            width="moe_intermediate_size",
        ),
        windows=False,
    ),
}  # fmt: skip
