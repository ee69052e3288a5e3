"""A model described once: a list of layers, each a short list of operations with their weights.

    x, residual      the values between the operations; the residual begins as the rows of the embedding
    Norm             x = norm of the residual
    Residual         x = the residual, for layers without a norm before
    Projection       x = x @ weight.T + bias
    HeadNorm         x = norm of the queries and the keys of x
    Rope             queries and keys of x, rotated by their position
    Attention        stores keys and values of x in the paged cache; x = attention of its queries
    Gate             x = act(gate) * up, where x is both next to each other
    Activation       x = act(x)
    Experts          x = the weighted sum of the chosen experts' MLPs
    Keep, Join       x is kept; x += what was kept, for two branches that read one residual
    PostNorm         x = norm of x, which is first summed over the ranks that share a layer
    Add              residual += x, which is a part of a sum over these ranks

A description depends on neither engines nor files. The table of an engine has patterns of operations, some
of several (program.py). checkpoint/config.py has the names of the parts in files. What each of several
ranks holds follows from the `units` of the parts (checkpoint/weights.py).

The numbers of a model, which config.py reads from a checkpoint: all that its description depends on.

A fingerprint has their repr. So a new field keeps KV and digests of older models only with `repr=False`. What
a model computes beside Llama's is in `Options`, of which a fingerprint has those that differ from Llama's.
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
BY_HEAD, BY_KV_HEAD = "a row of each head", "a row of each KV head"
SHARED = "width of shared experts"

# Activations: of kernels.elementwise.ACTIVATIONS. CLAMPED: gpt-oss' gate.
SILU, GELU, CLAMPED = "silu", "gelu_tanh", "clamped"


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
    """`[tokens, hidden]` to the same: an RMS norm, or with `centred` a layer norm."""

    weight: Weight
    eps: float
    centred: bool = False
    bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class PostNorm:
    """As Norm, of x."""

    weight: Weight
    eps: float


@dataclass(frozen=True, slots=True)
class Residual:
    """x = the residual, `[tokens, hidden]`."""


@dataclass(frozen=True, slots=True)
class Projection:
    """`[tokens, in]` to `[tokens, out]`; the weight is `[out, in]`."""

    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """For x `[tokens, (heads + 2 * kv_heads) * dim]`: queries, keys, values. The weights are `[dim]`;
    `[heads, dim]` with `centred`, a layer norm of each head; `[heads * dim]` with `whole`, of all heads."""

    query: Weight
    key: Weight
    eps: float
    heads: int
    kv_heads: int
    centred: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """For x as in HeadNorm. `table`: index of `Shapes.rope_tables`."""

    heads: int
    kv_heads: int
    table: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """From x as in HeadNorm to `[tokens, heads * dim]`, causal.

    `window`: tokens that a token sees, its own one included; 0: all. `scale`: of the scores; 0: dim^-0.5.
    `cap`: scores are cap * tanh(score / cap); 0: as they are. `sinks` `[heads]`: the logarithm of what is
    added to the sum of a head's weights."""

    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    scale: float = 0.0
    cap: float = 0.0
    sinks: Weight | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """`[tokens, 2 * width]`, gate first, to `[tokens, width]`."""

    act: str = SILU


@dataclass(frozen=True, slots=True)
class Activation:
    """`[tokens, width]` to the same."""

    act: str


@dataclass(frozen=True, slots=True)
class Experts:
    """`[tokens, hidden]` to the same. `gate_up` `[experts, 2 * width, hidden]` and `down` `[experts, hidden,
    width]` are this rank's experts, from number `first` on; `router` `[all experts, hidden]`. The biases have
    the shape of the results."""

    gate_up: Weight
    down: Weight
    router: Weight
    per_token: int
    renormalise: bool
    first: int
    act: str = SILU
    gate_up_bias: Weight | None = None
    down_bias: Weight | None = None
    router_bias: Weight | None = None
    routing: Routing | None = None  # None: by softmax of all scores


@dataclass(frozen=True, slots=True)
class Keep:
    """x is kept."""


@dataclass(frozen=True, slots=True)
class Join:
    """x += what was kept."""


@dataclass(frozen=True, slots=True)
class Add:
    """The sum over the ranks, if several share a layer, and with the residual. `scale`: of x; `summed`: x is
    the sum over the ranks already."""

    scale: float = 1.0
    summed: bool = False


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
        for weight in (self.embedding, *weights_of(self.norm), *([self.head] * (not self.tied))):
            yield from ((part, -1) for part in weight.parts)
        for i, layer in enumerate(self.layers):
            yield from ((part, i) for each in layer for weight in weights_of(each) for part in weight.parts)


def describe(shapes: Shapes) -> Description:
    """The description of a model with these numbers."""
    return Description(
        embedding=_weight("embedding", shapes.vocab, shapes.hidden),
        layers=tuple(tuple(_layer(shapes, layer)) for layer in range(shapes.layers)),
        norm=_norm(shapes, "norm"),
        head=_weight("head", shapes.vocab, shapes.hidden, units=VOCAB),
        tied=shapes.tied,
    )


