"""The oracle of the sampler's kernel: its draws against the exact distribution, by chi-square.

Each draw is one of (seed, position). Tokens too rare for a cell of their own share 64 cells by their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.gpu import Choices, choose, mask_room, scratch
from kernels.sampling.ref import COLUMN, PARAMETERS

Filter = tuple[float, int, float, float]  # temperature, top-k, top-p, min-p

_LEAST = 5.0  # draws expected in a cell
_SHARED = 64  # cells of what is rarer


def exact(logits: Tensor, wanted: Filter) -> Tensor:
    """The probability of each token, `[vocab]` in float64: top-k, then top-p on what is left, then min-p.
    Tokens of equal logit stay or go together, as kernels.sampling.ref has it."""
    temperature, top_k, top_p, min_p = wanted
    levels, at, counts = logits.double().unique(return_inverse=True, return_counts=True)
    each = ((levels - levels[-1]) / temperature).exp()
    kept = torch.ones(len(levels), dtype=torch.bool)
    if top_k:
        kept &= _above(counts) < top_k
    if top_p < 1:
        mass = torch.where(kept, each * counts, 0.0)
        kept &= _above(mass) < top_p * mass.sum()
    kept &= each >= min_p
    masses = torch.where(kept, each, 0.0)[at]
    return masses / masses.sum()


def _above(values: Tensor) -> Tensor:
    """The sum of all later values."""
    return values.flip(0).cumsum(0).flip(0) - values


@dataclass(frozen=True, slots=True)
class Fit:
    """Pearson's chi-square, and how likely one as large is by chance."""

    cells: int
    statistic: float
    p: float


def chi_square(seen: Tensor, probabilities: Tensor) -> Fit:
    """How well the counts `seen` `[vocab]` fit. A token drawn that has no probability gives p 0. Raises
    ValueError for so few draws that all tokens share one cell."""
    if (seen[probabilities == 0] > 0).any():
        return Fit(0, float("inf"), 0.0)
    vocab = len(seen)
    expected, seen = probabilities * seen.sum(), seen.double()
    own = torch.arange(vocab)
    shared = vocab + own * _SHARED // vocab
    wanted, found = _pooled(torch.where(expected < _LEAST, shared, own), expected, seen)
    rare = wanted < _LEAST
    place = torch.arange(len(wanted)).masked_fill(rare, int(wanted.argmax()))  # into the largest
    wanted, found = _pooled(place, wanted, found)
    if len(wanted) < 2:
        raise ValueError(f"{int(seen.sum())} draws fill one cell, which shows nothing; draw more")
    statistic = ((found - wanted) ** 2 / wanted).sum()
    degrees = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return Fit(len(wanted), float(statistic), float(torch.special.gammaincc(degrees, statistic / 2)))


def _pooled(cell: Tensor, expected: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    room = expected.new_zeros(int(cell.max()) + 1)
    wanted, found = room.index_add(0, cell, expected), room.index_add(0, cell, seen)
    return wanted[wanted > 0], found[wanted > 0]


def slot_table(rows: Sequence[Filter], device: torch.device | str) -> Tensor:
    """The slot table of rows with these filters and no penalties, `[rows, PARAMETERS]`."""
    table = torch.tensor([[each.off for each in PARAMETERS]] * len(rows))
    columns = [COLUMN[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    table[:, columns] = torch.tensor(rows, dtype=torch.float32)
    return table.to(device)


class Sampler:
    """The kernel over rows of the same logits and filter, each row with a slot of its own."""

    def __init__(self, logits: Tensor, wanted: Filter, rows: int) -> None:
        self._device, self._rows = logits.device, rows
        self._logits = logits.expand(rows, -1).contiguous()
        stops = torch.full((rows, 32), -1, dtype=torch.int32, device=self._device)
        table = slot_table([wanted] * rows, self._device)
        seeds = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(11))
        self._seeds = seeds.to(self._device)
        self._choices = Choices(
            table, self._seeds, self._words(1 << 30), stops, self._words(0), self._words(0), self._words(0),
            mask_room(1, len(logits), self._device),
        )  # fmt: skip
        self._scratch = scratch(rows, len(logits), self._device)
        self._slots = torch.arange(rows, dtype=torch.int32, device=self._device)
        self._chosen = torch.zeros(2, rows, dtype=torch.int32, device=self._device)

    def seen(self, rounds: int) -> Tensor:
        """How often each token was drawn: by each row's seed at the positions up to `rounds`."""
        seen = torch.zeros(self._logits.shape[1], dtype=torch.int64, device=self._device)
        for position in range(1, rounds + 1):
            seen += torch.bincount(self._draw(self._rows, position), minlength=len(seen))
        return seen

    def ids_of_one_seed(self, seeds: int) -> set[tuple[int, ...]]:
        """The ids that each seed draws, over all rows and a row that is alone. Changes the seeds."""
        columns = []
        for seed in range(seeds):
            self._seeds.fill_(seed * 7919 - 50_000)
            all_rows = self._draw(self._rows, 100 + seed).tolist()
            columns.append([*all_rows, *self._draw(1, 100 + seed).tolist()])
        return {*zip(*columns, strict=True)}

    def _draw(self, rows: int, position: int) -> Tensor:
        choose(
            self._logits[:rows],
            self._slots,
            self._words(position),
            self._choices,
            self._scratch,
            self._chosen,
        )
        return self._chosen[0][:rows].clone()

    def _words(self, value: int) -> Tensor:
        return torch.full((self._rows,), value, dtype=torch.int32, device=self._device)
