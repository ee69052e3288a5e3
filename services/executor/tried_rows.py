"""Choosing tokens for rows with grammars: choose as if there were none, and mask only where that fails.

    logits ── choose ──▶ may it follow? ── yes ──▶ it stays: no mask was made
                                       └── no ───▶ mask ── choose again, independently

Inside of strings and numbers most of what a model wants may follow, and a mask costs a walk over the
vocabulary. The chances are those of a masked draw: where the tokens that may follow have the mass A,
p(t) + (1 - A) p(t) / A = p(t) / A. And a likeliest token that may follow is the likeliest of those that may.
Not so for filters (top-k, top-p, min-p), which count what they leave: rows with one are masked first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.executor.grammars import Grammars
from services.executor.sampler import Sampler

Tokens = Callable[[int], Sequence[int]]  # of a slot, so far


def choose(
    grammars: Grammars,
    sampler: Sampler,
    logits: Tensor,
    slots: list[int],
    positions: list[int],
    tokens: Tokens,
) -> tuple[Tensor, int, dict[int, str]]:
    """As Sampler.choose, within the slots' grammars: ids `[rows]`, the time on the host in us, and why rows
    failed, by index; the id of such a row means nothing."""
    rows = grammars.rows_of(slots)
    if not rows:
        return sampler.choose(logits, slots, positions), 0, {}
    began_ns = time.monotonic_ns()
    first = [row for row in rows if sampler.filters(slots[row])]
    failures: dict[int, str] = {}
    if first:
        logits = logits.clone()
        failures |= grammars.mask(logits, first, slots, tokens)
    choosing_ns = time.monotonic_ns()
    ids = sampler.propose(logits, slots, positions)
    chosen = ids.tolist()
    chosen_ns = time.monotonic_ns()
    again, failed = grammars.refused(chosen, [row for row in rows if row not in first], slots, tokens)
    failures |= failed
    if again:
        at = torch.tensor(again, device=logits.device)
        some, theirs = logits[at], [slots[row] for row in again]
        failed = grammars.mask(some, range(len(again)), theirs, tokens)
        failures |= {again[k]: why for k, why in failed.items()}
        ids[at] = sampler.propose(some, theirs, [positions[row] for row in again], again=True)
    sampler.remember(slots, ids)
    host_us = (time.monotonic_ns() - chosen_ns + choosing_ns - began_ns) // 1000
    return ids, host_us, failures