def _layer(shapes: Shapes, layer: int) -> Iterator[Operation]:
    options = shapes.options
    yield from _before(shapes, "attention_norm")
    yield from _attention(shapes, layer)
    if options.parallel:
        yield Keep()
        yield _norm(shapes, "attention_norm")
    else:
        yield from _after(shapes, "attention_post_norm")
        yield from _before(shapes, "mlp_norm")
    if not shapes.is_sparse(layer):
        yield from _mlp(shapes, "", shapes.intermediate, WIDTH)
    else:
        yield from _experts(shapes)
        if options.shared_width:
            yield Keep()
            yield from _before(shapes, "mlp_norm")
            yield from _mlp(shapes, "shared_", options.shared_width, SHARED)
            yield Join()
    if options.parallel:
        yield Join()
    yield from _after(shapes, "mlp_post_norm")


def _norm(shapes: Shapes, name: str) -> Norm:
    options = shapes.options
    bias = _weight(f"{name}_bias", shapes.hidden) if options.norm_bias else None
    return Norm(_weight(name, shapes.hidden), shapes.norm_eps, options.layer_norm, bias)


def _before(shapes: Shapes, name: str) -> Iterator[Operation]:
    yield _norm(shapes, name) if shapes.options.pre_norms else Residual()


def _after(shapes: Shapes, name: str) -> Iterator[Operation]:
    if shapes.options.post_norms:
        yield PostNorm(_weight(name, shapes.hidden), shapes.norm_eps)
    yield Add(shapes.options.residual_scale, summed=shapes.options.post_norms)


def _attention(shapes: Shapes, layer: int) -> Iterator[Operation]:
    heads, kv_heads, dim, options = shapes.heads, shapes.kv_heads, shapes.head_dim, shapes.options
    sizes = (("q", heads * dim, HEADS), ("k", kv_heads * dim, KV_HEADS), ("v", kv_heads * dim, KV_HEADS))
    rows = tuple(Part(name, (size, shapes.hidden), units) for name, size, units in sizes)
    biases = tuple(Part(f"{name}_bias", (size,), units) for name, size, units in sizes)
    yield Projection(Weight("qkv", rows), Weight("qkv_bias", biases) if shapes.qkv_bias else None)
    if shapes.qk_norm:
        kind, eps = options.qk_norm_kind, shapes.norm_eps
        query, key = _weight("q_norm", dim), _weight("k_norm", dim)
        if kind == LAYER_NORM:
            query = _weight("q_norm", heads, dim, units=BY_HEAD)
            key = _weight("k_norm", kv_heads, dim, units=BY_KV_HEAD)
        elif kind == ALL_HEADS:
            query = _weight("q_norm", heads * dim, units=HEADS)
            key = _weight("k_norm", kv_heads * dim, units=KV_HEADS)
        yield HeadNorm(query, key, eps, heads, kv_heads, kind == LAYER_NORM, kind == ALL_HEADS)
    yield Rope(heads, kv_heads, shapes.table_of(layer))
    sinks = _weight("sinks", heads, units=BY_HEAD) if options.sinks else None
    window = shapes.window_of(layer)
    yield Attention(heads, kv_heads, dim, window, options.attention_scale, options.attention_cap, sinks)
    bias = _weight("out_bias", shapes.hidden, units=ONCE) if shapes.out_bias else None
    yield Projection(_weight("out", shapes.hidden, heads * dim, units=HEADS, dim=1), bias)


def _mlp(shapes: Shapes, prefix: str, wide: int, units: str) -> Iterator[Operation]:
    hidden, options = shapes.hidden, shapes.options
    names = [f"{prefix}{name}" for name in (("gate", "up") if options.gated else ("up",))]
    first, down = Weight(f"{prefix}gate_up", tuple(Part(name, (wide, hidden), units) for name in names)), None
    bias = None
    if options.mlp_bias:
        bias = Weight(f"{first.name}_bias", tuple(Part(f"{name}_bias", (wide,), units) for name in names))
        down = _weight(f"{prefix}down_bias", hidden, units=ONCE)
    yield Projection(first, bias)
    yield Gate(options.act) if options.gated else Activation(options.act)
    yield Projection(_weight(f"{prefix}down", hidden, wide, units=units, dim=1), down)


