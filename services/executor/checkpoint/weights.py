"""Assembles Weights, a model as the forward pass reads it, from Hugging Face folders or random numbers.

The description (model/description.py) has the parts of each weight. Projections that read the same input
are one weight, so that a layer is four matrix products:

    qkv [(heads + 2 * kv_heads) * head_dim, hidden] · out · gate_up [2 * intermediate, hidden] · down

Experts are stacked: gate_up [experts, 2 * width, hidden], down [experts, hidden, width].

`load_hf` reads config.json and one or more *.safetensors files. `load_dummy` draws random weights in the
shapes of a config.json, for benchmarks of models that are not on this machine. Other formats `assemble`, too.

Each of several ranks holds a part of a model: a run of layers (a Stage), or a `partition` of every layer, by
the units of its parts (model/description.py):

    q, k, v, gate, up   the rows of its heads and of its part of the MLP's width: no exchange
    out, down           the columns that read those rows: their products are parts of a sum over all ranks
    experts             some whole experts; every rank has all tokens and routes them, and its experts' result
                        is a part of a sum: no other exchange, and no expert is read twice
    head                the rows of its part of the vocabulary: the logits are gathered, so that every rank
                        has the same bits and chooses the same tokens
    embedding, norms    everything: to read an embedding row costs less than the sum that a split would need

Heads are whole: a KV head and the query heads that read it lie on one rank. If the KV heads do not divide
evenly, some ranks have one more (3 on 2 ranks: 2 and 1); so with experts. With more ranks than KV heads,
several ranks hold the same KV head and divide its query heads.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.executor.checkpoint.config import read_shapes
from services.executor.checkpoint.families import FAMILIES, Family
from services.executor.checkpoint.stored import FILES, Cut, Dense, Stored, absent, scheme_of
from services.executor.model.description import (
    ALL_HEADS,
    BY_HEAD,
    BY_KV_HEAD,
    EXPERTS,
    HEADS,
    KV_HEADS,
    ONCE,
    SHARED,
    VOCAB,
    WIDTH,
    Description,
    Part,
    Shapes,
    Weight,
    describe,
    shared_numbers,
    weights_of,
)
from services.executor.parallel.ranks import Ranks
from shared.errors import SetupError
from shared.vocab.files import unreadable

if TYPE_CHECKING:
    from torch.distributed import Work


_UNIT = 16  # matrix units compute multiples of it: a rank's part is one if the whole width is


_NOTHING = Cut(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A rank's part. `shapes` has its heads, KV heads, MLP width and layers, and the whole vocabulary."""

    shapes: Shapes
    head_rows: int  # of the head, the same on every rank; rows after the vocabulary's end are zeros
    cuts: dict[str, Cut]  # by part; parts without a cut are whole
    first: bool = True  # else its parts of the units ONCE are zeros


PartitionOf = Callable[[Shapes], Partition]  # which part of a model to load


