"""Assembles Weights, a model as the forward pass reads it, from Hugging Face folders or random numbers.

Projections that read the same input are joined, so that a layer is four matrix products:

    qkv [(heads + 2 * kv_heads) * head_dim, hidden] · out · gate_up [2 * intermediate, hidden] · down

Experts are stacked: gate_up [experts, 2 * width, hidden], down [experts, hidden, width].

`load_hf` reads config.json and one or more *.safetensors files. `load_dummy` draws random weights in the
shapes of a config.json, for benchmarks of models that are not on this machine. gguf.py uses `assemble`, too.
"""

from __future__ import annotations

import functools
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.executor.checkpoint.config import Shapes, read_shapes
from services.executor.checkpoint.partition import Cut, Shard, ShardOf, whole_model
from shared.errors import SetupError
from shared.vocab.files import unreadable

log = logging.getLogger("headrace.executor")

PROGRESS_S = 1.0  # between two progress lines

# Reads a part of a layer (or of the model, with layer -1) as [out, in], with a cut only that part; q and k
# in the order for a rotation of halves. Experts are read as "experts_gate_up" and "experts_down", joined.
ReadTensor = Callable[[str, int, Cut | None], Tensor]

StoredTensor = tuple[str, str, NDArray[np.uint8]]  # in a file: name, type and shape, bytes (mapped)

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
# The names of the router, of the experts, and of an expert's gate, up and down.
_EXPERTS = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}
_PLAIN = ("F64", "F32", "F16", "BF16")
_NOT_STORED = (".rotary_emb.inv_freq",)  # in old files; they follow from the configuration
_DUMMY_STD = 0.02  # of random weights, as in the initialisation of models: activations stay in range
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are `[out, in]`, norms `[width]`. A sparse layer has a `router` `[experts,
    hidden]`, and `gate_up` and `down` of all experts, stacked."""

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
    """A model, or a rank's part. Where they are tied, `head` is `embedding` itself. The engine removes the
    layers one by one, so that plain matrices are freed while it makes packed ones."""

    embedding: Tensor  # [vocab, hidden]
    norm: Tensor
    head: Tensor  # [vocab, hidden]; with several ranks, this rank's rows
    layers: list[LayerWeights]


def assemble(shard: Shard, read: ReadTensor, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read every tensor of a rank's part through `read` and assemble the weights on `device`."""
    shapes = shard.shapes

    def take(part: str, layer: int = -1) -> Tensor:
        return read(part, layer, shard.cuts.get(part)).to(device=device, dtype=dtype)

    def joined(parts: tuple[str, ...], layer: int) -> Tensor:
        return torch.cat([take(part, layer) for part in parts])

    shown_s = time.monotonic()

    def layer(i: int) -> LayerWeights:
        nonlocal shown_s
        if time.monotonic() - shown_s >= PROGRESS_S:
            shown_s = time.monotonic()
            log.info("loading weights: layer %d of %d …", i - shard.first_layer, shapes.layers)
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


def parts_of(shapes: Shapes) -> Iterator[tuple[str, int]]:
    """Every part of a whole model that `assemble` reads, with its layer."""
    yield from (("embedding", -1), ("norm", -1), *([("head", -1)] * (not shapes.tied)))
    parts = ["attention_norm", "mlp_norm", "q", "k", "v", "out"]
    parts += ["q_bias", "k_bias", "v_bias"] * shapes.qkv_bias + ["q_norm", "k_norm"] * shapes.qk_norm
    for layer in range(shapes.layers):
        sparse = shapes.sparse(layer)
        mlp = ["router", "experts_gate_up", "experts_down"] if sparse else ["gate", "up", "down"]
        yield from ((part, layer) for part in parts + mlp)