def _experts(shapes: Shapes) -> Iterator[Operation]:
    experts, hidden, options = shapes.experts, shapes.hidden, shapes.options
    assert experts is not None, "a sparse layer has experts"
    count, wide = experts.count, 2 * experts.width
    sizes = (("gate_up", wide, hidden), ("down", hidden, experts.width))
    gate_up, down = (
        Weight(name, (Part(f"experts_{name}", (count, *size), EXPERTS),)) for name, *size in sizes
    )
    first, second = (
        Weight(f"{name}_bias", (Part(f"experts_{name}_bias", (count, size), EXPERTS),))
        for name, size, _ in sizes
    )
    routed = options.experts_bias or (options.routing is not None and options.routing.sigmoid)
    yield Experts(
        gate_up, down, _weight("router", experts.count, hidden), experts.per_token, experts.renormalise,
        experts.first, options.act,
        gate_up_bias=first if options.experts_bias else None,
        down_bias=second if options.experts_bias else None,
        router_bias=_weight("router_bias", experts.count) if routed else None,
        routing=options.routing,
    )  # fmt: skip


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
class Routing:
    """How a router chooses among experts by other scores than a softmax of all."""

    chosen_softmax: bool = False  # the softmax of the chosen experts' scores
    sigmoid: bool = False  # sigmoids; a bias is added to choose, not to weigh
    groups: int = 1  # of experts; those of the best `top_groups` by their two best scores are looked at
    top_groups: int = 1
    scale: float = 1.0  # of the weights


LAYER_NORM, ALL_HEADS = "a layer norm of each head", "all heads at once"  # kinds of a HeadNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a model computes beside Llama's. The defaults are Llama's."""

    windows: tuple[int, ...] = ()  # of each layer, 0: none; empty: `sliding_window` in all
    local_rope: tuple[float, tuple[float, ...]] | None = None  # theta and factors in layers with a window
    unrotated: tuple[int, ...] = ()  # layers that know no positions
    neighbours: bool = False  # a rotation of neighbours in a head: rows of q and k change places at load
    attention_scale: float = 0.0  # see Attention
    attention_cap: float = 0.0
    sinks: bool = False
    qk_norm_kind: str = ""  # see HeadNorm
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0  # added to the weights of norms at load
    layer_norm: bool = False
    norm_bias: bool = False
    parallel: bool = False  # attention and MLP read one norm
    act: str = SILU
    gated: bool = True
    mlp_bias: bool = False
    experts_bias: bool = False
    routing: Routing | None = None
    shared_width: int = 0  # of the MLP of shared experts beside the chosen ones
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    @property
    def marks(self) -> tuple[str, ...]:
        """For fingerprints: those that differ from Llama's."""
        found = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return tuple(f"{name} {value!r}" for name, value, usual in found if value != usual)


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
    options: Options = field(default=Options(), repr=False)  # fingerprints have its marks
    served: int = field(default=0, repr=False)  # tokens of the longest sequence of a cache; 0: not known

    def window_of(self, layer: int) -> int:
        """The attention window of one of these layers; 0: the whole past of every sequence."""
        window = self._windows[self.first_layer + layer]
        return 0 if 0 < self.served <= window else window

    def table_of(self, layer: int) -> int:
        """Which of `rope_tables` a layer has."""
        if self.first_layer + layer in self.options.unrotated:
            return len(self.rope_tables()) - 1
        return int(self.options.local_rope is not None and self._windows[self.first_layer + layer] > 0)

    @property
    def has_options(self) -> bool:
        """Whether the model computes anything beside Llama's."""
        return bool(self.options.marks) or any(map(self.window_of, range(self.layers)))

    @property
    def _windows(self) -> tuple[int, ...]:
        """The window of every layer of the model; 0: none."""
        return self.options.windows or (self.sliding_window,) * (self.first_layer + self.layers)

    def is_sparse(self, layer: int) -> bool:
        """Whether one of these layers has a mixture of experts."""
        return self.experts is not None and self.first_layer + layer not in self.experts.dense_layers

    def for_context(self, tokens: int) -> Shapes:
        """These for a cache of sequences of up to `tokens`: `short_rope` is the longest context with factors
        of its own, and they. All keys of a cache are rotated alike, so a sequence cannot change to others.
        Windows that no sequence exceeds are none."""
        (longest, factors), options = self.short_rope, self.options
        if not any(0 < window < tokens for window in options.windows) and not options.local_rope:
            options = replace(options, windows=())
        factors = factors if tokens <= longest else self.rope_factors
        return replace(self, rope_factors=factors, served=tokens, options=options)

    def rope_tables(self) -> list[tuple[list[float], float]]:
        """Radians per position of each rotated pair, and the gain: of the model, then of layers with a window
        and of layers without positions where these differ."""
        found, options = (
            [(self._frequencies(self.rope_theta, self.rope_factors), self.rope_gain)],
            self.options,
        )
        if options.local_rope is not None:
            found.append((self._frequencies(*options.local_rope), 1.0))
        if options.unrotated:
            found.append(([0.0] * (self.head_dim // 2), 1.0))
        return found

    def inverse_frequencies(self) -> list[float]:
        """Those of the model."""
        return self._frequencies(self.rope_theta, self.rope_factors)

    def _frequencies(self, theta: float, factors: tuple[float, ...]) -> list[float]:
        """`theta^(-2i/head_dim) / factor_i`."""
        plain = (theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2))
        return [each / by for each, by in zip(plain, factors or (1.0,) * (self.head_dim // 2), strict=True)]
