"""What slots of the torch and of the CUDA engine have in common: tokens, ends, the choices of other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import EngineError
from shared.messages import Ints, SlotOpen

NO_TOKEN = -1
STOP_IDS = 128  # of a slot; a power of two, and more than a request's limit plus a model's own stop ids


class SlotTokens:
    """The tokens of open slots. Two threads use them at once, each the entries of its own slots."""

    def __init__(self, count: int, max_context: int) -> None:
        self._count, self._max_context = count, max_context
        self._tokens: dict[int, Ints] = {}

    def open(self, opened: SlotOpen) -> tuple[int, list[int]]:
        """Take over a slot's tokens. Returns the length at which it ends, and its stop ids, padded. Raises
        EngineError for a slot number that does not exist, or over STOP_IDS stop ids."""
        slot, spare = opened.slot, STOP_IDS - len(opened.stop_ids)
        if not 0 <= slot < self._count:
            raise EngineError(f"slot {slot} is not one of {self._count} slots")
        if spare < 0:
            raise EngineError(f"slot {slot} has {len(opened.stop_ids)} stop ids; at most {STOP_IDS}")
        self._tokens[slot] = opened.tokens[:]
        limit = min(opened.max_length or self._max_context, self._max_context)
        return limit, [*opened.stop_ids, *[NO_TOKEN] * spare]

    def close(self, slot: int) -> None:
        """Forget a slot's tokens. Closing an unknown slot does nothing."""
        self._tokens.pop(slot, None)

    def tokens(self, slot: int) -> Ints:
        """The tokens of SlotOpen and the sampled ones after them. Raises EngineError for a closed slot."""
        try:
            return self._tokens[slot]
        except KeyError:
            raise EngineError(f"the plan names slot {slot}, which is not open") from None


def append_sampled(known: Iterable[Ints], ids: Sequence[int], positions: Sequence[int]) -> None:
    """Append each row's id to its slot's tokens `known`, unless it has none or its slot was opened again."""
    for tokens, token, position in zip(known, ids, positions, strict=True):
        if token >= 0 and position == len(tokens):
            tokens.append(token)


def end_slots(done: Tensor | NDArray[np.bool_], slots: list[int]) -> None:
    """End failed slots, like stopped ones: they get no further token. `done` is `[slots]`."""
    if slots:
        done[slots] = 1


def take(last_tokens: Tensor, done: Tensor, slots: list[int], ids: Ints, ended: Ints) -> None:
    """Update `last_tokens` and `done`, `[slots]`, as sampling does, with columns of another rank: `ids`, and
    `ended` as in StepResult."""
    at, chosen, ends = (torch.tensor(each, device=done.device) for each in (slots, list(ids), list(ended)))
    last_tokens[at] = torch.where(ends == 2, last_tokens[at], chosen.to(last_tokens.dtype))
    done[at] = (ends != 0).to(done.dtype)
