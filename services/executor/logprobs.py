"""Log probabilities of the chosen tokens and of the likeliest alternatives, for the rows that asked.

They are those of the model: of the logits before penalties, bias, temperature and filters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.messages import Floats, Ints, floats, ints


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Columns of a StepResult. Empty when no row asked; otherwise a row that did not has 0.0 and no
    alternatives."""

    chosen: Floats = field(default_factory=floats)
    top_counts: Ints = field(default_factory=ints)
    top_ids: Ints = field(default_factory=ints)
    top_values: Floats = field(default_factory=floats)


def logprobs(logits: Tensor, ids: Tensor, asked: list[int]) -> Logprobs:
    """For each row of `logits` `[rows, vocab]` the log probability of `ids[row]`; `asked[row]` is 0 for
    none, else 1 plus the number of alternatives."""
    rows = [i for i, wanted in enumerate(asked) if wanted]
    if not rows:
        return Logprobs()
    at = torch.tensor(rows, device=logits.device)
    table = logits[at].log_softmax(-1)
    chosen = [0.0] * len(asked)
    for row, value in zip(rows, table.gather(1, ids[at, None]).squeeze(1).tolist(), strict=True):
        chosen[row] = value
    counts = [max(wanted - 1, 0) for wanted in asked]
    top = table.topk(min(max(counts), table.shape[-1]))
    top_ids, top_values = ints(), floats()
    for row, row_ids, row_values in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True):
        top_ids.extend(row_ids[: counts[row]])
        top_values.extend(row_values[: counts[row]])
    return Logprobs(floats(chosen), ints(counts), top_ids, top_values)
