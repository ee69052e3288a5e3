"""Loads the weights of a model from a GGUF file, dequantised to float32 or in its blocks.

`from_gguf` reads the shapes from the metadata. A key that is not listed here may change what the model
computes: the model is refused with that key's name, as in checkpoint/config.py.

llama.cpp interleaves the two halves of each head in q and k of the llama architecture, because it rotates
neighbours and not halves; here the order is restored. Qwen's heads are stored as they are (llama.cpp:
conversion/llama.py, convert_hf_to_gguf.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray
from torch import Tensor

from services.executor.checkpoint import weights
from services.executor.checkpoint.config import (
    ORIGINAL,
    only,
    plausible,
    refuse,
    rope_fields,
    rotated_dim,
    unknown_key,
)
from services.executor.checkpoint.families import FAMILIES, Family, layer_kinds
from services.executor.checkpoint.stored import Cut, Dense, Stored
from services.executor.model.description import GELU, Options, Part, Shapes, describe
from services.executor.quantised.gguf_values import FAST, FileMatrix, OpenFile, RowsInFile, dequantize
from shared.errors import SetupError
from shared.vocab.files import unreadable
from shared.vocab.gguf import read_header

_MODEL = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "out": "attn_output.weight",
    "out_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "attention_post_norm": "post_attention_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_INTERLEAVED = ("q", "k", "q_bias", "k_bias")
_DEFAULT_ALIGNMENT_BYTES = 32


def load_gguf(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    partition_of: weights.PartitionOf = weights.whole_model,
    load_part: weights.LoadPart = weights.plain_part,
    *,
    packed: bool = False,
) -> tuple[Shapes, weights.Weights]:
    """Shapes and weights of a part of the model in `path`. Memory holds one dequantised whole tensor at a
    time. `packed`: matrices stay in the blocks of the file where kernels know their types. Raises SetupError
    for an unsupported architecture or tensor."""
    tensors = GgufTensors(path)
    shapes = _shapes(path, tensors)
    wanted = {_name(part.name, layer): part.shape for part, layer in describe(shapes).parts()}
    found = {name: entry.shape for name, entry in tensors.entries.items() if name != _ROPE_FACTORS}
    weights.check_tensors(path, found, wanted)

    def find(part: Part, layer: int) -> Stored:
        stored = tensors.stored(_name(part.name, layer), packed=packed)
        if part.name == "embedding" and isinstance(stored, Dense) and device.type == "cpu":
            return tensors.embedding(_MODEL["embedding"], stored)
        if FAMILIES[shapes.architecture].interleaved and part.name in _INTERLEAVED:
            return stored.rows(_halves(stored.shape[0], shapes.head_dim))
        return stored

    partition = partition_of(shapes)
    return partition.shapes, weights.assemble(partition, find, dtype, device, load_part)


def type_of_blocks(path: Path) -> GgmlType | None:
    """The type of the most weights in blocks that kernels multiply with; None if most weights of a file are
    in others. Raises SetupError on a damaged file."""
    from services.executor.quantised.gguf_blocks import can_stay_in_blocks

    tensors, sizes = GgufTensors(path), Counter[GgmlType]()
    for entry in tensors.entries.values():
        sizes[entry.kind] += math.prod(entry.shape)
    found = Counter({kind: size for kind, size in sizes.items() if can_stay_in_blocks(kind)})
    return found.most_common(1)[0][0] if found.total() * 2 > sizes.total() else None


def stored_gguf(path: Path) -> tuple[Shapes, Iterator[weights.StoredTensor]]:
    """The shapes of the whole model in a file, and every stored tensor in order of names. Raises SetupError
    as `load_gguf`."""
    tensors = GgufTensors(path)
    stored = (
        (name, f"{entry.kind.name} {entry.shape}", tensors.raw(name))
        for name, entry in sorted(tensors.entries.items())
    )
    return _shapes(path, tensors), stored


FORMAT = weights.FileFormat(
    load=load_gguf,
    load_in_blocks=functools.partial(load_gguf, packed=True),
    stored=stored_gguf,
    kept_in="int4",
)


def _name(part: str, layer: int) -> str:
    return _MODEL[part] if layer < 0 else f"blk.{layer}.{_LAYER[part]}"


def _shapes(path: Path, tensors: GgufTensors) -> Shapes:
    try:
        shapes = from_gguf(tensors.metadata, tensors.entries)
    except KeyError as error:
        raise SetupError(f"{path} lacks the metadata {error}; pull the model again") from error
    except SetupError as error:
        raise SetupError(f"{path}: {error.message}") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise unreadable(path, "a GGUF file of a model", error) from error
    if _ROPE_FACTORS not in tensors.entries:
        return shapes
    found = {_ROPE_FACTORS: tensors.entries[_ROPE_FACTORS].shape}
    weights.check_tensors(path, found, {_ROPE_FACTORS: (shapes.head_dim // 2,)})
    factors = zip(tensors.read(_ROPE_FACTORS).tolist(), shapes.rope_factors or repeat(1.0), strict=False)
    return dataclasses.replace(shapes, rope_factors=tuple(own * linear for own, linear in factors))


def _halves(rows: int, head_dim: int) -> Tensor:
    """The index of each row of all heads, from (pair, half) to (half, pair) order."""
    return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]  # slowest dimension first, as torch has it
    kind: GgmlType
    start_bytes: int
    size_bytes: int


class GgufTensors:
    """A mapped GGUF file: `metadata`, the `entries` of its tensors by name, and their values. It does not use
    `gguf.GGUFReader`, which first wraps every string of the vocabulary (measured: 2.8 s for 49k tokens)."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises SetupError on a damaged file or an unknown tensor type."""
        self._path = path
        self.metadata, start = read_header(path)
        self._file = OpenFile(path)
        self._data = self._file.mapped()
        self._view = self._data.data
        try:
            self.entries = self._directory(start)
        except (struct.error, UnicodeDecodeError, ValueError, TypeError) as error:
            raise unreadable(path, "a whole GGUF file", error) from error

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor in the file. Raises SetupError without it."""
        entry = self._entry(name)
        return self._data[entry.start_bytes : entry.start_bytes + entry.size_bytes]

    def read(self, name: str) -> Tensor:
        """A tensor, dequantised. Raises SetupError if it is absent or its type cannot be read."""
        entry = self._entry(name)
        try:
            return dequantize(self.raw(name), entry.kind, entry.shape)
        except NotImplementedError as error:  # the gguf library cannot read the type
            raise SetupError(
                f"{self._path}: tensor {name!r} has type {entry.kind.name}, not supported"
            ) from error

    def stored(self, name: str, *, packed: bool) -> Stored:
        """A tensor, `packed` a matrix in its blocks if its type allows. Raises SetupError as `read`."""
        entry = self._entry(name)
        if packed and len(entry.shape) == 2:
            from services.executor.quantised.gguf_blocks import InBlocks, can_stay_in_blocks

            if can_stay_in_blocks(entry.kind):
                return InBlocks.of(self.raw(name), entry.kind, entry.shape[0], self._place(entry))
        return Dense.of(self.read(name))

    def embedding(self, name: str, values: Dense) -> Stored:
        """A matrix with `values`, whose rows can be read from the file if that is fast."""
        entry = self._entry(name)
        if entry.kind != GgmlType.F32 and entry.kind not in FAST:
            return values
        return _Embedding(values, self._place(entry))

    def _place(self, entry: _Entry) -> FileMatrix:
        rows = entry.shape[0]
        return FileMatrix(self._file, entry.start_bytes, rows, entry.size_bytes // rows, entry.kind)

    def _entry(self, name: str) -> _Entry:
        if name not in self.entries:
            raise SetupError(f"{self._path} has no tensor {name!r}: incomplete, or of another architecture")
        return self.entries[name]

    def _directory(self, at: int) -> dict[str, _Entry]:
        count = struct.unpack_from("<Q", self._view, 8)[0]
        parsed: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, at = self._string(at)
            (dimensions,) = struct.unpack_from("<I", self._view, at)
            *shape, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", self._view, at + 4)
            parsed.append((name, tuple(reversed(shape)), kind, offset))
            at += 4 + 8 * dimensions + 12
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES))
        if alignment < 1:
            raise ValueError(f"an alignment of {alignment} bytes")
        base = -(-at // alignment) * alignment
        if len({name for name, *_ in parsed}) < len(parsed):
            raise ValueError("two tensors have one name")
        return {name: self._checked(shape, kind, base + offset) for name, shape, kind, offset in parsed}

    def _checked(self, shape: tuple[int, ...], kind: int, start: int) -> _Entry:
        quantisation = GgmlType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        if not shape or shape[-1] % block:
            raise ValueError(f"a tensor of {list(shape)} is not in whole blocks of {quantisation.name}")
        size = math.prod(shape) // block * block_bytes
        if start + size > self._data.size:
            raise ValueError("a tensor runs past the end")
        return _Entry(shape, quantisation, start, size)

    def _string(self, at: int) -> tuple[str, int]:
        (size,) = struct.unpack_from("<Q", self._view, at)
        return bytes(self._view[at + 8 : at + 8 + size]).decode(), at + 8 + size


@dataclass(frozen=True, slots=True)
class _Embedding(Stored):
    """See Stored. The dequantised matrix. Its rows alone come from the file: a tied head has its own copy, in
    the order of its product."""

    whole: Dense
    place: FileMatrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    @property
    def values(self) -> Tensor:
        return self.whole.values

    def cut(self, cut: Cut) -> Stored:
        return self.whole.cut(cut)

    def loaded(self, dtype: torch.dtype, device: torch.device) -> Stored:
        found = self.whole.loaded(dtype, device)
        return found if device.type != "cpu" else _Embedding(found, self.place)

    def for_rows(self) -> Stored:
        kind, columns = self.place.kind, self.shape[1]
        return RowsInFile.of(
            self.place, self.values.dtype, lambda raw: dequantize(raw, kind, (len(raw), columns))
        )


_LAYERS_OF_27B = 62  # of Gemma 3 27B, which scales its queries by another size
_BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")  # as in llama.cpp
_BY_GGUF = {family.gguf or kind: kind for kind, family in FAMILIES.items() if family.in_gguf}
IN_GGUF = tuple(_BY_GGUF)


def from_gguf(metadata: Mapping[str, Any], tensors: Collection[str]) -> Shapes:
    """Shapes from GGUF metadata (keys: the GGUF specification) and the set of tensor names. Raises SetupError
    for an unsupported model; KeyError, TypeError or ValueError for damaged metadata. The loader
    reads factors that differ by frequency from the tensor `rope_freqs.weight`."""
    kind = str(metadata.get("general.architecture", "(none)"))
    if kind not in IN_GGUF:
        raise refuse(f"GGUF architecture {kind!r}", IN_GGUF)
    check_gguf(metadata, kind)
    metadata = {**metadata, **_of_all_layers(metadata, kind)}
    heads = int(metadata[f"{kind}.attention.head_count"])
    hidden = int(metadata[f"{kind}.embedding_length"])
    head_dim = rotated_dim(int(metadata.get(f"{kind}.attention.key_length", hidden // heads)))
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(metadata.get(f"{kind}.{key}", head_dim)) != head_dim:
            raise refuse(f"{key} {metadata[f'{kind}.{key}']} with heads of {head_dim}", IN_GGUF)
    theta = float(metadata.get(f"{kind}.rope.freq_base", 10000.0))
    context = int(metadata[f"{kind}.context_length"])
    family, window = FAMILIES[_BY_GGUF[kind]], int(metadata.get(f"{kind}.attention.sliding_window", 0))
    rotation = rope_fields(gguf_rope(metadata, kind, context), theta, head_dim, context)
    if window and not family.windows:  # up to which both compute the same
        rotation["max_context"] = min(rotation["max_context"], window)
    return plausible(Shapes(
        architecture=_BY_GGUF[kind],
        layers=int(metadata[f"{kind}.block_count"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(metadata.get(f"{kind}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate=int(metadata[f"{kind}.feed_forward_length"]),
        vocab=len(metadata["tokenizer.ggml.tokens"]),
        norm_eps=float(metadata[f"{kind}.attention.layer_norm_rms_epsilon"]),
        rope_theta=theta,
        **rotation,
        sliding_window=0 if family.full_each else window,
        options=_gguf_options(family, metadata, kind, head_dim) if family.gguf else Options(),
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    ))  # fmt: skip


def _gguf_options(family: Family, metadata: Mapping[str, Any], kind: str, head_dim: int) -> Options:
    """Options of a family with a name of its own in GGUF files. What these leave out is as in llama.cpp."""
    hidden, heads = int(metadata[f"{kind}.embedding_length"]), int(metadata[f"{kind}.attention.head_count"])
    layers, window = int(metadata[f"{kind}.block_count"]), int(metadata[f"{kind}.attention.sliding_window"])
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "head_dim": head_dim,
        "query_pre_attn_scalar": hidden // heads if layers == _LAYERS_OF_27B else head_dim,
    }
    kinds = layer_kinds(config, family.full_each)
    return Options(
        windows=tuple(window * windowed for windowed in kinds),
        local_rope=(float(metadata.get(f"{kind}.rope.freq_base_swa", 10000.0)), ()),
        **{"act": GELU, **family.computes(config), "norm_offset": 0.0},
    )


def _of_all_layers(metadata: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The number of all layers for keys that have one for each layer. Raises SetupError if layers differ, and
    ValueError for another count of them."""
    found = {}
    for key in (f"{kind}.{name}" for name in _BY_LAYER):
        if isinstance(numbers := metadata.get(key), list):
            if len(numbers) != metadata[f"{kind}.block_count"]:
                raise ValueError(f"{key} has {len(numbers)} numbers, and not one for each layer")
            if len({*numbers}) > 1:
                raise refuse(f"{key} with layers of different sizes, {numbers!r:.60},", IN_GGUF)
            found[key] = numbers[0]
    return found