class Stage:
    """Stage `index` of `count` of a pipeline; `index` is also its rank. A single stage sends nothing.

        stage 0: embedding, layers ── residual stream ──▶ stage 1: layers ── ··· ──▶ last: layers, norm, head

    A stage sends only the sum that the next layer's norm reads. It waits for the stage before in its own
    stream of work (gloo on CPUs, NCCL on GPUs). Sampled tokens return through the hosts, so no GPU waits for
    a later stage."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.first, self.last = index == 0, index + 1 == count
        self._sent: Work | None = None  # on a CPU: it holds what it sends

    def receive(self, rows: Tensor) -> Tensor:
        """Fill `rows` with the rows from the stage before, and return it. On a GPU this is queued."""
        torch.distributed.recv(rows, self.index - 1)
        return rows

    def send(self, rows: Tensor) -> None:
        """Send `rows` to the next stage. On a GPU this is queued, and ends when the next stage receives. On a
        CPU it waits for the send before, and `rows` must not be changed."""
        if rows.is_cuda:
            torch.distributed.send(rows, self.index + 1)
            return
        if self._sent is not None:
            self._sent.wait()
        self._sent = torch.distributed.isend(rows, self.index + 1)


WHOLE = Stage(0, 1)


def whole_model(whole: Shapes) -> Partition:
    """The part of a single rank: everything."""
    return partition(whole, 0, 1)


def partition(whole: Shapes, rank: int, size: int) -> Partition:
    """The part of rank `rank` of `size`. Raises SetupError with too few heads or experts."""
    if size == 1:
        return Partition(shapes=whole, head_rows=whole.vocab, cuts={})
    width = _UNIT if whole.intermediate % _UNIT == 0 else 1
    units = whole.intermediate // width
    if size > min(whole.heads, units):
        raise SetupError(
            f"{size} ranks are too many for {whole.heads} heads and an MLP of {whole.intermediate}: use fewer"
        )
    keys, queries = _heads(whole, rank, size)
    begin, end = (share * width for share in _share(units, rank, size))
    rows = -(-whole.vocab // (_UNIT * size)) * _UNIT
    if whole.qk_norm and whole.options.qk_norm_kind == ALL_HEADS:
        raise SetupError(f"{whole.architecture} norms all heads at once: use one rank, or pipeline stages")
    shared = _share(whole.options.shared_width, rank, size)
    held = {
        HEADS: (queries[0] * whole.head_dim, queries[1] * whole.head_dim),
        KV_HEADS: (keys[0] * whole.head_dim, keys[1] * whole.head_dim),
        BY_HEAD: queries,
        BY_KV_HEAD: keys,
        WIDTH: (begin, end),
        SHARED: shared,
        VOCAB: (min(rank * rows, whole.vocab), min((rank + 1) * rows, whole.vocab)),
    }
    local = replace(
        whole, heads=queries[1] - queries[0], kv_heads=keys[1] - keys[0], intermediate=end - begin,
        options=replace(whole.options, shared_width=shared[1] - shared[0]),
    )  # fmt: skip
    if whole.experts is not None:
        if size > whole.experts.count:
            raise SetupError(f"{size} ranks are too many for {whole.experts.count} experts: use fewer")
        held[EXPERTS] = _share(whole.experts.count, rank, size)
        local = replace(local, experts=replace(whole.experts, first=held[EXPERTS][0]))
    description = describe(whole)
    parts = (*description.head.parts, *(part for part, _ in description.parts()))
    cuts = {part.name: Cut(part.dim, *held[part.units]) for part in parts if part.units in held}
    return Partition(shapes=local, head_rows=rows, cuts=cuts, first=rank == 0)


def stage_partition(whole: Shapes, stage: Stage) -> Partition:
    """The part of a stage: its layers, on the first stage also the embedding, on the last also the head
    (which may be the embedding). Raises SetupError as `layers_of`."""
    if stage.count == 1:
        return whole_model(whole)
    first, end = layers_of(whole, stage.index, stage.count)
    cuts = {}
    if not (stage.first or (stage.last and whole.tied)):
        cuts["embedding"] = _NOTHING
    if not stage.last:
        cuts["head"] = _NOTHING
    local = replace(whole, layers=end - first, first_layer=first)
    return Partition(shapes=local, head_rows=whole.vocab if stage.last else 0, cuts=cuts)


def layers_of(whole: Shapes, index: int, count: int) -> tuple[int, int]:
    """The layers of a stage, from the first to one after the last. Stages read about the same number of
    weights; the head's weights count for the last stage. Raises SetupError for fewer layers than stages."""
    if whole.layers < count:
        raise SetupError(f"{count} stages are too many for {whole.layers} layers: use fewer")
    head = whole.vocab * whole.hidden / max(map(shared_numbers, describe(whole).layers))

    def begin(stage: int) -> int:
        even = round((whole.layers + head) * stage / count)
        return min(max(even, stage), whole.layers - (count - stage))

    return begin(index), begin(index + 1)


def gathered_logits(own: Tensor, vocab: int, ranks: Ranks) -> Tensor:
    """Logits `[samples, vocab]` from every rank's `[samples, head_rows]`, without the padding at the end."""
    if ranks.size == 1 or not len(own):
        return own[:, :vocab]
    found = ranks.all_gather(own).transpose(0, 1).reshape(len(own), -1)
    return found[:, :vocab].contiguous()


