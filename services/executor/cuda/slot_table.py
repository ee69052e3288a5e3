"""CudaSlots keeps the state of all slots on a GPU in one buffer of 32-bit words.

    tables [slots + 1, blocks] | last token | done | max length | temperature, k, p, min-p | seed | stop ids

So an opened slot and a step's block-table deltas are both updates of words. They collect on the host and go
with the next step's inputs, in one copy and one launch. The last slot is spare: padding uses it.

The host keeps the tokens, too, for host-fed rows. The device thread opens and closes slots while the host
thread records the samples of other slots: each uses its own slots' entries. Samples of another stage of a
pipeline also become updates.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.inputs.gpu import SlotState
from kernels.sampling.gpu import Choices
from services.executor.sampling.sampler import filters_of, row_error_codes
from shared.errors import EngineError
from shared.messages import Ints, SlotOpen, StepPlan

STOP_IDS = 128  # of a slot; a power of two, and more than a request's limit plus a model's own stop ids
_NO_TOKEN = -1
_SIGN = 1 << 63

StateUpdates = NDArray[np.int32]


class CudaSlots:
    """See the module."""

    def __init__(
        self, count: int, table_blocks: int, spare: int, max_context: int, device: torch.device
    ) -> None:
        rows = count + 1
        self.spare_slot = count
        self._max_context = max_context
        self._table_blocks = table_blocks
        self._tokens: dict[int, Ints] = {}
        self._unset: list[tuple[StateUpdates, StateUpdates]] = []  # indices in `words`, and values
        self._sampled: dict[int, tuple[int, int]] = {}  # more updates by slot: last token, done
        self._recording = threading.Lock()
        sizes = (rows * table_blocks, rows, rows, rows, 4 * rows, 2 * rows, STOP_IDS * rows)
        begins = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
        self._at = dict(
            zip(("table", "last", "done", "length", "filter", "seed", "stop"), begins, strict=False)
        )
        self.words = torch.zeros(begins[-1], dtype=torch.int32, device=device)
        parts = [self.words[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
        self.state = SlotState(parts[0].view(rows, table_blocks), parts[1], parts[2])
        self.choices = Choices(
            filters=parts[4].view(torch.float32).view(rows, 4),
            seeds=parts[5].view(torch.int64),
            max_lengths=parts[3],
            stop_ids=parts[6].view(rows, STOP_IDS),
            last_tokens=parts[1],
            done=parts[2],
        )
        self.state.tables.fill_(spare)
        self.state.done[self.spare_slot] = 1
        self.choices.stop_ids.fill_(_NO_TOKEN)

    def open(self, opened: SlotOpen) -> None:
        """Set up a slot. Raises EngineError for a slot number that does not exist, or over STOP_IDS stop
        ids."""
        slot = opened.slot
        if not 0 <= slot < self.spare_slot:
            raise EngineError(f"slot {slot} is not one of {self.spare_slot} slots")
        if len(opened.stop_ids) > STOP_IDS:
            raise EngineError(f"slot {slot} has {len(opened.stop_ids)} stop ids; at most {STOP_IDS}")
        self._tokens[slot] = opened.tokens[:]
        self._sampled.pop(slot, None)
        limit = min(opened.max_length or self._max_context, self._max_context)
        self._set("last", slot, [opened.tokens[-1] if opened.tokens else 0])
        self._set("done", slot, [0])
        self._set("length", slot, [limit])
        self._set("filter", slot, filters_of(opened.sampling).view(np.int32))
        self._set("seed", slot, np.array([(opened.seed ^ _SIGN) - _SIGN], dtype=np.int64).view(np.int32))
        self._set("stop", slot, [*opened.stop_ids, *[_NO_TOKEN] * (STOP_IDS - len(opened.stop_ids))])

    def close(self, slot: int) -> None:
        """Forget a slot's tokens. Closing an unknown slot does nothing."""
        self._tokens.pop(slot, None)

    def reset(self) -> None:
        """Forget every slot."""
        self._tokens.clear()
        self._unset.clear()
        self._sampled.clear()

    def tokens(self, slot: int) -> Ints:
        """The tokens of SlotOpen and the sampled ones after them. Raises EngineError for a closed slot."""
        try:
            return self._tokens[slot]
        except KeyError:
            raise EngineError(f"the plan names slot {slot}, which is not open") from None

    def take_updates(self, plan: StepPlan) -> tuple[StateUpdates, StateUpdates]:
        """The updates before this plan's forward: indices in `words`, and values."""
        at = 0
        for slot, first, count in zip(plan.table_slots, plan.table_first, plan.table_counts, strict=True):
            begin = slot * self._table_blocks + first
            indices = np.arange(begin, begin + count, dtype=np.int32)
            self._unset.append((indices, np.array(plan.table_blocks[at : at + count], dtype=np.int32)))
            at += count
        if self._sampled:
            with self._recording:
                found, self._sampled = self._sampled, {}
            at_slots, values = np.array([*found], dtype=np.int32), np.array([*found.values()], dtype=np.int32)
            self._unset += [
                (self._at["last"] + at_slots, values[:, 0]),
                (self._at["done"] + at_slots, values[:, 1]),
            ]
        taken, self._unset = self._unset, []
        if not taken:
            return _NOTHING, _NOTHING
        return np.concatenate([at for at, _ in taken]), np.concatenate([words for _, words in taken])

    def record_sampled(self, slots: list[int], ids: Ints, done: Ints) -> None:
        """Record the choices of another stage (columns as in StepResult) for the next step's updates. For the
        host thread; these slots are not opened or forwarded meanwhile."""
        with self._recording:
            for slot, token, ended in zip(slots, ids, done, strict=True):
                self._sampled[slot] = max(token, 0), int(ended > 0)

    def _set(self, what: str, slot: int, values: StateUpdates | list[int]) -> None:
        words = np.asarray(values, dtype=np.int32)
        begin = self._at[what] + slot * len(words)
        self._unset.append((np.arange(begin, begin + len(words), dtype=np.int32), words))


