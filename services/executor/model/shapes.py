"""The numbers of a model, which config.py reads from a checkpoint: all that its description depends on.

A fingerprint has their repr. So a new field keeps KV and digests of older models only with `repr=False`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
    `rope_gain` multiplies what is rotated."""

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
    max_context: int = 2048
    sliding_window: int = 0  # 0 = every token sees its whole past
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: ExpertShapes | None = field(default=None, repr=False)  # fingerprint() adds its repr
    first_layer: int = field(default=0, repr=False)  # of the whole model, on a stage of a pipeline

    def sparse(self, layer: int) -> bool:
        """Whether one of these layers has a mixture of experts."""
        return self.experts is not None and self.first_layer + layer not in self.experts.dense_layers

    def inverse_frequencies(self) -> list[float]:
        """Radians per position of each rotated pair: `theta^(-2i/head_dim) / factor_i`."""
        plain = (self.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2))
        factors = self.rope_factors or (1.0,) * (self.head_dim // 2)
        return [each / factor for each, factor in zip(plain, factors, strict=True)]