def check_tensors(
    where: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises SetupError if a file has tensors that the model does not use, lacks some, or has other
    shapes."""
    unknown = sorted(found.keys() - wanted.keys())
    if unknown:
        raise SetupError(
            f"{where} has tensors that this executor does not compute: {', '.join(unknown[:3])}"
            f"{' …' * (len(unknown) > 3)} ({len(unknown)} in all), so the model is not supported; use "
            "a plain one, unquantised, without adapters or heads of its own"
        )
    for name, size in wanted.items():
        if name not in found:
            raise SetupError(f"{where} has no tensor {name!r}: incomplete, or another model; fetch it again")
        if found[name] != size:
            raise SetupError(
                f"{where}: tensor {name!r} is {list(found[name])}, where the model's configuration gives "
                f"{list(size)}; fetch the model again"
            )


def load_hf(
    folder: Path, dtype: torch.dtype, device: torch.device, shard_of: ShardOf = whole_model
) -> tuple[Shapes, Weights]:
    """Shapes and weights of a part of the model in `folder`; only that part is read. Raises SetupError for an
    unsupported or incomplete model."""
    shapes = read_shapes(folder)
    tensors = _Tensors(folder)
    tensors.check(shapes)

    def read(part: str, layer: int, cut: Cut | None) -> Tensor:
        if part not in ("experts_gate_up", "experts_down"):
            return tensors.read(_hf_name(shapes.architecture, part, layer), cut)
        assert shapes.experts is not None, "only a model with experts has these parts"
        some = range(shapes.experts.count) if cut is None else range(cut.begin, cut.end)
        each = (_expert_names(shapes.architecture, part, layer, expert) for expert in some)
        return torch.stack([torch.cat([tensors.read(name, None) for name in names]) for names in each])

    shard = shard_of(shapes)
    return shard.shapes, assemble(shard, read, dtype, device)


def load_dummy(
    folder: Path, dtype: torch.dtype, device: torch.device, shard_of: ShardOf = whole_model
) -> tuple[Shapes, Weights]:
    """Shapes of a part of `folder`/config.json, and weights drawn on `device`; norms are ones. Each tensor
    has its own seed, so all ranks hold parts of one model. Raises SetupError for an unsupported model or a
    folder without config.json."""
    shapes = read_shapes(folder)
    generator = torch.Generator(device)
    sizes = part_sizes(shapes)

    def read(part: str, layer: int, cut: Cut | None) -> Tensor:
        if part.endswith("norm"):
            return torch.ones(sizes[part], dtype=dtype, device=device)
        generator.manual_seed(zlib.crc32(f"{_SEED} {layer} {part}".encode()))
        values = torch.empty(sizes[part], device=device)  # float32: the same numbers in every dtype
        values = values.normal_(0.0, _DUMMY_STD, generator=generator).to(dtype)
        return values if cut is None else cut.of(values)

    shard = shard_of(shapes)
    return shard.shapes, assemble(shard, read, dtype, device)


def _hf_name(architecture: str, part: str, layer: int) -> str:
    if layer < 0:
        return _MODEL[part]
    name = f"{_EXPERTS[architecture][0]}.weight" if part == "router" else _LAYER[part]
    return f"model.layers.{layer}.{name}"


def _expert_names(architecture: str, part: str, layer: int, expert: int) -> list[str]:
    """The tensors to join for a part of one expert."""
    _, experts, (gate, up, down) = _EXPERTS[architecture]
    names = (down,) if part == "experts_down" else (gate, up)
    return [f"model.layers.{layer}.{experts}.{expert}.{name}.weight" for name in names]


def _hf_sizes(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in a folder with such a model."""
    sizes = part_sizes(shapes)
    for part, layer in parts_of(shapes):
        if part not in ("experts_gate_up", "experts_down"):
            yield _hf_name(shapes.architecture, part, layer), sizes[part]
            continue
        count, rows, width = sizes[part]
        for expert in range(count):
            names = _expert_names(shapes.architecture, part, layer, expert)
            yield from ((name, (rows // len(names), width)) for name in names)


class _Tensors:
    """The tensors of a folder. Its files stay open: experts are many small tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = functools.cache(_opened)
        self._files: dict[str, Path] = {}
        for file in _weight_files(folder):
            names = self._open(file).keys()
            twice = sorted(self._files.keys() & names)
            if twice:
                raise SetupError(f"{folder} has tensor {twice[0]!r} twice, also in {file}; fetch it again")
            self._files.update(dict.fromkeys(names, file))

    def check(self, shapes: Shapes) -> None:
        """Raises SetupError unless the folder has exactly the tensors of such a model, in plain types."""
        sizes = {}
        for name, file in self._files.items():
            stored = self._open(file).get_slice(name)
            if stored.get_dtype() not in _PLAIN:
                raise SetupError(
                    f"{file}: tensor {name!r} is {stored.get_dtype()}; quantised safetensors are not "
                    "supported; use the unquantised model or a GGUF file of it"
                )
            if not name.endswith(_NOT_STORED):
                sizes[name] = tuple(stored.get_shape())
        again = sizes.pop(_MODEL["head"], None) if shapes.tied else None
        check_tensors(self._folder, sizes, dict(_hf_sizes(shapes)))
        if again and not torch.equal(self.read(_MODEL["head"], None), self.read(_MODEL["embedding"], None)):
            raise SetupError(
                f"{self._folder}: config.json sets tie_word_embeddings, but {_MODEL['head']!r} is stored and "
                "is not the embedding; if it is meant, set the key to false, else fetch the model again"
            )

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """A tensor, or the part of it within `cut`."""
        opened = self._open(self._files[name])
        tensor: Tensor = opened.get_tensor(name) if cut is None else _part(opened, name, cut)
        return tensor


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise SetupError(f"{file} is missing: the model is incomplete; fetch it again") from error
    except (SafetensorError, OSError) as error:
        raise unreadable(file, "a whole safetensors file", error) from error


def stored_hf(folder: Path) -> Iterator[StoredTensor]:
    """Every tensor of a folder, in order of names. Raises SetupError as `load_hf`."""
    found: list[StoredTensor] = []
    for file in _weight_files(folder):
        data = np.memmap(file, mode="r", dtype=np.uint8)
        size = int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8 : 8 + size].tobytes()).items():
            if name != "__metadata__":
                begin, end = (8 + size + at for at in entry["data_offsets"])
                found.append((name, f"{entry['dtype']} {entry['shape']}", data[begin:end]))
    return iter(sorted(found, key=lambda tensor: tensor[0]))


def _part(opened: Any, name: str, cut: Cut) -> Tensor:
    lazy = opened.get_slice(name)
    taken: Tensor = lazy[cut.begin : cut.end] if cut.dim == 0 else lazy[:, cut.begin : cut.end]
    return taken


def _weight_files(folder: Path) -> list[Path]:
    """The files with a folder's weights, chosen like transformers: model.safetensors, or the files in the
    index of a sharded model; else all files but Mistral's second copy (consolidated*)."""
    if (folder / "adapter_config.json").is_file():
        raise SetupError(f"{folder} has an adapter (adapter_config.json); merge it into the model first")
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if index.is_file():
        try:
            names = {*json.loads(index.read_text("utf-8"))["weight_map"].values()}
            return [folder / name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(index, "an index of safetensors files", error) from error
    found = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not found:
        raise SetupError(f"{folder} has no *.safetensors file; other weight formats are not supported")
    return found


def part_sizes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shape of every part that `assemble` reads."""
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
