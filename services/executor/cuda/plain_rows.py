"""Rows that the kernel samples in a step whose other rows torch samples.

The kernel and torch round differently, so whose hand draws a row's token must not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sampler.gpu import Choices, Chosen, choose, scratch


class PlainRows:
    """Has scratch of its own: the steps that are all of such rows may be sampled at the same time. Belongs to
    the thread that samples."""

    def __init__(self, rows: int, vocab: int, choices: Choices, dtype: torch.dtype) -> None:
        """`dtype`: of the logits as the model gives them."""
        self._choices, self._dtype = choices, dtype
        self._scratch = scratch(rows, vocab, choices.seeds.device)

    def choose(self, logits: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """Ids and done `[2, rows]`, as in a StepResult. Row i of `logits` `[rows, vocab]`, those of the model
        in float32, is for `slots[i]`, and its token takes place `positions[i]`."""
        spare = [0] * (
            -len(slots) % 4
        )  # both columns begin at 16 bytes: what graphs hold is compiled for that
        columns = torch.tensor((slots + spare, positions + spare), dtype=torch.int32, device=logits.device)
        found = torch.empty_like(columns)
        chosen = Chosen(found[0], found[1])
        choose(logits.to(self._dtype), columns[0], columns[1], self._choices, self._scratch, chosen)
        return found[:, : len(slots)]