_NOTHING: StateUpdates = np.zeros(0, dtype=np.int32)


def end_slots(choices: Choices, slots: list[int]) -> None:
    """End failed slots, like stopped ones: they get no further token."""
    if slots:
        choices.done[torch.tensor(slots, device=choices.done.device)] = 1


def take(choices: Choices, slots: list[int], ids: Ints, done: Ints) -> None:
    """Like `advance`, with the columns that another rank's `advance` has returned."""
    at, ended = (torch.tensor(each, device=choices.done.device) for each in (slots, list(done)))
    chosen = torch.tensor(list(ids), dtype=torch.int32, device=choices.done.device)
    choices.last_tokens[at] = torch.where(ended == 2, choices.last_tokens[at], chosen)
    choices.done[at] = (ended != 0).int()


def advance(choices: Choices, slots: list[int], ids: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
    """Append one sampled token, or an id of ROW_ERRORS, to each of `slots`, at `positions` of the sequences,
    like the sampler's kernel: for rows that torch samples. Returns the columns `ids` and `done` on the
    device, coded as by the kernel."""
    at = torch.tensor(slots, device=ids.device)
    lengths = torch.tensor(positions, device=ids.device) + 1
    chosen = ids.int()
    before, flawed = choices.done[at] != 0, chosen < 0
    stopped = (chosen.unsqueeze(1) == choices.stop_ids[at]).any(1) | (lengths >= choices.max_lengths[at])
    ended = torch.where(flawed, row_error_codes(chosen), stopped.int())
    choices.last_tokens[at] = torch.where(before, choices.last_tokens[at], chosen.clamp(min=0))
    choices.done[at] = (before | (ended != 0)).int()
    return torch.where(before | flawed, _NO_TOKEN, chosen), torch.where(before, 2, ended)
