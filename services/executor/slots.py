"""The slots of running sequences: their tokens and block tables on the host, their last token on the device.

A slot's end (stop id or length) is found on the device when a token is sampled. The plan after may have been
made without knowing it: its rows for that slot are then no-ops, which is why `done` lives here.

The host lane advances slots while the device thread reads and opens others. Nothing is guarded, since each
writes entries of its own slots only, in place: the tensors by index, the dict by key. Two things move:
`_stop_ids` may be widened by a new slot, which leaves both the old and the new tensor right for the others.
`tables` is the device thread's alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import EngineError
from shared.messages import Ints, SlotOpen, StepPlan, ints

_NO_TOKEN = -1


class Slots:
    """State of every slot. Tables are `[slots, blocks]`; entries never set point at the spare block."""

    def __init__(
        self, count: int, table_blocks: int, spare: int, max_context: int, device: torch.device
    ) -> None:
        self.tables: NDArray[np.int64] = np.full((count, table_blocks), spare, dtype=np.int64)
        self.last_token = torch.zeros(count, dtype=torch.int64, device=device)
        self.done = torch.zeros(count, dtype=torch.bool, device=device)
        self._max_length = torch.zeros(count, dtype=torch.int64, device=device)
        self._stop_ids = torch.full((count, 1), _NO_TOKEN, dtype=torch.int64, device=device)
        self._outgrown: list[Tensor] = []  # narrower stop ids: freed memory would be written by others
        self._tokens: dict[int, Ints] = {}
        self._spare = spare
        self._max_context = max_context

    def open(self, opened: SlotOpen) -> None:
        """Set a slot up from scratch. Raises EngineError for a slot number that does not exist."""
        slot = opened.slot
        if not 0 <= slot < len(self.tables):
            raise EngineError(f"slot {slot} is not one of {len(self.tables)} slots")
        self._tokens[slot] = opened.tokens[:]
        self.tables[slot] = self._spare
        self.last_token[slot] = opened.tokens[-1] if opened.tokens else 0
        self.done[slot] = False
        self._max_length[slot] = min(opened.max_length or self._max_context, self._max_context)
        self._set_stop_ids(slot, opened.stop_ids)

    def end(self, slots: list[int]) -> None:
        """Slots that failed: like one that has stopped, without a further token."""
        if slots:
            self.done[torch.tensor(slots, device=self.done.device)] = True

    def close(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""
        self._tokens.pop(slot, None)

    def reset(self) -> None:
        """Forget every slot."""
        self._tokens.clear()

    def tokens(self, slot: int) -> Ints:
        """The host record: the tokens of SlotOpen and those sampled since. Raises EngineError if closed."""
        try:
            return self._tokens[slot]
        except KeyError:
            raise EngineError(f"the plan names slot {slot}, which is not open") from None

    def apply_tables(self, plan: StepPlan) -> None:
        """Write the plan's block-table deltas."""
        at = 0
        for slot, first, count in zip(plan.table_slots, plan.table_first, plan.table_counts, strict=True):
            self.tables[slot, first : first + count] = plan.table_blocks[at : at + count]
            at += count

    def advance(self, slots: list[int], ids: Tensor, positions: list[int]) -> tuple[Ints, Ints]:
        """Take one sampled token for each of `slots`, at its place `positions` in the sequence.

        Returns the ids and the done column of a StepResult, on the host: waits for the device.
        """
        at = torch.tensor(slots, device=ids.device)
        lengths = torch.tensor(positions, device=ids.device) + 1
        before = self.done[at]
        stopped = (ids.unsqueeze(1) == self._stop_ids[at]).any(1) | (lengths >= self._max_length[at])
        self.last_token[at] = torch.where(before, self.last_token[at], ids)
        self.done[at] = before | stopped
        column = torch.where(before, _NO_TOKEN, ids)
        chosen, ended = torch.stack((column, torch.where(before, 2, stopped.long()))).tolist()
        self._note(slots, chosen, positions)
        return ints(chosen), ints(ended)

    def take(self, slots: list[int], ids: Ints, done: Ints, positions: list[int]) -> None:
        """As `advance`, with the columns that it has given on another rank."""
        at, ended = torch.tensor(slots), torch.tensor(done)
        chosen = torch.where(ended == 2, self.last_token[at], torch.tensor(ids, dtype=torch.int64))
        self.last_token[at], self.done[at] = chosen, ended != 0
        self._note(slots, ids, positions)

    def _note(self, slots: Sequence[int], ids: Sequence[int], positions: Sequence[int]) -> None:
        for slot, token, position in zip(slots, ids, positions, strict=True):
            known = self.tokens(slot)
            if token != _NO_TOKEN and position == len(known):
                known.append(token)

    def _set_stop_ids(self, slot: int, stop_ids: Ints) -> None:
        have = self._stop_ids.shape[1]
        if len(stop_ids) > have:
            more = self._stop_ids.new_full((len(self._stop_ids), len(stop_ids) - have), _NO_TOKEN)
            wider = torch.cat((self._stop_ids, more), 1)
            if wider.is_cuda:  # a sample on another stream may read either one at any moment
                torch.cuda.current_stream().synchronize()
                self._outgrown.append(self._stop_ids)
            self._stop_ids = wider
        self._stop_ids[slot] = _NO_TOKEN
        if stop_ids:
            self._stop_ids[slot, : len(stop_ids)] = torch.tensor(stop_ids, device=self._stop_ids.device)
