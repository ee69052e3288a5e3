"""A checkpoint with an unknown key is refused by its name; published ones are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.executor.tiny_gguf import write_gguf

from services.executor.checkpoint.config import SUPPORTED, from_hf
from services.executor.checkpoint.families import FAMILIES
from services.executor.quantised.gguf import load_gguf
from shared.errors import SetupError
from shared.vocab.gguf import read_metadata

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
SAVED = {
    "_name_or_path": "x",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1}
QWEN = {
    "attention_dropout": 0.0,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
}
MOE = {"num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001}
# The keys of published config.json files, with small sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b-hf": {
        **LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5,
        "rope_scaling": None, "pad_token_id": 0, "max_length": 4096, "do_sample": True, "temperature": 0.9,
        "top_p": 0.6,
    },
    "Llama-3.2-1B-Instruct": {
        **LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "SmolLM2-135M-Instruct": {
        **LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "is_llama_config": True,
        "pad_token_id": 2, "rms_norm_eps": 1e-5, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Mistral-7B-Instruct-v0.3": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
    },
    "Mixtral-8x7B-v0.1": {
        **MOE, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0,
        "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
    },
    "Qwen2.5-0.5B-Instruct": {
        **QWEN, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        **QWEN, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "sliding_window": 4096, "use_mrope": False,
    },
    "Qwen3-0.6B": {
        **QWEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
        "head_dim": 128, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    },
    "Qwen3-30B-A3B": {
        **QWEN, **MOE, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "mlp_only_layers": [],
        "moe_intermediate_size": 48, "norm_topk_prob": True, "num_experts": 8, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1000000.0,
    },
    "gemma-3-1b-it": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
        "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
        "head_dim": 16, "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 2,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True,
        "experts_per_token": 4, "head_dim": 16, "initial_context_length": 4096, "num_local_experts": 8,
        "layer_types": ["sliding_attention", "full_attention"], "num_experts_per_tok": 4,
        "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128,
        "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 1.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
    },
    "granite-3.3-2b-instruct": {
        "model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_bias": False,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "mlp_bias": False, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 10000000.0,
    },
    "Olmo-3-7B-Instruct": {
        "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "layer_types": ["sliding_attention", "full_attention"],
        "rms_norm_eps": 1e-6, "rope_theta": 500000, "sliding_window": 4096, "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 512, "rope_type": "yarn",
        },
    },
    "EXAONE-4.0-32B": {
        "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0,
        "head_dim": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "rope_scaling": LLAMA3, "rope_theta": 1000000,
        "sliding_window": 4096, "sliding_window_pattern": "LLLG",
    },
    "command-r7b": {
        "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "attention_bias": False,
        "layer_norm_eps": 1e-5, "layer_types": ["sliding_attention", "full_attention"],
        "logit_scale": 0.25, "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_keys_of_published_models_are_taken(name: str) -> None:
    shapes = from_hf({**SIZES, **SAVED, **PUBLISHED[name]})
    assert (shapes.max_context, shapes.sliding_window) == (4096, 0)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_keys_written_by_transformers_are_accepted(kind: str) -> None:
    given: dict[str, Any] = {} if FAMILIES[kind].full_each else {"sliding_window": None}
    given |= {"head_dim": 128} if kind == "glm4_moe" else {}  # 4,096 over 96 heads is no whole number
    from_hf(transformers.AutoConfig.for_model(kind, **given).to_dict())


@pytest.mark.parametrize("kind", SUPPORTED)
def test_absent_keys_mean_what_they_mean_to_transformers(kind: str) -> None:
    given = {"model_type": kind, "num_hidden_layers": 48, "hidden_size": 4096, "num_attention_heads": 32,
             "vocab_size": 9, "intermediate_size": 64}  # fmt: skip
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2}
    moe |= {"moe_intermediate_size": 8} if kind == "qwen3_moe" else {}
    given |= moe if kind in ("mixtral", "qwen3_moe", "gpt_oss") else {}
    for more in ({}, {"use_sliding_window": True}) if "qwen" in kind else ({},):
        shapes, theirs = from_hf({**given, **more}), transformers.AutoConfig.for_model(**given, **more)
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert (shapes.kv_heads, shapes.head_dim) == (theirs.num_key_value_heads, head_dim)
        rope = theirs.rope_parameters
        assert (shapes.norm_eps, shapes.rope_theta) == (
            getattr(theirs, FAMILIES[kind].eps),
            rope.get("full_attention", rope)["rope_theta"],
        )
        if shapes.options.local_rope is not None:
            assert shapes.options.local_rope == (rope["sliding_attention"]["rope_theta"], ())
        assert (shapes.max_context, shapes.tied) == (
            theirs.max_position_embeddings,
            theirs.tie_word_embeddings,
        )
        window = (getattr(theirs, "sliding_window", None) or 0) * FAMILIES[kind].windows
        if kinds := getattr(theirs, "layer_types", None) if FAMILIES[kind].full_each else None:
            assert shapes.options.windows == tuple(window * ("sliding" in each) for each in kinds)
        else:
            assert shapes.sliding_window == window


@pytest.mark.parametrize(
    ("model", "change", "reason"),
    [
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma-3-1b-it", {"hidden_activation": "gelu"}, "activation 'gelu'"),
        ("gemma-3-1b-it", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "without a"),
        ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping = 50\.0"),
        ("Olmo-3-7B-Instruct", {"rope_parameters": {"rope_theta": 9.0}}, "rope_parameters for all layers"),
        ("gpt-oss-20b", {"swiglu_limit": 5.0}, r"swiglu_limit = 5\.0"),
        ("gpt-oss-20b", {"layer_types": ["sliding_attention", "chunked_attention"]}, "chunked_attention"),
        ("granite-3.3-2b-instruct", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
    ],
)
def test_an_option_that_is_not_computed_refuses_a_config(
    model: str, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SetupError, match=rf"{reason}.*not supported"):
        from_hf({**SIZES, **SAVED, **PUBLISHED[model], **change})


# Keys of models that are computed otherwise; and a key without a meaning.
CHANGES: dict[str, Any] = {
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "compression_config": {"format": "pack-quantized"},
    "quantization": {"group_size": 64, "bits": 4},
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "residual_multiplier": 0.22,
    "logit_scale": 0.0625,
    "clip_qkv": 8.0,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.25,
    "rope_interleaved": True,
    "rope_local_base_freq": 10000.0,
    "no_rope_layers": [1, 1, 1, 0],
    "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    "rope_parameters": {"rope_type": "proportional", "factor": 4.0},
    "use_mrope": True,
    "layer_types": ["full_attention", "linear_attention"],
    "alibi": True,
    "parallel_attn": True,
    "use_parallel_residual": True,
    "qkv_bias": True,
    "use_qk_norm": True,
    "layer_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "num_experts": 8,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 64,
    "is_encoder_decoder": True,
    "pruned_heads": {"0": [1]},
    "per_layer_config": {"0": {"head_dim": 8}},
    "auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"},
    "architectures": ["LlamaForCausalLMEagle"],
    "unknown_number": 0,
    "unknown_flag": False,
}

REASONS = {
    "hidden_act": "activation 'gelu_",
    "rope_scaling": "rope scaling 'dynamic'",
    "rope_parameters": "rope scaling 'proportional'",
    "layer_types": "linear_attention",
}


@pytest.mark.parametrize("key", CHANGES)
def test_one_unknown_key_refuses_a_config(key: str) -> None:
    good = {**SIZES, **SAVED, **PUBLISHED["Llama-2-7b-hf"]}
    from_hf(good)
    with pytest.raises(SetupError, match=rf"{REASONS.get(key, key)}.* supported"):
        from_hf({**good, key: CHANGES[key]})


def test_keys_of_the_rope_settings_are_known_too() -> None:
    good = {**SIZES, **PUBLISHED["Llama-3.2-1B-Instruct"]}
    for key, value in (("attention_factor", 0.7), ("mrope_section", [4, 4]), ("partial_rotary_factor", 0.5)):
        with pytest.raises(SetupError, match=rf"{key}.*not supported"):
            from_hf({**good, "rope_scaling": {**LLAMA3, key: value}})
    with pytest.raises(SetupError, match=r"high_freq_factor.*not supported"):
        from_hf({**good, "rope_scaling": {**LLAMA3, "rope_type": "linear"}})


def test_refusal_of_a_key_names_the_mend() -> None:
    good = {**SIZES, **PUBLISHED["Qwen3-0.6B"]}
    with pytest.raises(SetupError, match=r"logit_scale = 2\.0 in config\.json.*delete it from config\.json"):
        from_hf({**good, "logit_scale": 2.0})
    with pytest.raises(
        SetupError, match=r"quant_method = 'bitnet'.* not supported.*or the unquantised model"
    ):
        from_hf({**good, "quantization_config": {"quant_method": "bitnet"}})


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"use_sliding_window": True, "max_window_layers": 2}, 0),  # as many as layers: none has a window
        ({"use_sliding_window": True, "max_window_layers": 1}, 1024),
        ({"use_sliding_window": False, "max_window_layers": 1}, 0),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 2, "max_window_layers": 0}, 0),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, 1024),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, 1024),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, 1024),
    ],
)
def test_sliding_windows_that_end_the_context_are_found(change: dict[str, Any], window: int) -> None:
    base = {**SIZES, **SAVED, **PUBLISHED["Qwen2.5-0.5B-Instruct"], "sliding_window": 1024}
    assert from_hf({**base, **change}).sliding_window == window


def gguf_of(folder: Path, **more: Any) -> Path:
    return write_gguf("llama", folder / "m.gguf", more=more)


GGUF_CHANGES: dict[str, Any] = {
    "llama.attn_logit_softcapping": 50.0,
    "llama.final_logit_softcapping": 30.0,
    "llama.logit_scale": 16.0,
    "llama.residual_scale": 0.22,
    "llama.embedding_scale": 12.0,
    "llama.attention.scale": 0.0078125,
    "llama.attention.clamp_kqv": 8.0,
    "llama.attention.max_alibi_bias": 8.0,
    "llama.attention.causal": False,
    "llama.attention.value_length": 8,
    "llama.rope.dimension_count": 8,
    "llama.rope.scaling.type": "longrope",
    "llama.rope.scaling.attn_factor": 1.2,
    "llama.rope.scaling.yarn_log_multiplier": 0.1,
    "llama.rope.scale_linear": 4.0,
    "llama.expert_count": 8,
    "llama.nextn_predict_layers": 1,
    "llama.unknown_number": 0,
    "unknown.flag": True,
}

REASONS_OF_GGUF = {"llama.rope.scaling.type": "rope scaling 'longrope'"}


@pytest.mark.parametrize("key", GGUF_CHANGES)
def test_one_unknown_key_refuses_a_gguf_file(key: str, tmp_path: Path) -> None:
    path = gguf_of(tmp_path, **{key: GGUF_CHANGES[key]})
    assert read_metadata(path)[key] == pytest.approx(GGUF_CHANGES[key])
    word = REASONS_OF_GGUF.get(key, key.removeprefix("llama."))
    with pytest.raises(SetupError, match=rf"m\.gguf: .*{word}.* not supported"):
        load_gguf(path, torch.float32, CPU)


def test_the_keys_of_published_gguf_files_are_taken(tmp_path: Path) -> None:
    more = {
        "general.file_type": 3, "general.quantization_version": 2, "general.base_model.0.name": "x",
        "general.sampling.temp": 0.6, "quantize.imatrix.file": "x.dat", "quantize.imatrix.chunks_count": 9,
        "mradermacher.quantized_by": "x", "llama.vocab_size": 131, "llama.rope.dimension_count": 16,
        "llama.attention.value_length": 16, "llama.expert_count": 0, "split.count": 0, "split.no": 0,
        "tokenizer.ggml.fim_pre_token_id": 5,
    }  # fmt: skip
    shapes, _ = load_gguf(gguf_of(tmp_path, **more), torch.float32, CPU)
    assert shapes.layers == 3


def test_how_a_gguf_file_scales_rotation(tmp_path: Path) -> None:
    """As llama.cpp: a factor without a type is linear, the type none turns it off, and the divisors of the
    tensor come on top."""

    def factors(extra: dict[str, np.ndarray] | None = None, **more: Any) -> tuple[float, ...]:
        path = write_gguf("llama", tmp_path / "m.gguf", extra=extra, more=more)
        return load_gguf(path, torch.float32, CPU)[0].rope_factors

    by_four = {"llama.rope.scaling.factor": 4.0}
    assert factors(**by_four) == (4.0,) * 8
    assert factors(**by_four, **{"llama.rope.scaling.type": "none"}) == ()
    divisors = {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}
    assert factors(divisors, **by_four) == tuple(4.0 * each for each in range(1, 9))
