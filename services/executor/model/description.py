"""A model described once: a list of layers, each a short list of operations with their weights.

    x, residual      the values between the operations; the residual begins as the rows of the embedding
    Norm             x = RMS norm of the residual
    Projection       x = x @ weight.T + bias
    HeadNorm         x = RMS norm of each query head and each key head of x
    Rope             queries and keys of x, rotated by their position
    Attention        stores keys and values of x in the paged cache; x = attention of its queries
    Gate             x = silu(gate) * up, where x is both next to each other
    Experts          x = the weighted sum of the chosen experts' MLPs
    Add              residual += x, which is a part of a sum over the ranks that share a layer

A description depends on neither engines nor files. The table of an engine has patterns of operations, some
of several (program.py). checkpoint/config.py has the names of the parts in files. What each of several
ranks holds follows from the `units` of the parts (checkpoint/weights.py).

The numbers of a model, which config.py reads from a checkpoint: all that its description depends on.

A fingerprint has their repr. So a new field keeps KV and digests of older models only with `repr=False`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

# What ranks share: each part is divided by one of these, or every rank has all of it. ONCE: other ranks than
# the first have zeros, because the ranks' results are added up.
HEADS, KV_HEADS, WIDTH, EXPERTS, VOCAB = "heads", "KV heads", "MLP width", "experts", "vocabulary"
ONCE = "once"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a model. Its dimension `dim` has a rank's share of `units`; "": every rank has all."""

    name: str
    shape: tuple[int, ...]
    units: str = ""
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Weight:
    """What an operation reads: its parts below each other."""

    name: str
    parts: tuple[Part, ...]


def _weight(name: str, *shape: int, units: str = "", dim: int = 0) -> Weight:
    return Weight(name, (Part(name, shape, units, dim),))


class Operation(Protocol):
    """Any of the dataclasses below. Engines and tests may have others."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def weights_of(operation: Operation) -> Iterator[Weight]:
    """The weights of an operation, in the order of a fingerprint."""
    values = (getattr(operation, field.name) for field in fields(operation))
    return (value for value in values if isinstance(value, Weight))


@dataclass(frozen=True, slots=True)
class Norm:
    """`[tokens, hidden]` to the same."""

    weight: Weight
    eps: float


@dataclass(frozen=True, slots=True)
class Projection:
    """`[tokens, in]` to `[tokens, out]`; the weight is `[out, in]`."""

    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """For x `[tokens, (heads + 2 * kv_heads) * dim]`: queries, keys, values. The weights are `[dim]`."""

    query: Weight
    key: Weight
    eps: float
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Rope:
    """For x as in HeadNorm."""

    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Attention:
    """From x as in HeadNorm to `[tokens, heads * dim]`: causal, over the whole context."""

    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Gate:
    """`[tokens, 2 * width]`, gate first, to `[tokens, width]`."""


@dataclass(frozen=True, slots=True)
class Experts:
    """`[tokens, hidden]` to the same. `gate_up` `[experts, 2 * width, hidden]` and `down` `[experts, hidden,
    width]` are this rank's experts, from number `first` on; `router` `[all experts, hidden]`."""

    gate_up: Weight
    down: Weight
    router: Weight
    per_token: int
    renormalise: bool
    first: int


@dataclass(frozen=True, slots=True)
class Add:
    """The sum over the ranks, if several share a layer, and with the residual."""


Layer = tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """A whole model, or a rank's part of it. A tied head is the embedding."""

    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Norm  # after the last layer
    head: Weight
    tied: bool

    def parts(self) -> Iterator[tuple[Part, int]]:
        """Every part that a checkpoint has, with its layer: -1 for those of the model."""
        for weight in (self.embedding, self.norm.weight, *([self.head] * (not self.tied))):
            yield from ((part, -1) for part in weight.parts)
        for i, layer in enumerate(self.layers):
            yield from ((part, i) for each in layer for weight in weights_of(each) for part in weight.parts)


def describe(shapes: Shapes) -> Description:
    """The description of a model with these numbers."""
    return Description(
        embedding=_weight("embedding", shapes.vocab, shapes.hidden),
        layers=tuple(
            (
                *_attention(shapes),
                Norm(_weight("mlp_norm", shapes.hidden), shapes.norm_eps),
                *(_experts(shapes) if shapes.is_sparse(layer) else _mlp(shapes)),
                Add(),
            )
            for layer in range(shapes.layers)
        ),
        norm=Norm(_weight("norm", shapes.hidden), shapes.norm_eps),
        head=_weight("head", shapes.vocab, shapes.hidden, units=VOCAB),
        tied=shapes.tied,
    )


