"""Small random models of each supported kind, made by transformers, and its own logits for them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import torch
import transformers  # its models are imported when one is made: ranks that make none need seconds less

from services.executor.engine import StepOutput

VOCAB = 131
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _qwen3_moe(**options: object) -> transformers.Qwen3MoeConfig:
    experts = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    return transformers.Qwen3MoeConfig(**_BASE, head_dim=24, **experts, **options)


_MAKE = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**_BASE, "num_key_value_heads": 4})
    ),
    "llama-9-3-tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **_BASE
            | {
                "hidden_size": 72,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "tie_word_embeddings": True,
            }
        )
    ),
    "llama3-rope": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_BASE, rope_parameters=_LLAMA3)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_BASE)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_BASE, head_dim=24)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**{**_BASE, "num_key_value_heads": 1}, sliding_window=256)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**_BASE, pad_token_id=0)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_BASE, num_local_experts=5, num_experts_per_tok=2)
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(_qwen3_moe(norm_topk_prob=True)),
    "qwen3-moe-mixed": lambda: (
        transformers.Qwen3MoeForCausalLM(  # a dense layer, and weights that do not add up to one
            _qwen3_moe(norm_topk_prob=False, mlp_only_layers=[1])
        )
    ),
}
KINDS = tuple(_MAKE)
_MAKE |= {  # further forms of rotation and biases, for tests of them
    "llama-bias": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_BASE, attention_bias=True)
    ),
    "llama-yarn": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_BASE, rope_parameters=_YARN)
    ),
    "phi3-longrope": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **_BASE,
            pad_token_id=0,
            partial_rotary_factor=0.75,
            original_max_position_embeddings=32,
            rope_parameters=dict(_LONGROPE),
        )
    ),
}
MORE_KINDS = tuple(_MAKE)[len(KINDS) :]
WINDOW = 20  # of models with one
_WINDOWED = {"sliding_window": WINDOW, "num_hidden_layers": 4, "attn_implementation": "eager"}
_EAGER = {"attn_implementation": "eager"}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, **_WINDOWED}
_TYPES = ["sliding_attention", "full_attention"] * 2


def _causal(name: str, **options: object) -> Callable[[], transformers.PreTrainedModel]:
    """Makes `<name>ForCausalLM` of a `<name>Config` with these options."""
    config = name.replace("ForCausalLM", "")
    config = {"Gemma3": "Gemma3Text"}.get(config, config)

    def make() -> transformers.PreTrainedModel:
        given = getattr(transformers, f"{config}Config")(**{**_BASE, **_EAGER, **options})
        return getattr(transformers, f"{name}ForCausalLM")(given)

    return make


_OPTIONED = {
    "mistral-window": _causal("Mistral", **_WINDOWED),
    "qwen3-window": _causal(
        "Qwen3", head_dim=16, use_sliding_window=True, max_window_layers=2, **_WINDOWED
    ),
    "llama-mlp-bias": _causal("Llama", mlp_bias=True),
    "gemma2": _causal("Gemma2", **_GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma3": _causal(
        "Gemma3", **_GEMMA, layer_types=_TYPES,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma3-six": _causal(  # as GGUF files have it
        "Gemma3", **{**_GEMMA, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
        tie_word_embeddings=True,
    ),
    "gpt-oss": _causal(
        "GptOss", **_WINDOWED, head_dim=16, num_local_experts=5, num_experts_per_tok=2,
        rope_parameters={**_YARN, "truncate": False},
    ),
    "granite": _causal(
        "Granite", embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.4,
        logits_scaling=2.0, mlp_bias=True, attention_bias=True,
    ),
    "olmo2": _causal("Olmo2"),
    "olmo3": _causal(
        "Olmo3",
        layer_types=_TYPES,
        **_WINDOWED,
        rope_parameters={"full_attention": _YARN, "sliding_attention": {"rope_type": "default"}},
    ),
    "exaone4": _causal("Exaone4", head_dim=16, layer_types=_TYPES, **_WINDOWED),
    "starcoder2": _causal("Starcoder2", **_WINDOWED),
    "stablelm": _causal("StableLm", use_qkv_bias=True, partial_rotary_factor=0.5),
    "stablelm-parallel": _causal("StableLm", use_parallel_residual=True, partial_rotary_factor=0.25),
    "cohere": _causal("Cohere", use_qk_norm=True, logit_scale=0.3, attention_bias=True),
    "cohere2": _causal("Cohere2", layer_types=_TYPES, logit_scale=0.3, **_WINDOWED),
    "glm": _causal("Glm", head_dim=16, pad_token_id=0),
    "glm4": _causal("Glm4", head_dim=16, pad_token_id=0),
    "glm4-moe": _causal(
        "Glm4Moe", head_dim=16, pad_token_id=0, moe_intermediate_size=40, n_routed_experts=12, n_group=3,
        topk_group=2, num_experts_per_tok=3, n_shared_experts=2, routed_scaling_factor=1.5,
        use_qk_norm=True, first_k_dense_replace=1,
    ),
}  # fmt: skip
OPTIONED = tuple(_OPTIONED)  # models that compute something beside Llama's
_MAKE |= _OPTIONED
DENSE = tuple(kind for kind in KINDS if kind not in ("mixtral", "qwen3-moe", "qwen3-moe-mixed"))


@functools.cache
def tiny_model(kind: str) -> transformers.PreTrainedModel:
    """The model of a kind, float32; every parameter random, norms around one."""
    torch.manual_seed(11)
    model = _MAKE[kind]().float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model


def save_tiny(kind: str, folder: Path, **options: object) -> Path:
    """The model of a kind as a Hugging Face folder."""
    tiny_model(kind).save_pretrained(folder, **options)
    return folder


def reference_logprobs(kind: str, tokens: list[int]) -> torch.Tensor:
    """What transformers computes: `[tokens, vocab]`, the log probabilities after each token, float64."""
    with torch.no_grad():
        logits = tiny_model(kind)(torch.tensor([tokens])).logits[0]
    return logits.double().log_softmax(-1)


def random_tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


def full_logprobs(output: StepOutput) -> torch.Tensor:
    """`[samples, vocab]` of a step whose rows asked for every alternative."""
    rows = len(output.ids)
    table = torch.empty(rows, VOCAB, dtype=torch.float64)
    ids = torch.tensor(output.top_ids).view(rows, VOCAB)
    return table.scatter_(1, ids, torch.tensor(output.top_logprobs).double().view(rows, VOCAB))
