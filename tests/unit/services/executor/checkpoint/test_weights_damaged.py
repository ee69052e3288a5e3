"""Folders and files that are not whole end in a SetupError that names the file and the mend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import save_tiny

from services.executor.checkpoint.weights import load_dummy, load_hf, stored_hf
from services.executor.quantised.gguf import load_gguf
from shared.errors import SetupError
from shared.vocab.vocabulary import hf_parts

CPU = torch.device("cpu")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 9\n"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = save_tiny("llama", tmp_path / "m", max_shard_size="200KB")
    load_hf(folder, torch.float32, CPU)
    return folder


def refused(folder: Path, *reasons: str) -> None:
    with pytest.raises(SetupError) as caught:
        load_hf(folder, torch.float32, CPU)
    assert all(each in caught.value.message for each in reasons), caught.value.message


def refused_by_all(folder: Path, *reasons: str) -> None:
    """Also where only the digest is computed."""
    refused(folder, *reasons)
    with pytest.raises(SetupError) as caught:
        stored_hf(folder)
    assert all(each in caught.value.message for each in reasons), caught.value.message


def test_numbers_beyond_any_model_are_an_error_at_once(sharded: Path) -> None:
    file = sharded / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"head_dim": 10**30}))
    refused(sharded, "no model has heads of 1000000", "config.json")


def test_a_git_lfs_pointer_is_called_by_its_name(sharded: Path, tmp_path: Path) -> None:
    shard = sorted(sharded.glob("*-of-*.safetensors"))[1]
    shard.write_text(POINTER)
    refused(sharded, str(shard), "is a Git LFS pointer", "git lfs pull")
    (sharded / "tokenizer.json").write_text(POINTER)
    with pytest.raises(SetupError, match=r"tokenizer\.json is a Git LFS pointer"):
        hf_parts(sharded)
    (sharded / "config.json").write_text(POINTER)
    refused(sharded, "config.json is a Git LFS pointer")
    (tmp_path / "m.gguf").write_text(POINTER)
    with pytest.raises(SetupError, match=r"m\.gguf is a Git LFS pointer"):
        load_gguf(tmp_path / "m.gguf", torch.float32, CPU)


def test_a_missing_or_damaged_shard_is_named(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*-of-*.safetensors"))[:2]
    whole = second.read_bytes()
    second.write_bytes(whole[:-100])
    refused_by_all(sharded, str(second), "is not a whole safetensors file", "fetch the model again")
    second.write_bytes(b"")
    refused_by_all(sharded, str(second), "is not a whole safetensors file")
    second.unlink()
    refused_by_all(sharded, str(second), "is missing", "fetch it again")
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "has no tensor")
    second.write_bytes(first.read_bytes())
    refused(sharded, "twice")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"metadata": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_a_broken_index_is_named(text: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, "model.safetensors.index.json is not an index", "fetch the model again")


@pytest.mark.parametrize("load", [load_hf, load_dummy])
@pytest.mark.parametrize(
    "broken",
    [
        "", "{", "[]", "null", "\x00\xff", {"num_hidden_layers": "many"}, {"hidden_size": [64]},
        {"num_attention_heads": 0, "head_dim": None}, {"num_key_value_heads": 3}, {"vocab_size": -1},
        {"rope_parameters": "default"}, {"rope_parameters": {"rope_theta": {1: 2}}},
        {"layer_types": 3}, {"architectures": 3}, {"num_hidden_layers": None}, {"num_hidden_layers": 10**7},
    ],
)  # fmt: skip
def test_a_broken_configuration_is_named(
    broken: str | dict[str, object], load: object, tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path)
    file = folder / "config.json"
    text = broken if isinstance(broken, str) else json.dumps({**json.loads(file.read_text()), **broken})
    file.write_text(text, "latin-1")
    with pytest.raises(
        SetupError, match=r"config\.json is not a model's configuration .*fetch the model again"
    ):
        load(folder, torch.float32, CPU)


@pytest.mark.parametrize(
    "more",
    [
        {"llama.block_count": 0},
        {"llama.attention.head_count": [4, 4]},
        {"llama.attention.head_count_kv": 3},
        {"llama.embedding_length": "many"},
    ],
)
def test_impossible_metadata_of_a_gguf_file_is_named(more: dict[str, object], tmp_path: Path) -> None:
    path = write_gguf("llama", tmp_path / "m.gguf", more=more)
    with pytest.raises(SetupError, match=r"m\.gguf(: tensor| has tensors| is not a GGUF file of a model)"):
        load_gguf(path, torch.float32, CPU)
