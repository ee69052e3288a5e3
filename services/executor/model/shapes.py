"""The numbers of a model, which config.py reads from a checkpoint: all that its description depends on.

A fingerprint has their repr. So a new field keeps KV and digests of older models only with `repr=False`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


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

    def sparse(self, layer: int) -> bool:
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
