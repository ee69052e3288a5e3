"""The slots of running sequences on a GPU: all state of the device in one buffer of 32-bit words.

    tables [slots + 1, blocks] | last token | done | max length | temperature, k, p, min-p | seed | stop ids

Opening a slot and a step's block-table deltas are therefore one thing: words to set. They gather on the host
and go with the next step's inputs, in one copy and one launch. The last slot is nobody's: padding is on it.

Tokens are kept on the host, too, for rows that are fed from there. The device thread opens and closes slots
while the host thread takes what others have sampled: each touches its own slots' entries. What another stage
of a pipeline has sampled becomes words to set.
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

STOP_IDS = 128  # of a slot; a power of two, and more than a request may ask for with all ends of a model
_NO_TOKEN = -1
_SIGN = 1 << 63

StateUpdates = NDArray[np.int32]


class CudaSlots:
    """State of every slot."""

    def __init__(
        self, count: int, table_blocks: int, spare: int, max_context: int, device: torch.device
    ) -> None:
        rows = count + 1
        self.spare_slot = count
        self._max_context = max_context
        self._table_blocks = table_blocks
        self._tokens: dict[int, Ints] = {}
        self._unset: list[tuple[StateUpdates, StateUpdates]] = []  # places and values
        self._sampled: dict[int, tuple[int, int]] = {}  # by slot, last token and done: not set either
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
        """Set a slot up from scratch. Raises EngineError for a slot number that does not exist or more stop
        ids than there is room for."""
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
        """The host record: the tokens of SlotOpen and those sampled since. Raises EngineError if closed."""
        try:
            return self._tokens[slot]
        except KeyError:
            raise EngineError(f"the plan names slot {slot}, which is not open") from None

    def take_updates(self, plan: StepPlan) -> tuple[StateUpdates, StateUpdates]:
        """The words that are to be set before this plan's forward: places in `words`, and values."""
        at = 0
        for slot, first, count in zip(plan.table_slots, plan.table_first, plan.table_counts, strict=True):
            begin = slot * self._table_blocks + first
            places = np.arange(begin, begin + count, dtype=np.int32)
            self._unset.append((places, np.array(plan.table_blocks[at : at + count], dtype=np.int32)))
            at += count
        if self._sampled:
            with self._recording:
                told, self._sampled = self._sampled, {}
            at_slots, values = np.array([*told], dtype=np.int32), np.array([*told.values()], dtype=np.int32)
            self._unset += [
                (self._at["last"] + at_slots, values[:, 0]),
                (self._at["done"] + at_slots, values[:, 1]),
            ]
        taken, self._unset = self._unset, []
        if not taken:
            return _NOTHING, _NOTHING
        return np.concatenate([places for places, _ in taken]), np.concatenate([words for _, words in taken])

    def record_sampled(self, slots: list[int], ids: Ints, done: Ints) -> None:
        """What another stage has chosen, columns as in StepResult: it is set with the next step's words. On
        the host thread; nobody opens or forwards these slots meanwhile."""
        with self._recording:
            for slot, token, ended in zip(slots, ids, done, strict=True):
                self._sampled[slot] = max(token, 0), int(ended > 0)

    def _set(self, what: str, slot: int, values: StateUpdates | list[int]) -> None:
        words = np.asarray(values, dtype=np.int32)
        begin = self._at[what] + slot * len(words)
        self._unset.append((np.arange(begin, begin + len(words), dtype=np.int32), words))


_NOTHING: StateUpdates = np.zeros(0, dtype=np.int32)


def end_slots(choices: Choices, slots: list[int]) -> None:
    """Slots that failed: like ones that have stopped, without a further token."""
    if slots:
        choices.done[torch.tensor(slots, device=choices.done.device)] = 1


def take(choices: Choices, slots: list[int], ids: Ints, done: Ints) -> None:
    """As `advance`, with the columns that it has given on another rank."""
    at, ended = (torch.tensor(each, device=choices.done.device) for each in (slots, list(done)))
    chosen = torch.tensor(list(ids), dtype=torch.int32, device=choices.done.device)
    choices.last_tokens[at] = torch.where(ended == 2, choices.last_tokens[at], chosen)
    choices.done[at] = (ended != 0).int()


def advance(choices: Choices, slots: list[int], ids: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
    """What the sampler's kernel does once a token is chosen, in torch: for rows that are sampled outside it.

    Takes one token, or one of ROW_ERRORS, for each of `slots`, at its place of the sequence; the ids and the
    done column as the kernel gives them, on the device."""
    at = torch.tensor(slots, device=ids.device)
    lengths = torch.tensor(positions, device=ids.device) + 1
    chosen = ids.int()
    before, flawed = choices.done[at] != 0, chosen < 0
    stopped = (chosen.unsqueeze(1) == choices.stop_ids[at]).any(1) | (lengths >= choices.max_lengths[at])
    ended = torch.where(flawed, row_error_codes(chosen), stopped.int())
    choices.last_tokens[at] = torch.where(before, choices.last_tokens[at], chosen.clamp(min=0))
    choices.done[at] = (before | (ended != 0)).int()
    return torch.where(before | flawed, _NO_TOKEN, chosen), torch.where(before, 2, ended)
