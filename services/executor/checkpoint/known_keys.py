"""Checks the keys of a checkpoint's configuration; config.py calls it.

A key that is not listed here may change what the model computes, so the model is refused with that key's
name. The listed keys of config.json and of GGUF metadata are read by config.py, or harmless at any value
(training, generation, bookkeeping), or harmless at one value. A key with the value null is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.sampling.ref import PARAMETERS
from services.executor.checkpoint.families import Family
from services.executor.checkpoint.quantised import scheme_of, shown
from shared.errors import SetupError

_READ = frozenset((
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings",
    "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_parameters", "rope_scaling",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
))  # fmt: skip
HARMLESS = frozenset((
    # names and versions
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "transformers.js_config",
    "tokenizer_class", "is_llama_config", "unsloth_fixed", "unsloth_version", "finetuning_task",
    # storage, and settings of other programs
    "dtype", "torch_dtype", "use_cache", "use_bfloat16", "torchscript", "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits", "chunk_size_feed_forward", "pretraining_tp",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "_experts_implementation", "use_flash_attention_2", "gradient_checkpointing", "is_decoder",
    "max_sequence_length", "model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side",
    # training
    "initializer_range", "attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop",
    "classifier_dropout", "router_aux_loss_coef", "router_jitter_noise", "neftune_noise_alpha",
    # unused heads; their tensors are refused by name
    "num_labels", "id2label", "label2id", "problem_type", "task_specific_params", "tf_legacy_loss",
    # generation: read elsewhere, or set by requests
    *(each.field for each in PARAMETERS),
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
    "mask_token_id", "decoder_start_token_id", "prefix", "max_length", "min_length", "max_new_tokens",
    "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "typical_p",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "return_dict_in_generate", "output_scores", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
))  # fmt: skip
_ONE_VALUE: Mapping[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}
_ROPE = frozenset(("type", "rope_type", "rope_theta", "partial_rotary_factor", "factor",
                   "original_max_position_embeddings"))  # fmt: skip
_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")
_ROPE_OF_TYPE = {
    "llama3": frozenset(("low_freq_factor", "high_freq_factor")),
    "longrope": frozenset(("attention_factor", "long_factor", "short_factor")),
    "yarn": frozenset((
        "attention_factor", "beta_fast", "beta_slow", "finetuned", "mscale", "mscale_all_dim", "truncate",
    )),
}  # fmt: skip

_GGUF_NAMESPACES = ("general.", "tokenizer.", "quantize.", "mradermacher.")
_GGUF_READ = frozenset((
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "pooling_type",
))  # fmt: skip
_GGUF_ONE_VALUE: Mapping[str, object] = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "tensor_data_layout": "Meta AI original pth",
}


def check_hf(config: Mapping[str, Any], kind: str, family: Family) -> None:
    """Raises SetupError for the first key of a config.json that may change what a model of this kind
    computes."""
    given = {key: value for key, value in config.items() if value is not None}
    scheme_of(given)
    for key in ("compression_config", "quantization"):
        if key in given:
            raise SetupError(
                f"{key} in config.json ({shown(given[key])}): folders quantised so are not supported; use "
                "the unquantised model or a GGUF file of it"
            )
    if str(given.get("hidden_act", "silu")) != "silu":
        raise SetupError(f"activation {given['hidden_act']!r} is not supported; use a model with 'silu'")
    plain = kind.replace("_", "")
    for name in given.get("architectures", ()):
        if str(name).lower() not in (f"{plain}forcausallm", f"{plain}model"):  # the second: for vectors
            raise SetupError(
                f"config.json has model_type {kind!r}, but architectures {shown(name)}, which is not "
                "supported; use a model that generates text in the plain architecture"
            )
    rope = {**given.get("rope_scaling", {}), **given.get("rope_parameters", {})}
    if "partial_rotary_factor" not in family.reads:
        _only(rope, "partial_rotary_factor", 1.0, "config.json")
    known_rope = _ROPE | _ROPE_OF_TYPE.get(rope_type(rope), frozenset())
    for key in sorted(rope.keys() - known_rope):
        if rope[key] is not None:
            raise _unknown(f"{key} of the rope settings", rope[key], "config.json")
    known = _READ | family.reads | HARMLESS
    known |= {"architectures", "quantization_config"}
    for key, value in given.items():
        if key in _ONE_VALUE and key not in family.reads:
            _only(given, key, _ONE_VALUE[key], "config.json")
        elif key not in known:
            raise _unknown(key, value, "config.json")


def rope_type(rope: Mapping[str, Any]) -> str:
    """How rotation frequencies are scaled. Raises SetupError for an unsupported type."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in _SCALINGS:
        raise SetupError(
            f"rope scaling {kind!r} is not supported; supported are {', '.join(_SCALINGS)}. Some models "
            "are meant to work without it up to their original context: see the model's page"
        )
    return kind


def check_gguf(metadata: Mapping[str, Any], kind: str) -> None:
    """Raises SetupError for the first metadata key that may change what a model of this architecture
    computes."""
    for key, value in metadata.items():
        name = key.removeprefix(f"{kind}.")
        if key.startswith((*_GGUF_NAMESPACES, "split.")):
            continue
        if name == key or name not in _GGUF_READ | _GGUF_ONE_VALUE.keys():
            raise _unknown(key, value, "the GGUF file")
        if name in _GGUF_ONE_VALUE:
            _only(metadata, key, _GGUF_ONE_VALUE[name], "the GGUF file")


def _only(given: Mapping[str, Any], key: str, value: object, where: str) -> None:
    if given.get(key) is not None and given[key] != value:
        raise SetupError(
            f"{key} = {shown(given[key])} in {where} is not supported, only {value!r}; use another model"
        )


def _unknown(key: str, value: object, where: str) -> SetupError:
    how = "delete it from config.json"
    if where != "config.json":
        how = f"write a copy without it: gguf-new-metadata --remove-metadata {key} OLD NEW"
    return SetupError(
        f"{key} = {shown(value)} in {where} is not known here and may change what the model computes: "
        f"not supported; if its authors document that the key changes nothing, {how}"
    )