def _heads(whole: Shapes, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The KV heads and query heads of a rank, each from the first to one after the last."""
    group = whole.heads // whole.kv_heads
    if size <= whole.kv_heads:
        first, end = _share(whole.kv_heads, rank, size)
        return (first, end), (first * group, end * group)
    head = rank * whole.kv_heads // size
    sharing = [other for other in range(size) if other * whole.kv_heads // size == head]
    first, end = _share(group, rank - sharing[0], len(sharing))
    return (head, head + 1), (head * group + first, head * group + end)


def _share(units: int, rank: int, size: int) -> tuple[int, int]:
    """The units of a rank, from the first to one after the last: even, with the remainder on the first
    ranks."""
    each, more = divmod(units, size)
    begin = rank * each + min(rank, more)
    return begin, begin + each + (rank < more)


log = logging.getLogger("headrace.executor")

PROGRESS_S = 1.0  # between two progress lines

# Finds a part of a layer (or of the model, with layer -1); q and k in the order for a rotation of halves.
FindPart = Callable[[Part, int], Stored]
# Loads a part that was found, for a computation in a dtype, to a device.
LoadPart = Callable[[Part, Stored, torch.dtype, torch.device], Stored]

StoredTensor = tuple[str, str, NDArray[np.uint8]]  # in a file: name, type and shape, bytes (mapped)

# The names of the parts in a Hugging Face folder.
_MODEL = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "norm_bias": "model.norm.bias",
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
    "out_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
_ROTATED = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")
_STACKED = ("experts_gate_up", "experts_down", "experts_gate_up_bias", "experts_down_bias")
PLAIN, _E4M3 = ("F64", "F32", "F16", "BF16"), "F8_E4M3"  # types, as safetensors names them
_NOT_STORED = (".rotary_emb.inv_freq",)  # in old files; they follow from the configuration
_DUMMY_STD = 0.02  # of random weights, as in the initialisation of models: activations stay in range
_SEED = 7


LayerWeights = dict[str, Stored]  # of one layer, by name of the description's weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model, or a rank's part. Where they are tied, `head` is `embedding` itself. The engine removes the
    layers one by one, so that plain matrices are freed while it makes packed ones."""

    embedding: Stored  # [vocab, hidden]
    norm: Tensor
    norm_bias: Tensor | None = None
    head: Stored  # [vocab, hidden]; with several ranks, this rank's rows
    layers: list[LayerWeights]

    @property
    def norms(self) -> LayerWeights:
        """The weights of the norm after the last layer."""
        biases = {} if self.norm_bias is None else {"norm_bias": Dense.of(self.norm_bias)}
        return {"norm": Dense.of(self.norm), **biases}


def plain_part(part: Part, stored: Stored, dtype: torch.dtype, device: torch.device) -> Stored:
    """A part as it is stored, with plain numbers in `dtype`."""
    return stored.loaded(dtype, device)


def assemble(
    partition: Partition,
    find: FindPart,
    dtype: torch.dtype,
    device: torch.device,
    load_part: LoadPart = plain_part,
) -> Weights:
    """Load every weight of a rank's part, from the places that `find` gives, to `device`."""
    description, order = describe(partition.shapes), pairs_in_halves(partition.shapes)
    offset = partition.shapes.options.norm_offset

    def load_one(part: Part, layer: int) -> Stored:
        read = _within(find(part, layer), partition.cuts.get(part.name))
        if offset and part.name.endswith("norm"):
            read = Dense.of(read.values.float() + offset)
        found = load_part(part, read, dtype, device)
        if part.units == ONCE and not partition.first:
            return Dense.of(torch.zeros_like(found.values))
        if part.name not in _ROTATED or len(order) == 0:
            return found
        if part.units in (BY_HEAD, BY_KV_HEAD):
            return Dense.of(found.values[:, order])
        return found.rows(torch.arange(found.shape[0]).view(-1, len(order))[:, order].flatten())

    def load(weight: Weight, layer: int = -1) -> Stored:
        first, *more = (load_one(part, layer) for part in weight.parts)
        return first.join(more)

    shown_s = time.monotonic()
    layers: list[LayerWeights] = []
    for i, ops in enumerate(description.layers):
        if time.monotonic() - shown_s >= PROGRESS_S:
            shown_s = time.monotonic()
            log.info("loading weights: layer %d of %d …", i, partition.shapes.layers)
        weights = (weight for op in ops for weight in weights_of(op))
        layers.append({weight.name: load(weight, partition.shapes.first_layer + i) for weight in weights})
    embedding = load(description.embedding)
    tied = partition.shapes.tied
    head = _within(embedding, partition.cuts.get("head")) if tied else load(description.head)
    missing = partition.head_rows - head.shape[0]
    return Weights(
        embedding=embedding,
        norm=load(description.norm.weight).values,
        norm_bias=None if (bias := description.norm.bias) is None else load(bias).values,
        head=Dense.of(F.pad(head.values, (0, 0, 0, missing))) if missing else head,
        layers=layers,
    )


def pairs_in_halves(shapes: Shapes) -> Tensor:
    """The order of a head's rows in which the pairs of a partial rotation, or of one of neighbours, too, are
    half a head apart, as the kernels rotate. Scores stay: q and k change alike. Empty if they are so."""
    rotated = 2 * sum(map(math.isfinite, shapes.rope_factors or (1.0,) * (shapes.head_dim // 2)))
    neighbours = shapes.options.neighbours
    if rotated == shapes.head_dim and not neighbours:
        return torch.empty(0, dtype=torch.long)
    rows = torch.arange(shapes.head_dim)
    pairs = (rows[:rotated:2], rows[1:rotated:2]) if neighbours else rows[:rotated].chunk(2)
    halves = zip(pairs, rows[rotated:].chunk(2), strict=True)
    return torch.cat([part for half in halves for part in half])


def _within(part: Stored, cut: Cut | None) -> Stored:
    return part if cut is None else part.cut(cut)


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
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    partition_of: PartitionOf = whole_model,
    load_part: LoadPart = plain_part,
) -> tuple[Shapes, Weights]:
    """Shapes and weights of a part of the model in `folder`; only that part is read. Raises SetupError for an
    unsupported or incomplete model."""
    shapes = read_shapes(folder)
    tensors, names = _Tensors(folder), TensorNames(shapes)
    tensors.check(shapes, names)

    def find(part: Part, layer: int) -> Stored:
        if part.name in _STACKED:
            kind = _StackedExperts if names.are_stacked else _Experts
            return Dense.of(kind(tensors, names, part.name, layer), part.shape)
        name, cut = names.tensor_of(part, layer)
        return _within(tensors.stored(name), cut)

    partition = partition_of(shapes)
    return partition.shapes, assemble(partition, find, dtype, device, load_part)


def load_dummy(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    partition_of: PartitionOf = whole_model,
    load_part: LoadPart = plain_part,
) -> tuple[Shapes, Weights]:
    """Shapes of a part of `folder`/config.json, and weights drawn on `device`; norms are ones. Each tensor
    has its own seed, so all ranks hold parts of one model. Raises SetupError for an unsupported model or a
    folder without config.json."""
    shapes = read_shapes(folder)
    generator = torch.Generator(device)
    sizes = {part.name: part.shape for part, _ in describe(shapes).parts()}

    def find(part: Part, layer: int) -> Stored:
        if part.name.endswith("norm"):
            return Dense.of(torch.ones(sizes[part.name], dtype=dtype, device=device))
        generator.manual_seed(zlib.crc32(f"{_SEED} {layer} {part.name}".encode()))
        values = torch.empty(sizes[part.name], device=device)  # float32: the same numbers in every dtype
        return Dense.of(values.normal_(0.0, _DUMMY_STD, generator=generator).to(dtype))

    partition = partition_of(shapes)
    return partition.shapes, assemble(partition, find, dtype, device, load_part)


_PREFIX, _BARE = "model.", "embed_tokens.weight"  # sentence-transformers writes names without the prefix


class TensorNames:
    """The names of a model's tensors in a folder."""

    def __init__(self, shapes: Shapes) -> None:
        self._family: Family = FAMILIES[shapes.architecture]
        self._description: Description = describe(shapes)
        self._layer = {**_LAYER, **self._family.tensors}
        if self._family.experts is not None:
            self._layer["router"] = f"{self._family.experts.router}.weight"
        weights = {weight for ops in self._description.layers for op in ops for weight in weights_of(op)}
        self._joined: dict[str, tuple[str, Cut]] = {}  # parts of a tensor, with their rows
        for weight in weights:
            begin = 0
            for part in weight.parts if weight.name in self._family.tensors else ():
                self._joined[part.name] = weight.name, Cut(0, begin, begin := begin + part.shape[0])

    def tensor_of(self, part: Part, layer: int) -> tuple[str, Cut | None]:
        """The tensor with a part, and its rows there; None: all."""
        if layer < 0:
            return _MODEL[part.name], None
        name, cut = self._joined.get(part.name, (part.name, None))
        return f"model.layers.{layer}.{self._layer[name]}", cut

    @property
    def are_stacked(self) -> bool:
        """Whether all experts of a layer are one tensor."""
        return self._family.experts is not None and self._family.experts.stacked

    def stack(self, part: str, layer: int) -> str:
        """The tensor with a part of all experts."""
        names = self._family.experts
        assert names is not None, "only a model with experts has these parts"
        name = names.matrices[2 if "down" in part else 0] + "_bias" * part.endswith("bias")
        return f"model.layers.{layer}.{names.experts}.{name}"

    def expert(self, part: str, layer: int, expert: int) -> list[str]:
        """The tensors to join for a part of one expert."""
        names = self._family.experts
        assert names is not None, "only a model with experts has these parts"
        gate, up, down = names.matrices
        each = (down,) if part == "experts_down" else (gate, up)
        return [f"model.layers.{layer}.{names.experts}.{expert}.{name}.weight" for name in each]

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of such a model."""
        found: dict[str, tuple[int, ...]] = {}
        for part, layer in self._description.parts():
            if part.name in _STACKED and self.are_stacked:
                found[self.stack(part.name, layer)] = part.shape[:1] + part.shape[:0:-1]
                continue
            if part.name in _STACKED:
                count, rows, width = part.shape
                for expert in range(count):
                    names = self.expert(part.name, layer, expert)
                    found |= dict.fromkeys(names, (rows // len(names), width))
                continue
            name, cut = self.tensor_of(part, layer)
            found[name] = part.shape if cut is None else (cut.end, *part.shape[1:])  # the last part ends it
        return found


class _Tensors:
    """The tensors of a folder. Its files stay open: experts are many small tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scheme = scheme_of(json.loads((folder / "config.json").read_text("utf-8")))
        self._open = functools.cache(_opened)
        self._files: dict[str, Path] = {}
        for file in weight_files(folder):
            names = self._open(file).keys()
            twice = sorted(self._files.keys() & names)
            if twice:
                raise SetupError(f"{folder} has tensor {twice[0]!r} twice, also in {file}; fetch it again")
            self._files.update(dict.fromkeys(names, file))
        self._bare = _BARE in self._files
        if self._bare:
            head = _MODEL["head"]
            self._files = {n if n == head else f"{_PREFIX}{n}": f for n, f in self._files.items()}

    def check(self, shapes: Shapes, names: TensorNames) -> None:
        """Raises SetupError unless the folder has exactly the tensors of such a model, in plain types."""
        sizes, of_weights = {}, set[str]()
        for name, file in self._files.items():
            stored = self._open(file).get_slice(self._name(name))
            kind = stored.get_dtype()
            if weight := self._scheme.weight_of(name, self._files):
                if weight in self._files:
                    raise SetupError(f"{file} has {name!r} and also {weight!r}; fetch the model again")
                if weight not in sizes:
                    sizes[weight] = self.stored(weight).shape
                continue
            if scales := self._scheme.scales_of(name, kind, self._files):
                of_weights.add(scales)
            elif kind not in PLAIN:
                raise SetupError(
                    f"{file}: tensor {name!r} is {kind}{', without scales' * (kind == _E4M3)}; quantised "
                    "safetensors of this kind are not supported; use the unquantised model or a GGUF file"
                )
            if not name.endswith(_NOT_STORED):
                sizes[name] = tuple(stored.get_shape())
        sizes = {name: size for name, size in sizes.items() if name not in of_weights}
        again = sizes.pop(_MODEL["head"], None) if shapes.tied else None
        wanted = names.sizes()
        if self._scheme.has_empty_biases:
            added = [name for name in sizes if name.endswith(".bias") and name not in wanted]
            for name in added:
                if not self.read(name).any():
                    del sizes[name]
        check_tensors(self._folder, sizes, wanted)
        head, embedding = _MODEL["head"], _MODEL["embedding"]
        if again and not torch.equal(self.stored(head).values, self.stored(embedding).values):
            raise SetupError(
                f"{self._folder}: config.json sets tie_word_embeddings, but {_MODEL['head']!r} is stored and "
                "is not the embedding; if it is meant, set the key to false, else fetch the model again"
            )

    def read(self, name: str) -> Tensor:
        """A whole tensor, in the file's memory."""
        tensor: Tensor = self._open(self._files[name]).get_tensor(self._name(name))
        return tensor

    def _name(self, name: str) -> str:
        """The name in the file."""
        return name.removeprefix(_PREFIX) if self._bare else name

    def stored(self, name: str) -> Stored:
        """A tensor, not yet read. Raises SetupError for scales that do not fit."""
        return self._scheme.stored(name, self._files, self._lazy)

    def _lazy(self, name: str) -> Dense:
        lazy = self._open(self._files[name]).get_slice(self._name(name))
        return Dense.of(_InFile(self, name, lazy), lazy.get_shape())


@dataclass(frozen=True, slots=True)
class _InFile:
    tensors: _Tensors
    name: str
    lazy: Any

    @property
    def kind(self) -> str:
        return str(self.lazy.get_dtype())

    def __getitem__(self, at: tuple[slice, ...]) -> Tensor:
        whole = [each.stop - each.start for each in at] == [*self.lazy.get_shape()]
        found: Tensor = self.tensors.read(self.name) if whole else self.lazy[at]
        return found


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of a layer, stacked: each is some tensors, joined, or with `matrices` not yet read."""

    tensors: _Tensors
    names: TensorNames
    part: str
    layer: int

    def __getitem__(self, at: tuple[slice, ...]) -> Tensor:
        some = range(at[0].start, at[0].stop)
        joined = torch.cat([each.values for each in self.matrices(some)])
        return joined.view(len(some), -1, joined.shape[1])

    def matrices(self, experts: range) -> Iterator[Stored]:
        for expert in experts:
            yield from map(self.tensors.stored, self.names.expert(self.part, self.layer, expert))


@dataclass(frozen=True, slots=True)
class _StackedExperts:
    """The same of one tensor, `[experts, in, out]`, in which rows of gate and up alternate; or its bias."""

    tensors: _Tensors
    names: TensorNames
    part: str
    layer: int

    def __getitem__(self, at: tuple[slice, ...]) -> Tensor:
        stack = self.tensors.stored(self.names.stack(self.part, self.layer))
        found = stack.cut(Cut(0, at[0].start, at[0].stop)).values
        if "gate_up" in self.part:
            found = torch.cat((found[..., ::2], found[..., 1::2]), -1)
        return found if found.dim() == 2 else found.mT.contiguous()

    def matrices(self, experts: range) -> Iterator[Stored]:
        """Each expert's."""
        raise SetupError("experts in one tensor cannot be kept quantised; use dtype bf16")


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
    for file in weight_files(folder):
        _opened(file)  # it checks the header and the size
        data = np.memmap(file, mode="r", dtype=np.uint8)
        size = int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8 : 8 + size].tobytes()).items():
            if name != "__metadata__":
                begin, end = (8 + size + at for at in entry["data_offsets"])
                found.append((name, f"{entry['dtype']} {entry['shape']}", data[begin:end]))
    return iter(sorted(found, key=lambda tensor: tensor[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """A format of files with weights. `load` is as load_hf; so is `load_in_blocks`, with matrices as they are
    in the file where a product takes them so; `stored` gives the shapes of the whole model, and every tensor
    in order of names; `kept_in`: the dtype that keeps its weights so on a GPU."""

    load: Callable[..., tuple[Shapes, Weights]]
    load_in_blocks: Callable[..., tuple[Shapes, Weights]]
    stored: Callable[[Path], tuple[Shapes, Iterator[StoredTensor]]]
    kept_in: str = ""


def format_of(path: Path) -> FileFormat:
    """The format of the model at `path`. Raises SetupError for a file if no format of files is here."""
    if path.suffix in FILES:
        found: FileFormat = resolve_name(FILES[path.suffix])
        return found
    if not FILES and path.is_file():
        raise absent(str(path))
    return FileFormat(
        load=load_hf, load_in_blocks=load_hf, stored=lambda folder: (read_shapes(folder), stored_hf(folder))
    )


def weight_files(folder: Path) -> list[Path]:
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
