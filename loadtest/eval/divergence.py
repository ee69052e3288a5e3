"""Computes the figures of llama.cpp's `--kl-divergence` from logits, all in float64.

The reference is exact. llama.cpp keeps its own in 16 bits and leaves out tokens less likely than e^-16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Column = NDArray[np.float64]
Figures = dict[str, float | int]


def log_probs(logits: Tensor) -> Tensor:
    """`[positions, vocab]`, natural logarithms, float64."""
    return logits.double().log_softmax(-1)


def kl_divergence(reference: Tensor, found: Tensor) -> Tensor:
    """KL(reference ‖ found) of each position in nats, from log probabilities `[positions, vocab]`."""
    return (reference.exp() * (reference - found)).sum(-1)


def same_top(reference: Tensor, found: Tensor) -> Tensor:
    """Whether the likeliest token is the same, 1.0 or 0.0 for each position."""
    return (reference.argmax(-1) == found.argmax(-1)).double()


def surprise(found: Tensor, targets: Tensor) -> Tensor:
    """-ln p of the token that followed, for each position."""
    return -found.gather(-1, targets.to(found.device)[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one engine, a value for each scored position; `reference` columns may be empty."""

    surprises: list[Tensor] = field(default_factory=list)
    reference_surprises: list[Tensor] = field(default_factory=list)
    divergences: list[Tensor] = field(default_factory=list)
    agreements: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, targets: Tensor, reference: Tensor | None = None) -> None:
        """Logits of some positions, what followed them, and the reference's log probabilities there."""
        found = log_probs(logits)
        self.surprises.append(surprise(found, targets).cpu())
        if reference is not None:
            reference = reference.to(found.device)
            self.reference_surprises.append(surprise(reference, targets).cpu())
            self.divergences.append(kl_divergence(reference, found).cpu())
            self.agreements.append(same_top(reference, found).cpu())

    def figures(self) -> Figures:
        """Means have their standard error beside them. A ratio below 1 means likelier text."""
        own = _column(self.surprises)
        ppl, ppl_error = _exp(own)
        figures: Figures = {"tokens": len(own), "ppl": ppl, "ppl_error": ppl_error}
        if self.divergences:
            ratio, ratio_error = _exp(own - _column(self.reference_surprises))
            kl, agreed = _column(self.divergences), _column(self.agreements)
            figures |= {"ppl_ratio": ratio, "ppl_ratio_error": ratio_error}
            figures |= {"kl_mean": float(kl.mean()), "kl_error": _error(kl)}
            figures |= {"kl_median": float(np.median(kl)), "kl_p99": float(np.percentile(kl, 99))}
            figures |= {"kl_max": float(kl.max())}
            figures |= {"top1_pct": 100 * float(agreed.mean()), "top1_error": 100 * _error(agreed)}
        return figures


def _column(parts: Iterable[Tensor]) -> Column:
    column: Column = torch.cat(list(parts)).numpy()
    return column


def _exp(surprises: Column) -> tuple[float, float]:
    """The perplexity, or a ratio of two, and its error."""
    value = float(np.exp(surprises.mean()))
    return value, value * _error(surprises)


def _error(values: Column) -> float:
    """The standard error of the mean."""
    return float(values.std() / np.sqrt(max(len(values) - 1, 1)))
