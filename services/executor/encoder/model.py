"""The model of an encoder. Every token reads all tokens of its text: there is no KV cache and no next token.

BERT and its relatives, by their `model_type`. The description has the operations of model/description.py and
three of its own:

    words + positions + type 0, LayerNorm     [tokens, hidden], the texts of a step one after another
    layers:  Projection SelfAttention Projection Add LayerNorm
             Projection Gelu Projection Add LayerNorm
    pooling: the mean of a text's rows, its first or its last

Devlin et al., "BERT", arXiv:1810.04805; pooling: Reimers and Gurevych, arXiv:1908.10084.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.executor.checkpoint.config import HARMLESS, MOST_LAYERS
from services.executor.checkpoint.stored import Dense, in_memory
from services.executor.checkpoint.weights import PLAIN, check_tensors, weight_files
from services.executor.cpu.layers import TorchOperators, table
from services.executor.cpu.linear import Products
from services.executor.engine import LAST_TOKEN
from services.executor.model.description import Add, Layer, Part, Projection, Weight, weights_of
from services.executor.model.program import REFERENCE, Placed, Table, steps_of
from shared.errors import SetupError
from shared.vocab.files import unreadable

# By model_type: the prefix of tensors in checkpoints with a head, and whether positions begin after the id
# of padding.
KINDS: Mapping[str, tuple[str, bool]] = {
    "bert": ("bert.", False),
    "roberta": ("roberta.", True),
    "xlm-roberta": ("roberta.", True),
}
_GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_READ = frozenset((
    "model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "hidden_act", "max_position_embeddings", "type_vocab_size", "layer_norm_eps",
    "pad_token_id",
))  # fmt: skip
_UNUSED = frozenset((  # of training, and of heads that give no vector
    "hidden_dropout_prob", "attention_probs_dropout_prob", "directionality", "output_past",
    "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type", "model_name", "tie_word_embeddings",
))  # fmt: skip
_ONE_VALUE = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
_HEADS = ("pooler.", "cls.", "lm_head.")  # tensors that no vector needs
_OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}  # of TensorFlow
_MODEL = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_POOLINGS = {
    "pooling mean_tokens": "mean",
    "pooling mean": "mean",
    "pooling mean_sqrt_len_tokens": "mean",  # of another length, and every vector gets the length 1
    "pooling cls_token": "first",
    "pooling cls": "first",
    LAST_TOKEN: "last",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShapes:
    """The numbers of a model. `positions` can be used; the first is row `first_position` of their table."""

    kind: str
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    positions: int
    first_position: int
    types: int
    norm_eps: float
    gelu: str  # of torch's `approximate`


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """x and the residual `[tokens, hidden]` become the layer norm of the residual."""

    weight: Weight
    bias: Weight
    eps: float


@dataclass(frozen=True, slots=True)
class Gelu:
    """x becomes the GELU of each number; `approximate` as in torch."""

    approximate: str


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """From x `[tokens, 3 * heads * dim]`, queries, keys and values, to `[tokens, heads * dim]`: each token
    reads all tokens of its text."""

    heads: int
    dim: int


class _Padded(NamedTuple):
    """Texts of similar lengths, each padded to the longest."""

    texts: int
    rows: Tensor | None  # [texts * longest] of the step; None: all of them in order, without padding
    real: Tensor | None  # [texts, 1, 1, longest], false for padding; None: there is none


@dataclass(slots=True)
class _Values:
    """See services.executor.model.program.Values. `back`: where each row of the step is in the groups, one
    after another; None: they are the step."""

    x: Tensor
    residual: Tensor
    groups: Sequence[_Padded]
    back: Tensor | None


def is_encoder(path: Path) -> bool:
    """Whether the folder of a model has an encoder; False for a configuration that nothing can read."""
    try:
        return json.loads((path / "config.json").read_text("utf-8"))["model_type"] in KINDS
    except (OSError, ValueError, TypeError, KeyError):
        return False  # the other loader names what is wrong


def read_shapes(folder: Path) -> EncoderShapes:
    """The shapes of an encoder. Raises SetupError if config.json is damaged or may mean another model."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
        kind = str(config["model_type"])
        _check(config, kind)
        _, after_padding = KINDS[kind]
        first = int(config.get("pad_token_id", 1)) + 1 if after_padding else 0
        shapes = EncoderShapes(
            kind=kind,
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=int(config["num_attention_heads"]),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            positions=int(config["max_position_embeddings"]) - first,
            first_position=first,
            types=int(config.get("type_vocab_size", 2)),
            norm_eps=float(config.get("layer_norm_eps", 1e-12)),
            gelu=_GELUS[str(config.get("hidden_act", "gelu"))],
        )
        counts = (shapes.layers, shapes.hidden, shapes.heads, shapes.positions, shapes.types, shapes.vocab)
        if min(counts) < 1 or shapes.layers > MOST_LAYERS or shapes.hidden % shapes.heads:
            raise ValueError("the sizes fit no model")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(file, "an encoder's configuration", error) from error
    return shapes


