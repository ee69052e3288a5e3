"""Weights are a model as the forward pass wants it, from any file that can name its tensors.

Projections that read the same input are joined, so that a layer is four matrix products:

    qkv [(heads + 2 * kv_heads) * head_dim, hidden] · out · gate_up [2 * intermediate, hidden] · down

Those of experts are stacked: gate_up [experts, 2 * width, hidden], down [experts, hidden, width].

`load_hf` reads a Hugging Face folder, config.json and one or more *.safetensors files. `load_dummy` draws
random weights in the shapes of a config.json: for benchmarks of models that are not on this machine.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from services.executor.checkpoint.config import Shapes, from_hf
from services.executor.checkpoint.partition import Cut, Shard, ShardOf, all_of_it
from shared.errors import SetupError

# A part of a layer (or of the model, with layer -1) as [out, in], in halves-rotating order for q and k;
# with a cut, what that leaves of it. The parts of experts come as they are kept: "experts_gate_up" and
# "experts_down".
ReadTensor = Callable[[str, int, Cut | None], Tensor]

# The names of the parts in a Hugging Face folder.
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
_SPREAD = 0.02  # of random weights, as models are initialised: activations stay in range
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are `[out, in]`, norms `[width]`. With a `router` `[experts, hidden]` it is sparse,
    and `gate_up` and `down` are those of all experts."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    router: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model. `head` is `embedding` itself where they are tied. The model that computes takes the
    layers out, so that plain matrices go as packed ones come."""

    embedding: Tensor  # [vocab, hidden]
    norm: Tensor
    head: Tensor  # [vocab, hidden], of one of several ranks its rows
    layers: list[LayerWeights]


def assemble(shard: Shard, read: ReadTensor, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read every tensor of a rank's part through `read` and put it together on `device`."""
    shapes = shard.shapes

    def take(part: str, layer: int = -1) -> Tensor:
        return read(part, layer, shard.cuts.get(part)).to(device=device, dtype=dtype)

    def joined(parts: tuple[str, ...], layer: int) -> Tensor:
        return torch.cat([take(part, layer) for part in parts])

    def layer(i: int) -> LayerWeights:
        return LayerWeights(
            attention_norm=take("attention_norm", i),
            qkv=joined(("q", "k", "v"), i),
            qkv_bias=joined(("q_bias", "k_bias", "v_bias"), i) if shapes.qkv_bias else None,
            q_norm=take("q_norm", i) if shapes.qk_norm else None,
            k_norm=take("k_norm", i) if shapes.qk_norm else None,
            out=take("out", i),
            mlp_norm=take("mlp_norm", i),
            gate_up=take("experts_gate_up", i) if shapes.sparse(i) else joined(("gate", "up"), i),
            down=take("experts_down" if shapes.sparse(i) else "down", i),
            router=take("router", i) if shapes.sparse(i) else None,
        )

    embedding = take("embedding")
    if not shapes.tied:
        head = take("head")
    else:
        cut = shard.cuts.get("head")
        head = embedding if cut is None else embedding[cut.begin : cut.end]
    missing = shard.head_rows - len(head)
    return Weights(
        embedding=embedding,
        norm=take("norm"),
        head=F.pad(head, (0, 0, 0, missing)) if missing else head,
        layers=[layer(shard.first_layer + i) for i in range(shapes.layers)],
    )


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


def load_dummy(
    folder: Path, dtype: torch.dtype, device: torch.device, shard_of: ShardOf = all_of_it
) -> tuple[Shapes, Weights]:
    """Shapes of a part of `folder`/config.json, and weights drawn on `device`, each tensor with a
    seed of its own: any part of the model is a part of the same; norms are ones. Raises
    SetupError for a model that is not supported or a folder without a config."""
    try:
        shapes = from_hf(json.loads((folder / "config.json").read_text()))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SetupError(f"{folder} has no config.json, where dummy weights find their shapes") from error
    generator = torch.Generator(device)
    sizes = _sizes(shapes)

    def read(part: str, layer: int, cut: Cut | None) -> Tensor:
        if part.endswith("norm"):
            return torch.ones(sizes[part], dtype=dtype, device=device)
        generator.manual_seed(zlib.crc32(f"{_SEED} {layer} {part}".encode()))
        values = torch.empty(sizes[part], device=device)  # float32: the same numbers in every dtype
        values = values.normal_(0.0, _SPREAD, generator=generator).to(dtype)
        return values if cut is None else cut.of(values)

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


def _sizes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shape of every part that `assemble` asks for."""
    hidden, wide = shapes.hidden, shapes.intermediate
    queries, keys = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    experts: dict[str, tuple[int, ...]] = {}
    if shapes.experts is not None:
        count, narrow = shapes.experts.count, shapes.experts.width
        experts = {
            "router": (count, hidden),
            "experts_gate_up": (count, 2 * narrow, hidden),
            "experts_down": (count, hidden, narrow),
        }
    return experts | {
        "embedding": (shapes.vocab, hidden),
        "norm": (hidden,),
        "head": (shapes.vocab, hidden),
        "attention_norm": (hidden,),
        "mlp_norm": (hidden,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "q_bias": (queries,),
        "k_bias": (keys,),
        "v_bias": (keys,),
        "q_norm": (shapes.head_dim,),
        "k_norm": (shapes.head_dim,),
        "out": (hidden, queries),
        "gate": (wide, hidden),
        "up": (wide, hidden),
        "down": (hidden, wide),
    }
