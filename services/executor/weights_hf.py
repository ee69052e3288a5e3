"""Weights from a Hugging Face folder: config.json and one or more *.safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from services.executor.ranks import SOLO, Ranks
from services.executor.shapes import Shapes, from_hf
from services.executor.shards import Cut, shard
from services.executor.weights import Weights, assemble
from shared.errors import SetupError

_MODEL = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "out": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def load_hf(
    folder: Path, dtype: torch.dtype, device: torch.device, ranks: Ranks = SOLO
) -> tuple[Shapes, Weights]:
    """Shapes and weights of this rank's part of the model in `folder`: nothing else of it is read. Raises
    SetupError for a model or folder that is not supported or not complete."""
    try:
        shapes = from_hf(json.loads((folder / "config.json").read_text()))
    except FileNotFoundError as error:
        raise SetupError(f"{folder} has no config.json: it is not a Hugging Face model folder") from error
    except KeyError as error:
        raise SetupError(f"{folder / 'config.json'} lacks {error}; fetch the model again") from error
    files = _files_by_tensor(folder)

    def read(part: str, layer: int, cut: Cut | None) -> Tensor:
        name = _MODEL[part] if layer < 0 else f"model.layers.{layer}.{_LAYER[part]}"
        if name not in files:
            raise SetupError(f"{folder} has no tensor {name!r}; fetch the model again")
        with safe_open(files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name) if cut is None else _part(opened, name, cut)
        if not tensor.is_floating_point():
            raise SetupError(
                f"tensor {name!r} is {tensor.dtype}; quantised safetensors are not supported, use GGUF"
            )
        return tensor

    part = shard(shapes, ranks.rank, ranks.size)
    return part.shapes, assemble(part, read, dtype, device)


def _part(opened: Any, name: str, cut: Cut) -> Tensor:
    lazy = opened.get_slice(name)
    taken: Tensor = lazy[cut.begin : cut.end] if cut.dim == 0 else lazy[:, cut.begin : cut.end]
    return taken


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor: from the index of a sharded model, else from the files themselves."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), path))
    if not found:
        raise SetupError(f"{folder} has no *.safetensors file; other weight formats are not supported")
    return found