def _check(config: Mapping[str, Any], kind: str) -> None:
    """Raises SetupError for the first key that may change what the model computes."""
    plain = kind.replace("-", "")
    for name in config.get("architectures") or ():
        if str(name).lower() not in (f"{plain}model", f"{plain}formaskedlm"):
            raise SetupError(
                f"config.json has architectures {name}, whose head is not supported; use a model for vectors"
            )
    if (gelu := str(config.get("hidden_act", "gelu"))) not in _GELUS:
        raise SetupError(f"activation {gelu!r} of an encoder is not supported, only {', '.join(_GELUS)}")
    for key, value in config.items():
        if key in _ONE_VALUE and value not in (None, _ONE_VALUE[key]):
            raise SetupError(f"{key} = {value!r} in config.json is not supported, only {_ONE_VALUE[key]!r}")
        if value is not None and key not in {*_READ, *_UNUSED, *_ONE_VALUE, *HARMLESS}:
            raise SetupError(
                f"{key} = {value!r:.60} in config.json is not known here and may change what the encoder "
                "computes: not supported; if its authors document that it changes nothing, delete the key"
            )


def describe(shapes: EncoderShapes) -> Layer:
    """The operations of each layer."""
    hidden, wide = shapes.hidden, shapes.intermediate

    def matrix(name: str, rows: int, columns: int) -> tuple[Part, Part]:
        return Part(name, (rows, columns)), Part(f"{name}_bias", (rows,))

    def projection(name: str, *parts: tuple[Part, Part]) -> Projection:
        weights, biases = zip(*parts, strict=True)
        return Projection(Weight(name, weights), Weight(f"{name}_bias", biases))

    def norm(name: str) -> LayerNorm:
        weight, bias = Part(name, (hidden,)), Part(f"{name}_bias", (hidden,))
        return LayerNorm(Weight(name, (weight,)), Weight(f"{name}_bias", (bias,)), shapes.norm_eps)

    return (
        projection("qkv", *(matrix(name, hidden, hidden) for name in "qkv")),
        SelfAttention(shapes.heads, hidden // shapes.heads),
        projection("out", matrix("out", hidden, hidden)),
        Add(),
        norm("attention_norm"),
        projection("up", matrix("up", wide, hidden)),
        Gelu(shapes.gelu),
        projection("down", matrix("down", hidden, wide)),
        Add(),
        norm("mlp_norm"),
    )


class _Tensors:
    """The tensors of a folder, by the names of their parts."""

    def __init__(self, folder: Path, shapes: EncoderShapes) -> None:
        """Raises SetupError unless the folder has exactly the tensors of such a model, and unused heads."""
        self._files: dict[str, tuple[Any, str]] = {}  # by name without prefix: its file, its name there
        sizes: dict[str, tuple[int, ...]] = {}
        for file in weight_files(folder):
            try:
                opened: Any = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise unreadable(file, "a whole safetensors file", error) from error
            for stored in opened.offset_keys():
                name = stored.removeprefix(KINDS[shapes.kind][0])
                for old, new in _OLD_NAMES.items():
                    name = f"{name.removesuffix(old)}{new}" if name.endswith(old) else name
                if name.startswith(_HEADS) or name.endswith(".position_ids"):
                    continue
                if name in self._files:
                    raise SetupError(f"{folder} has tensor {name!r} twice; fetch the model again")
                if (dtype := opened.get_slice(stored).get_dtype()) not in PLAIN:
                    raise SetupError(
                        f"{file}: tensor {stored!r} is {dtype}, not supported; use a plain model"
                    )
                self._files[name] = opened, stored
                sizes[name] = tuple(opened.get_slice(stored).get_shape())
        hidden, positions = shapes.hidden, shapes.positions + shapes.first_position
        wanted: dict[str, tuple[int, ...]] = {
            _name("words", -1): (shapes.vocab, hidden),
            _name("positions", -1): (positions, hidden),
            _name("types", -1): (shapes.types, hidden),
            _name("norm", -1): (hidden,),
            _name("norm_bias", -1): (hidden,),
        }
        parts = [part for op in describe(shapes) for weight in weights_of(op) for part in weight.parts]
        wanted |= {_name(part.name, i): part.shape for part in parts for i in range(shapes.layers)}
        check_tensors(folder, sizes, wanted)

    def read(self, part: str, layer: int, like: Tensor) -> Tensor:
        """In the dtype and on the device of `like`."""
        opened, stored = self._files[_name(part, layer)]
        return in_memory(opened.get_tensor(stored), like.device, like.dtype)


def _name(part: str, layer: int) -> str:
    plain, ending = part.removesuffix("_bias"), "bias" if part.endswith("_bias") else "weight"
    of_model = _MODEL.get(plain) if layer < 0 else f"encoder.layer.{layer}.{_LAYER[plain]}"
    return f"{of_model}.{ending}"


class Encoder:
    """An encoder on its device, for one thread in `torch.inference_mode`."""

    def __init__(
        self, folder: Path, pooling: str, like: Tensor, *, kept_in: str, deterministic: bool
    ) -> None:
        """`pooling`: as checkpoint.config.pooling_of names it. `like` has the dtype and the device. With
        `kept_in` "int8" the matrices are in int8. With `deterministic` the bits of a vector do not depend on
        the other texts of a step. Raises SetupError for a model that is not supported or not whole."""
        if pooling not in _POOLINGS:
            raise SetupError(f"{folder}: {pooling} is not supported for vectors")
        self.shapes = shapes = read_shapes(folder)
        self._pooling, self._one_by_one = _POOLINGS[pooling], deterministic
        tensors = _Tensors(folder, shapes)
        self._words, self._positions, types, self._norm, self._norm_bias = (
            tensors.read(part, -1, like) for part in ("words", "positions", "types", "norm", "norm_bias")
        )
        self._type = types[0].clone()
        self._products = Products(like.dtype, like.device, deterministic=deterministic, kept_in=kept_in)
        takes = REFERENCE  # a GPU's products are torch's, with the bias in the same kernel
        if like.device.type == "cpu":
            takes = table(self._products, TorchOperators(), deterministic=deterministic)
        self._steps = steps_of(_placed(shapes, tensors, like), {**takes, **_OWN}, REFERENCE)

    def compile_products(self, most_rows: int) -> None:
        """Compile the kernels of the products for up to `most_rows` rows, so that no step waits for them."""
        self._products.compile(most_rows, self._norm)

    @property
    def size_bytes(self) -> int:
        """The size of the model in memory."""
        layer = describe(self.shapes)
        parts = (part for op in layer for weight in weights_of(op) for part in weight.parts)
        numbers = self.shapes.layers * sum(torch.Size(part.shape).numel() for part in parts)
        return self._words.nbytes + self._positions.nbytes + numbers * self._words.element_size()

    def vectors(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The vectors `[texts, hidden]` of texts, which are their token ids."""
        if self._one_by_one:
            return torch.cat([self._vectors([text]) for text in texts])
        return self._vectors(texts)

    def _vectors(self, texts: Sequence[Sequence[int]]) -> Tensor:
        lengths, device, shapes = [len(text) for text in texts], self._words.device, self.shapes
        first = shapes.first_position
        ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
        places = np.concatenate([np.arange(first, first + length) for length in lengths])
        ids, places = torch.from_numpy(np.stack((ids, places))).to(device)
        x = self._words[ids] + self._positions[places] + self._type
        x = F.layer_norm(x, (shapes.hidden,), self._norm, self._norm_bias, shapes.norm_eps)
        values = _Values(x, x, *_padded(lengths, device))
        for step, _ in self._steps:
            step(values)
        return self._pooled(values.x, np.array(lengths))

    def _pooled(self, x: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        """`[texts, hidden]` of the rows of all texts."""
        ends = np.cumsum(lengths)
        if self._pooling != "mean":
            chosen = ends - (1 if self._pooling == "last" else lengths)
            return x[torch.from_numpy(chosen).to(x.device)]
        return torch.segment_reduce(x.float(), "mean", lengths=torch.from_numpy(lengths).to(x.device))


def _placed(shapes: EncoderShapes, tensors: _Tensors, like: Tensor) -> Iterator[Placed]:
    for i in range(shapes.layers):
        for op in describe(shapes):
            read = {
                weight.name: torch.cat([tensors.read(part.name, i, like) for part in weight.parts])
                for weight in weights_of(op)
            }
            yield Placed(op, i, {name: Dense.of(values) for name, values in read.items()})


def _padded(lengths: Sequence[int], device: torch.device) -> tuple[list[_Padded], Tensor | None]:
    """See _Values. Lengths up to each power of two are one group: no text is padded to twice its length."""
    if min(lengths) == max(lengths):
        return [_Padded(len(lengths), None, None)], None
    size, begin = np.array(lengths), np.cumsum(lengths) - lengths
    classes = np.array([(length - 1).bit_length() for length in lengths])
    groups, back, before = [], np.empty(size.sum(), np.int64), 0
    for each in np.unique(classes):
        chosen = np.flatnonzero(classes == each)
        places, longest = np.arange(size[chosen].max()), size[chosen].max()
        real = places < size[chosen, None]
        rows = begin[chosen, None] + np.minimum(places, size[chosen, None] - 1)
        back[rows[real]] = before + np.flatnonzero(real)
        before += real.size
        mask = None if real.all() else torch.from_numpy(real).view(-1, 1, 1, longest).to(device)
        groups.append(_Padded(len(chosen), torch.from_numpy(rows.ravel()).to(device), mask))
    return groups, torch.from_numpy(back).to(device)


def _layer_norm(placed: Placed, values: _Values) -> None:
    weight, bias = placed.dense(placed.op.weight), placed.dense(placed.op.bias)
    values.x = values.residual = F.layer_norm(values.residual, (len(weight),), weight, bias, placed.op.eps)


def _gelu(placed: Placed, values: _Values) -> None:
    values.x = F.gelu(values.x, approximate=placed.op.approximate)


def _self_attention(placed: Placed, values: _Values) -> None:
    heads, x = placed.op.heads, values.x
    found = []
    for texts, rows, real in values.groups:
        each = (x if rows is None else x.index_select(0, rows)).view(texts, -1, 3 * heads, placed.op.dim)
        query, key, value = each.transpose(1, 2).chunk(3, 1)  # [texts, heads, longest, dim]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=real)
        found.append(attended.transpose(1, 2).reshape(-1, heads * placed.op.dim))
    joined = found[0] if len(found) == 1 else torch.cat(found)
    values.x = joined if values.back is None else joined.index_select(0, values.back)


_OWN: Table = {
    (kind,): partial(partial, run)
    for kind, run in ((LayerNorm, _layer_norm), (Gelu, _gelu), (SelfAttention, _self_attention))
}