_GGUF = {  # by llama.cpp's name of a rope.scaling key
    "type": "rope_type", "factor": "factor", "original_context_length": ORIGINAL,
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip


def gguf_rope(metadata: Mapping[str, Any], kind: str, context: int) -> dict[str, Any]:
    """The rope settings of a GGUF file as a config.json has them. As in llama.cpp a factor without a type is
    linear, and a type without a factor changes nothing. Raises SetupError for an unsupported type."""
    given = {own: metadata.get(f"{kind}.rope.scaling.{name}") for name, own in _GGUF.items()}
    given["rope_type"] = given["rope_type"] or "linear"
    if given["rope_type"] not in ("none", "linear", "yarn"):
        raise SetupError(f"rope scaling {given['rope_type']!r} in a GGUF file is not supported; use another")
    if given["rope_type"] == "none" or given["factor"] in (None, 0.0, 1.0):
        return {}
    return {**given, ORIGINAL: given[ORIGINAL] or context}


_GGUF_NAMESPACES = ("general.", "tokenizer.", "quantize.", "mradermacher.")
_GGUF_READ = frozenset((
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
    "rope.freq_base_swa",
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


def check_gguf(metadata: Mapping[str, Any], kind: str) -> None:
    """Raises SetupError for the first metadata key that may change what a model of this architecture
    computes."""
    for key, value in metadata.items():
        name = key.removeprefix(f"{kind}.")
        if key.startswith((*_GGUF_NAMESPACES, "split.")):
            continue
        if name == key or name not in _GGUF_READ | _GGUF_ONE_VALUE.keys():
            raise unknown_key(key, value, "the GGUF file")
        if name in _GGUF_ONE_VALUE:
            only(metadata, key, _GGUF_ONE_VALUE[name], "the GGUF file")
