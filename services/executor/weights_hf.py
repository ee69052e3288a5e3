"""Weights from a Hugging Face folder: config.json and one or more *.safetensors files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from services.executor.shapes import Shapes, from_hf
from services.executor.shards import Cut, ShardOf, all_of_it
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
# The router and, of each expert, gate, up and down.
_EXPERTS = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


def load_hf(
    folder: Path, dtype: torch.dtype, device: torch.device, shard_of: ShardOf = all_of_it
) -> tuple[Shapes, Weights]:
    """Shapes and weights of a part of the model in `folder`: nothing else of it is read. Raises
    SetupError for a model or folder that is not supported or not complete."""
    try:
        shapes = from_hf(json.loads((folder / "config.json").read_text()))
    except FileNotFoundError as error:
        raise SetupError(f"{folder} has no config.json: it is not a Hugging Face model folder") from error
    except KeyError as error:
        raise SetupError(f"{folder / 'config.json'} lacks {error}; fetch the model again") from error
    tensors = _Tensors(folder)

    def read(part: str, layer: int, cut: Cut | None) -> Tensor:
        if layer < 0:
            return tensors.read(_MODEL[part], cut)
        if part in _LAYER:
            return tensors.read(f"model.layers.{layer}.{_LAYER[part]}", cut)
        router, experts, (gate, up, down) = _EXPERTS[shapes.architecture]
        if part == "router":
            return tensors.read(f"model.layers.{layer}.{router}.weight", cut)
        assert shapes.experts is not None, "the parts of experts are of a model that has them"
        names = (down,) if part == "experts_down" else (gate, up)
        some = range(shapes.experts.count) if cut is None else range(cut.begin, cut.end)
        each = (f"model.layers.{layer}.{experts}.{expert}" for expert in some)
        return torch.stack([
            torch.cat([tensors.read(f"{expert}.{name}.weight", None) for name in names]) for expert in each
        ])  # fmt: skip

    shard = shard_of(shapes)
    return shard.shapes, assemble(shard, read, dtype, device)


class _Tensors:
    """The tensors of a folder; its files stay open, for experts are many small tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _files_by_tensor(folder)
        self._open = functools.cache(functools.partial(safe_open, framework="pt"))

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """Of a tensor what `cut` leaves. Raises SetupError for one that is not there or is quantised."""
        if name not in self._files:
            raise SetupError(f"{self._folder} has no tensor {name!r}; fetch the model again")
        opened: Any = self._open(self._files[name])
        tensor: Tensor = opened.get_tensor(name) if cut is None else _part(opened, name, cut)
        if not tensor.is_floating_point():
            raise SetupError(
                f"tensor {name!r} is {tensor.dtype}; quantised safetensors are not supported, use GGUF"
            )
        return tensor


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
