"""Hugging Face folders: what is read from config.json, what is refused, and how the error helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.tiny_models import KINDS, save_tiny, tiny_model

from services.executor.checkpoint.config import from_hf
from services.executor.checkpoint.weights import load_dummy, load_hf
from services.executor.cpu.engine import TorchOptions, build
from services.executor.model.description import ExpertShapes
from shared.errors import SetupError

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rotation_frequencies_are_transformers(kind: str, tmp_path: Path) -> None:
    config = json.loads((save_tiny(kind, tmp_path) / "config.json").read_text())
    wanted = tiny_model(kind).model.rotary_emb.inv_freq
    assert from_hf(config).inverse_frequencies() == pytest.approx(wanted.tolist(), rel=1e-6)


def test_the_older_spelling_of_rope_settings_reads_the_same() -> None:
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = from_hf({**CONFIG, "rope_theta": 500000.0, "rope_scaling": {**scaling, "rope_type": "llama3"}})
    new = from_hf({**CONFIG, "rope_parameters": {**scaling, "rope_type": "llama3", "rope_theta": 500000.0}})
    assert old == new
    assert (old.rope_theta, len(old.rope_factors), max(old.rope_factors)) == (500000.0, 8, 32.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r"model type 'gpt2' is not supported; supported are .* qwen3"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"lm_head_bias": True}, r"lm_head_bias = True in config\.json is not supported, only False"),
        ({"model_type": "mistral", "attention_bias": True}, r"attention_bias = True in config\.json is not"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic' is not supported"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            r"partial_rotary_factor = 0\.5 in config\.json is not",
        ),
    ],
)
def test_unsupported_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        from_hf({**CONFIG, **change})


def test_incomplete_folder_is_an_error_that_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"has no config\.json"):
        load_hf(tmp_path, torch.float32, CPU)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(SetupError, match=r"has no \*\.safetensors file"):
        load_hf(tmp_path, torch.float32, CPU)
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(SetupError, match=r"has no tensor 'model\.embed_tokens\.weight'"):
        load_hf(tmp_path, torch.float32, CPU)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SetupError, match="lacks 'num_attention_heads'"):
        load_hf(tmp_path, torch.float32, CPU)


def rewritten(folder: Path, **change: torch.Tensor | None) -> Path:
    """The folder with tensors changed, added, or (None) taken out; dots are written as two underscores."""
    state = load_file(folder / "model.safetensors")
    named = {name.replace("__", "."): tensor for name, tensor in change.items()}
    kept = {name: tensor for name, tensor in {**state, **named}.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(SetupError) as caught:
        load_hf(folder, torch.float32, CPU)
    return caught.value.message


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_claimed_or_the_folder_is_refused(kind: str, tmp_path: Path) -> None:
    folder = save_tiny(kind, tmp_path)
    load_hf(folder, torch.float32, CPU)
    for name in ("model.layers.0.self_attn.q_proj.weight_scale_inv", "score.weight", "model.layers.3.mlp.x"):
        assert f"does not compute: {name} (1 in all)" in refusal(rewritten(folder, **{name: torch.ones(2)}))
        rewritten(folder, **{name: None})
    rewritten(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))  # old files have it
    load_hf(folder, torch.float32, CPU)


def test_quantised_tensors_are_refused_without_a_word_in_the_configuration(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    for dtype, reason in ((torch.float8_e4m3fn, "F8_E4M3, without scales"), (torch.int8, "I8")):
        rewritten(folder, **{name: torch.ones(64, 112).to(dtype)})
        assert f"tensor '{name}' is {reason}; quantised" in refusal(folder)
    rewritten(folder, **{name: torch.ones(64, 112).to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)})
    assert f"tensor '{name}' is F8_E4M3" in refusal(folder)  # of an unknown kind


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    rewritten(folder, model__embed_tokens__weight=torch.ones(140, 64))
    assert "'model.embed_tokens.weight' is [140, 64], where the model's configuration gives [131, 64]" in (
        refusal(folder)
    )


def test_a_tie_must_agree_with_what_is_stored(tmp_path: Path) -> None:
    folder = save_tiny("llama-9-3-tied", tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewritten(folder, lm_head__weight=embedding.clone())
    _, weights = load_hf(folder, torch.float32, CPU)
    assert weights.head is weights.embedding
    rewritten(folder, lm_head__weight=embedding * 2)
    assert "sets tie_word_embeddings, but 'lm_head.weight' is stored and is not the embedding" in refusal(
        folder
    )
    folder = rewritten(save_tiny("llama", tmp_path / "b"), lm_head__weight=None)
    assert "has no tensor 'lm_head.weight'" in refusal(folder)


def test_an_adapter_is_not_left_out_in_silence(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter_config.json); merge it into the model first" in refusal(folder)


def test_mistrals_own_copy_of_the_weights_is_not_read(tmp_path: Path) -> None:
    folder = save_tiny("mistral", tmp_path)
    save_file({"tok_embeddings.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    load_hf(folder, torch.float32, CPU)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    load_hf(folder, torch.float32, CPU)
    (folder / "weights.safetensors").unlink()
    assert "has no *.safetensors file" in refusal(folder)


def options(folder: Path, **more: Any) -> TorchOptions:
    return TorchOptions(
        model_path=folder, model_name="m", **{"device": "cpu", "blocks": 8, "slots": 2, **more}
    )


def test_a_window_ends_the_context_of_a_family_without_windows_alone(tmp_path: Path) -> None:
    for kind, most in (("mistral", 256), ("llama", 64)):
        folder = save_tiny(kind, tmp_path / kind)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 64}))
        assert build(options(folder, blocks=16)).info.max_context == most
    with pytest.raises(SetupError, match="max_context 100 is over 64 tokens, its context"):
        build(options(folder, max_context=100))


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    with pytest.raises(SetupError, match="max_context 1000 is over 256 tokens, its context"):
        build(options(folder, max_context=1000))
    with pytest.raises(SetupError, match="8 KV blocks of 16 tokens hold no sequence of 200"):
        build(options(folder, max_context=200))
    with pytest.raises(SetupError, match="dtype 'int3' is not supported; use one of bf16, f32, int8, packed"):
        build(options(folder, dtype="int3"))


def test_info_states_the_engine(tmp_path: Path) -> None:
    folder = save_tiny("llama-9-3-tied", tmp_path)
    info = build(options(folder, dtype="bf16")).info
    assert (info.backend, info.dtype, info.vocab, info.blocks, info.max_context) == (
        "torch",
        "bf16",
        131,
        8,
        128,
    )
    assert info.bytes_per_block == 3 * 2 * 16 * 3 * 8 * 2
    assert build(options(folder, dtype="bf16", blocks=0)).info.blocks == 2 * 256 // 16
    prints = {
        build(options(folder, **change)).info.fingerprint
        for change in ({}, {"dtype": "bf16"}, {"block_tokens": 8})
    }
    assert len(prints) == 3
    assert build(options(folder, threads=1, max_context=32)).info.fingerprint in prints


def test_fingerprint_changes_with_one_weight_matrix(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "a")
    before = build(options(folder)).info.fingerprint
    state = tiny_model("llama").state_dict()
    state["model.layers.1.mlp.down_proj.weight"] = state["model.layers.1.mlp.down_proj.weight"] * 1.01
    save_file(state, folder / "model.safetensors")
    assert build(options(folder)).info.fingerprint != before


MOE = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 40,
}


def test_layers_with_experts_follow_the_config() -> None:
    shapes = from_hf({**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [shapes.is_sparse(layer) for layer in range(6)] == [False, True, False, False, False, True]
    assert shapes.experts == ExpertShapes(
        count=128, per_token=8, width=40, renormalise=False, dense_layers=(0, 2, 3, 4)
    )
    experts = {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
    mixtral = from_hf({**CONFIG, **experts, "model_type": "mixtral"})
    assert mixtral.experts == ExpertShapes(count=8, per_token=2, width=96, renormalise=True)
    assert not from_hf(CONFIG).is_sparse(0)


def test_fingerprint_depends_on_the_routing_of_tokens(tmp_path: Path) -> None:
    folder = save_tiny("qwen3-moe", tmp_path)
    before = build(options(folder)).info.fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    assert build(options(folder)).info.fingerprint != before


def test_dummy_weights_have_the_shapes_of_the_model(tmp_path: Path) -> None:
    folder = save_tiny("qwen3-moe-mixed", tmp_path)
    (_, found), (_, wanted) = (load(folder, torch.float32, CPU) for load in (load_dummy, load_hf))
    for ours, theirs in zip(found.layers, wanted.layers, strict=True):
        assert ours["gate_up"].values.shape == theirs["gate_up"].values.shape
        assert ours["down"].values.shape == theirs["down"].values.shape
        assert ours.keys() == theirs.keys()
    assert found.layers[0]["gate_up"].values.std() == pytest.approx(0.02, rel=0.05)
