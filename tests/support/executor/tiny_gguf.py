"""The tiny models as GGUF files, as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import transformers
from support.executor.tiny_models import VOCAB, tiny_model

_PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_GEMMA3 = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def llama_cpp_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As `LlamaModel.permute` of llama.cpp's converter."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    kind: str,
    path: Path,
    *,
    architecture: str = "",
    extra: dict[str, np.ndarray] | None = None,
    more: dict[str, object] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """The tiny model of a kind as a GGUF file in float32, with `extra` tensors and `more` metadata. `types`:
    of other tensors, by the end of their names."""

    options = {"architecture": architecture, "extra": extra, "more": more, "types": types}
    return write_model(tiny_model(kind), path, tiny_vocabulary, **options)


def tiny_vocabulary(writer: gguf.GGUFWriter) -> None:
    """VOCAB tokens and no merges."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_merges([])


def write_model(
    model: transformers.PreTrainedModel,
    path: Path,
    vocabulary: Callable[[gguf.GGUFWriter], None],
    *,
    architecture: str = "",
    extra: dict[str, np.ndarray] | None = None,
    more: dict[str, object] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A model as a GGUF file in float32, with `extra` tensors, `more` metadata and the `types` of
    `write_gguf`; `vocabulary` adds the keys of its tokenizer."""
    config = model.config
    arch = architecture or {"mistral": "llama", "gemma3_text": "gemma3"}.get(
        config.model_type, config.model_type
    )
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    vocabulary(writer)
    for key, value in (more or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name, values = _converted(name, tensor.numpy(), config, arch)
        kind = next((kind for end, kind in (types or {}).items() if name.endswith(end)), None)
        values = values if kind is None else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(name: str, values: np.ndarray, config: object, arch: str) -> tuple[str, np.ndarray]:
    if arch == "gemma3" and "norm" in name:
        values = values + 1  # as the converter
    if name in _TOP:
        return _TOP[name], values
    _, _, layer, part = name.split(".", 3)
    if arch == "llama" and part.startswith(("self_attn.q_proj", "self_attn.k_proj")):
        heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
        values = llama_cpp_permute(values, heads)
    names = {**_PARTS, **(_GEMMA3 if arch == "gemma3" else {})}
    return f"blk.{layer}.{names[part]}", values