def _attention(shapes: Shapes) -> Iterator[Operation]:
    heads, kv_heads, dim = shapes.heads, shapes.kv_heads, shapes.head_dim
    sizes = (("q", heads * dim, HEADS), ("k", kv_heads * dim, KV_HEADS), ("v", kv_heads * dim, KV_HEADS))
    rows = tuple(Part(name, (size, shapes.hidden), units) for name, size, units in sizes)
    biases = tuple(Part(f"{name}_bias", (size,), units) for name, size, units in sizes)
    yield Norm(_weight("attention_norm", shapes.hidden), shapes.norm_eps)
    yield Projection(Weight("qkv", rows), Weight("qkv_bias", biases) if shapes.qkv_bias else None)
    if shapes.qk_norm:
        query, key = _weight("q_norm", dim), _weight("k_norm", dim)
        yield HeadNorm(query, key, shapes.norm_eps, heads, kv_heads)
    yield Rope(heads, kv_heads)
    yield Attention(heads, kv_heads, dim)
    bias = _weight("out_bias", shapes.hidden, units=ONCE) if shapes.out_bias else None
    yield Projection(_weight("out", shapes.hidden, heads * dim, units=HEADS, dim=1), bias)
    yield Add()


def _mlp(shapes: Shapes) -> tuple[Operation, ...]:
    hidden, wide = shapes.hidden, shapes.intermediate
    both = tuple(Part(name, (wide, hidden), WIDTH) for name in ("gate", "up"))
    down = _weight("down", hidden, wide, units=WIDTH, dim=1)
    return Projection(Weight("gate_up", both)), Gate(), Projection(down)


def _experts(shapes: Shapes) -> tuple[Operation, ...]:
    experts, hidden = shapes.experts, shapes.hidden
    assert experts is not None, "a sparse layer has experts"
    gate_up = Part("experts_gate_up", (experts.count, 2 * experts.width, hidden), EXPERTS)
    down = Part("experts_down", (experts.count, hidden, experts.width), EXPERTS)
    router = _weight("router", experts.count, hidden)
    named = Weight("gate_up", (gate_up,)), Weight("down", (down,)), router
    return (Experts(*named, experts.per_token, experts.renormalise, experts.first),)


def shared_numbers(layer: Layer) -> int:
    """How many numbers of its divided matrices a step of many rows reads."""
    parts = (part for each in layer for weight in weights_of(each) for part in weight.parts)
    return sum(math.prod(part.shape) for part in parts if part.units and len(part.shape) > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShapes:
    """A mixture of experts in place of the MLP, in all layers but `dense_layers`."""

    count: int
    per_token: int
    width: int  # of an expert's MLP
    renormalise: bool  # the weights of a token's experts add up to one
    dense_layers: tuple[int, ...] = ()
    first: int = field(default=0, repr=False)  # the first expert on this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The numbers of a model. `rope_factors` divides each rotation frequency; empty means no scaling.
    The pairs of a divisor of inf are not rotated. `rope_gain` multiplies what is."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope_theta: float
    rope_factors: tuple[float, ...] = ()
    rope_gain: float = field(default=1.0, repr=False)  # fingerprints add it
    short_rope: tuple[int, tuple[float, ...]] = field(default=(0, ()), repr=False)  # see for_context
    max_context: int = 2048
    sliding_window: int = 0  # 0 = every token sees its whole past
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    out_bias: bool = field(default=False, repr=False)  # fingerprints have its values
    qk_norm: bool = False
    experts: ExpertShapes | None = field(default=None, repr=False)  # fingerprint() adds its repr
    first_layer: int = field(default=0, repr=False)  # of the whole model, on a stage of a pipeline

    def is_sparse(self, layer: int) -> bool:
        """Whether one of these layers has a mixture of experts."""
        return self.experts is not None and self.first_layer + layer not in self.experts.dense_layers

    def for_context(self, tokens: int) -> Shapes:
        """These for a cache of sequences of up to `tokens`: `short_rope` is the longest context with factors
        of its own, and they. All keys of a cache are rotated alike, so a sequence cannot change to others."""
        longest, factors = self.short_rope
        return replace(self, rope_factors=factors) if tokens <= longest else self

    def inverse_frequencies(self) -> list[float]:
        """Radians per position of each rotated pair: `theta^(-2i/head_dim) / factor_i`."""
        plain = (self.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2))
        factors = self.rope_factors or (1.0,) * (self.head_dim // 2)
        return [each / factor for each, factor in zip(plain, factors, strict=True)]
