"""GGUF files, written here with the gguf library as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from plan_maker import PlanMaker
from tiny_models import VOCAB, reference_logprobs, save_tiny, tiny_model

from services.executor.gguf_tensors import GgufTensors
from services.executor.torch_backend import TorchOptions, build
from services.executor.weights_gguf import load_gguf
from services.executor.weights_hf import load_hf
from shared.errors import SetupError

CPU = torch.device("cpu")
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
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
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
    kind: str, path: Path, *, architecture: str = "", extra: dict[str, np.ndarray] | None = None
) -> Path:
    """The tiny model of a kind as a GGUF file in float32."""
    model = tiny_model(kind)
    config = model.config
    arch = architecture or ("llama" if config.model_type == "mistral" else config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_merges([])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        writer.add_tensor(*_converted(name, tensor.numpy(), config, arch))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(name: str, values: np.ndarray, config: object, arch: str) -> tuple[str, np.ndarray]:
    if name in _TOP:
        return _TOP[name], values
    _, _, layer, part = name.split(".", 3)
    if arch == "llama" and part.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
        values = llama_cpp_permute(values, heads)
    return f"blk.{layer}.{_PARTS[part]}", values


@pytest.mark.parametrize("kind", ["llama", "llama-9-3-tied", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_holds_the_same_model_as_its_folder(kind: str, tmp_path: Path) -> None:
    shapes, weights = load_gguf(write_gguf(kind, tmp_path / "m.gguf"), torch.float32, CPU)
    hf_shapes, hf_weights = load_hf(save_tiny(kind, tmp_path), torch.float32, CPU)
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "tied", "qkv_bias", "qk_norm"):
        assert getattr(shapes, name) == getattr(hf_shapes, name)
    assert torch.equal(weights.head, hf_weights.head)
    for ours, theirs in zip(weights.layers, hf_weights.layers, strict=True):
        assert torch.equal(ours.qkv, theirs.qkv)
        assert torch.equal(ours.gate_up, theirs.gate_up)
        assert torch.equal(ours.down, theirs.down)


def test_scaled_frequencies_come_from_the_rope_tensor(tmp_path: Path) -> None:
    """llama.cpp stores Llama 3's scaling as divisors of the frequencies."""
    model = tiny_model("llama3-rope")
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.double().numpy()).astype(np.float32)
    path = write_gguf("llama3-rope", tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    maker = PlanMaker(build(TorchOptions(model_path=path, model_name="m", device="cpu", blocks=8, slots=1)))
    prompt = list(range(60))
    maker.open(0, prompt)
    assert maker.prefill({0: 60}).ids[0] == int(reference_logprobs("llama3-rope", prompt)[-1].argmax())
    assert max(factors) > 7.9


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_tensor_types_equal_the_gguf_library_bit_for_bit(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((6, 96)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    found = GgufTensors(tmp_path / "t.gguf").read("t")
    assert found.shape == (6, 96)
    assert np.array_equal(found.numpy(), wanted)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf("llama", tmp_path / "m.gguf", architecture="gemma3")
    with pytest.raises(
        SetupError, match=r"architecture 'gemma3' is not supported; .* llama, mistral, qwen2, qwen3"
    ):
        load_gguf(path, torch.float32, CPU)


def test_a_tensor_we_would_not_compute_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), dtype=np.float32)}
    path = write_gguf("llama", tmp_path / "m.gguf", extra=extra)
    with pytest.raises(SetupError, match=r"does not compute: blk\.0\.ffn_gate_inp\.weight"):
        load_gguf(path, torch.float32, CPU)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_gguf("llama", tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SetupError, match=r"not a whole GGUF file .*past the end.*pull the model again"):
        load_gguf(path, torch.float32, CPU)
