"""Forms of rotation in config.json and GGUF files: the frequencies and the gain of transformers, what is
refused by its name, and that no KV of another rotation is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import save_tiny
from transformers import Gemma3TextConfig, LlamaConfig, Olmo3Config, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from services.executor.checkpoint.config import from_hf
from services.executor.checkpoint.kv_cache import largest_kv
from services.executor.checkpoint.weights import load_hf
from services.executor.cpu.engine import TorchOptions, build
from services.executor.quantised.gguf import load_gguf
from shared.errors import SetupError

CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 32768, "rope_theta": 1e6,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARNS: dict[str, dict[str, Any]] = {
    "as Qwen documents it": {},
    "attention_factor": {"attention_factor": 1.5},
    "mscale": {"mscale": 1.2, "mscale_all_dim": 0.7},
    "mscale alone": {"mscale": 1.2},
    "mscale of zero": {"mscale": 1.0, "mscale_all_dim": 0},
    "truncate": {"truncate": False},
    "betas": {"beta_fast": 16, "beta_slow": 2.5},
    "one pair": {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
    "below one": {"factor": 0.5},
    "short": {"original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("name", YARNS)
def test_yarn_is_that_of_transformers(name: str) -> None:
    rope = {**YARN, **YARNS[name]}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**CONFIG, rope_parameters={**rope, "rope_theta": 1e6}))
    old = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    for key, value in (("rope_parameters", rope), ("rope_scaling", old)):
        shapes = from_hf({**CONFIG, key: value})
        assert shapes.inverse_frequencies() == pytest.approx(theirs.inv_freq.tolist(), rel=1e-6)
        assert shapes.rope_gain == pytest.approx(theirs.attention_scaling, rel=1e-12)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.1] * 24, "long_factor": [2.0] * 20 + [30] * 4}
LONGROPES: dict[str, dict[str, Any]] = {
    "as published": {},
    "attention_factor": {"attention_factor": 1.5},
    "factor": {"factor": 4.0},
    "no longer context": {"original_max_position_embeddings": 32768},  # the one beside them counts
}


@pytest.mark.parametrize("name", LONGROPES)
def test_longrope_with_a_partial_rotation_is_that_of_transformers(name: str) -> None:
    rope, beside = {**LONGROPE, **LONGROPES[name]}, {"original_max_position_embeddings": 4096}
    config = {**CONFIG, **beside, "model_type": "phi3", "partial_rotary_factor": 0.75}
    theirs = Phi3RotaryEmbedding(Phi3Config(**config, pad_token_id=0, rope_parameters={**rope}))
    shapes = from_hf({**config, "rope_scaling": rope})
    assert shapes.rope_gain == pytest.approx(theirs.attention_scaling, rel=1e-12)
    for context, length in ((4096, 4096), (4097, 4097), (32768, 4097)):
        theirs(torch.ones(1), torch.arange(length)[None])
        found = shapes.for_context(context).inverse_frequencies()
        assert found == pytest.approx([*theirs.inv_freq.tolist(), *[0.0] * 8], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"short_factor": None}, "short_factor of the rope settings is None, and must be a list of 24 pos"),
        ({"long_factor": [1.0] * 32}, "long_factor of the rope settings is .* must be a list of 24 positive"),
        ({"long_factor": [1.0] * 23 + [0]}, "long_factor of the rope settings is 0, and must be a positive"),
        ({"partial_rotary_factor": 0.8}, "partial_rotary_factor of the rope settings is 0.8, and must be"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor of the rope settings is 1.5, and must be"),
        ({"short_mscale": 1.0}, "short_mscale of the rope settings = 1.0 .* not supported"),
    ],
)
def test_a_longrope_that_no_model_has_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(SetupError, match=reason):
        from_hf({**CONFIG, "model_type": "phi3", "partial_rotary_factor": 0.75,
                 "rope_scaling": {**LONGROPE, **change}})  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "rotation", "rope"),
    [
        ("olmo3", Olmo3Config, Olmo3RotaryEmbedding, {**YARN, "attention_factor": 1.2}),
        ("gemma3_text", Gemma3TextConfig, Gemma3RotaryEmbedding, {"rope_type": "linear", "factor": 8.0}),
    ],
)
def test_rope_scaling_leaves_layers_with_a_window_as_in_transformers(
    kind: str, config: Any, rotation: Any, rope: dict[str, Any]
) -> None:
    given = {**CONFIG, "head_dim": 64, "rope_theta": 5e5, "sliding_window": 16, "rope_scaling": rope}
    given["layer_types"] = ["sliding_attention", "full_attention"]
    theirs = rotation(config(**{**given, "rope_scaling": {**rope}}))
    every, local = from_hf({**given, "model_type": kind}).rope_tables()
    assert every[0] == pytest.approx(theirs.full_attention_inv_freq.tolist(), rel=1e-6)
    assert every[1] == rope.get("attention_factor", 1.0)
    assert local[0] == pytest.approx(theirs.sliding_attention_inv_freq.tolist(), rel=1e-6)
    assert local[1] == 1.0


def test_yarn_extends_the_context() -> None:
    assert from_hf({**CONFIG, "rope_scaling": YARN}).max_context == 131072
    assert from_hf({**CONFIG, "rope_scaling": {**YARN, "factor": 0.5}}).max_context == 32768


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"factor": None}, "factor of the rope settings is None, and must be a positive number"),
        ({"factor": 0}, "factor of the rope settings is 0,"),
        ({"factor": "4"}, "factor of the rope settings is '4',"),
        ({"factor": True}, "factor of the rope settings is True,"),
        ({"factor": float("nan")}, "factor of the rope settings is nan,"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings of the rope settings"),
        ({"attention_factor": -1.0}, "attention_factor of the rope settings"),
        ({"mscale": -1.0, "mscale_all_dim": 1.0}, "mscale of the rope settings"),
        ({"beta_fast": [32]}, "beta_fast of the rope settings"),
        ({"beta_fast": 1, "beta_slow": 32}, "beta_fast, beta_slow and original_max_position_embeddings"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings of the rope settings"),
        ({"truncate": "false"}, "truncate of the rope settings is 'false', and must be true or false"),
        ({"attn_factor": 0.87}, "attn_factor of the rope settings = 0.87 .* not supported"),
        ({"short_factor": [1.0]}, "short_factor of the rope settings = .* not supported"),
        ({"rope_type": "linear", "factor": 0}, "factor of the rope settings is 0,"),
    ],
)
def test_impossible_rope_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(SetupError, match=reason):
        from_hf({**CONFIG, "rope_scaling": {**YARN, **change}})


def test_yarn_of_a_gguf_file(tmp_path: Path) -> None:
    more: dict[str, object] = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 8.0}
    own = {"llama.rope.scaling.original_context_length": 32}
    config = json.loads((save_tiny("llama-yarn", tmp_path) / "config.json").read_text())

    def same(change: dict[str, Any], **keys: object) -> bool:
        path = write_gguf("llama-yarn", tmp_path / "m.gguf", more={**more, **keys})
        ours = load_gguf(path, torch.float32, torch.device("cpu"))[0]
        wanted = from_hf({**config, "rope_parameters": {**config["rope_parameters"], **change}})
        return (ours.rope_factors, ours.rope_gain) == (wanted.rope_factors, wanted.rope_gain)

    assert same({}, **own)
    assert same({"original_max_position_embeddings": 256})  # without the key llama.cpp takes the context
    betas = {"llama.rope.scaling.yarn_beta_fast": 16.0, "llama.rope.scaling.yarn_beta_slow": 0.5}
    assert same({"beta_fast": 16.0, "beta_slow": 0.5}, **own, **betas)


def test_another_rotation_has_another_fingerprint_and_digest(tmp_path: Path) -> None:
    folder = save_tiny("llama-yarn", tmp_path)
    config = json.loads((folder / "config.json").read_text())

    def marks(**change: Any) -> tuple[str, str]:
        rope = {**config["rope_parameters"], **change}
        (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
        options = TorchOptions(model_path=folder, model_name="m", device="cpu", blocks=16, slots=1)
        info = build(options).info
        return info.fingerprint, info.model_digest

    found = [marks(), marks(attention_factor=1.0), marks(factor=4.0), marks(beta_slow=0.5)]
    assert [len({*each}) for each in zip(*found, strict=True)] == [4, 4]


def test_the_range_of_fp8_keys_has_the_gain(tmp_path: Path) -> None:
    shapes, weights = load_hf(save_tiny("llama", tmp_path), torch.float32, torch.device("cpu"))
    plain, twice = (largest_kv(replace(shapes, rope_gain=gain), weights)[0] for gain in (1.0, 2.0))
    assert torch.equal(twice, plain * torch.tensor([[2.0], [1.0]]))
