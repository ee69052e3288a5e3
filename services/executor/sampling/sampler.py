"""The sampler chooses each slot's next token: it applies the slots' parameters to the logits of a step.

Order: penalties, logit bias, then the most likely token, or temperature, top-k, top-p, min-p and a draw.
Work that no row asked for is not done. A draw depends on the slot's seed, the position and the logits only.

A row without a finite largest logit (NaN, infinity, nothing left to choose) has no token: its id is one of
ROW_ERRORS. No other row sees it: whatever is computed for several rows at once finds zeros in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import INVALID, draw, keep_likely, penalize
from shared.messages import ROW_REFUSED, Floats, Ints, Sampling, SlotOpen, floats, ints

# Ids of rows that have no token, and why. The second is the request's own fault.
BY_MODEL, BY_REQUEST = -1, -2
ROW_ERRORS = {
    BY_MODEL: "the logits of this sequence are not finite: NaN, infinity, or no token may follow",
    BY_REQUEST: f"{ROW_REFUSED}its penalties and logit_bias leave no finite logits: ask for milder ones",
}
_COLDEST = 1e-6  # temperature: below it only equal logits would share the draw
_LEAST = float(np.finfo(np.float32).tiny)  # below it float32 rounds, or a device flushes, to zero
_MOST_TOP_K = 1 << 24  # exact in float32, and beyond any vocabulary
_SIGN = 1 << 63
_AGAIN = 0x5851F42D4C957F2D  # any constant: Philox of another key is another sequence
_Seeds = NDArray[np.int64]


class Sampler:
    """Sampling state of every slot. Token counts for penalties are made when the first slot asks for them.

    The host thread may choose for some slots while the device thread opens or closes others: each touches the
    rows and keys of its own slots, and the counts exist before a slot that needs them is sampled.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device, *, deterministic: bool) -> None:
        self._size = (slots, vocab)
        self._device = device
        self._by_row = deterministic
        self._filters = np.zeros((slots, 4), dtype=np.float32)  # temperature, top-k, top-p, min-p
        self._seeds = np.zeros(slots, dtype=np.int64)
        self._penalties: dict[int, tuple[float, float, float]] = {}
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: Tensor | None = None  # [slots, vocab], in the prompt or the output
        self._counts: Tensor | None = None  # [slots, vocab], times in the output

    def open(self, opened: SlotOpen) -> None:
        """Take a slot's sampling; counts start from the tokens it brings."""
        slot, wanted = opened.slot, opened.sampling
        self.close(slot)
        self._filters[slot] = filters_of(wanted)
        self._seeds[slot] = (opened.seed ^ _SIGN) - _SIGN  # the bits of a uint64 as int64
        penalties = (wanted.repetition_penalty, wanted.presence_penalty, wanted.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            self._penalties[slot] = penalties
            self._count(opened)
        if wanted.bias_ids:
            ids = torch.tensor(wanted.bias_ids, device=self._device)
            self._bias[slot] = (ids, torch.tensor(wanted.bias_values, device=self._device))

    def close(self, slot: int) -> None:
        """Forget a slot's penalties and bias."""
        self._penalties.pop(slot, None)
        self._bias.pop(slot, None)

    def changes_logits(self, slot: int) -> bool:
        """Whether a slot has penalties or bias: more than temperature and filters."""
        return slot in self._penalties or slot in self._bias

    def filters(self, slot: int) -> bool:
        """Whether a token's chance depends on which others there are to choose from, beyond their sum."""
        temperature, top_k, top_p, min_p = self._filters[slot]
        return bool(temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0))

    def choose(self, logits: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """A token for each row of `logits` `[rows, vocab]`, float32: ids `[rows]`, or one of ROW_ERRORS. Row
        i is for `slots[i]`, its token takes place `positions[i]` of the sequence. `logits` is left as it
        is."""
        ids = self.propose(logits, slots, positions)
        self.remember(slots, ids)
        return ids

    def propose(
        self, logits: Tensor, slots: list[int], positions: list[int], *, again: bool = False
    ) -> Tensor:
        """As `choose`, of tokens that may not come to be: whatever does must be given to `remember`. A draw
        made `again` is independent of the first one for the same place."""
        adjusted = self._adjust(logits, slots)
        hot = [i for i, slot in enumerate(slots) if self._filters[slot, 0] > 0]
        seeds = self._seeds ^ _AGAIN * again
        if len(hot) == len(slots):
            best = adjusted.amax(-1)
            ids = self._draw(adjusted, best, slots, positions, seeds)
        else:
            ids = _likeliest(adjusted)  # a NaN is the likeliest of its row
            best = adjusted.gather(1, ids.unsqueeze(1)).squeeze(1)
            if hot:
                rows = torch.tensor(hot, device=self._device)
                some, places = [slots[i] for i in hot], [positions[i] for i in hot]
                ids[rows] = self._draw(adjusted[rows], best[rows], some, places, seeds)
        return self._flagged(ids, best, logits, changed=adjusted is not logits)

    def _flagged(self, ids: Tensor, best: Tensor, logits: Tensor, *, changed: bool) -> Tensor:
        """`ids`, and one of ROW_ERRORS where the largest logit, `best`, is not finite. `logits` are those
        before the slots' wishes, which have `changed` some."""
        sound = best.isfinite()
        if not sound.is_cuda and bool(sound.all()):  # on a GPU to ask would be to wait
            return ids
        why = torch.full_like(ids, BY_MODEL)
        if changed:
            why.masked_fill_(logits.amax(-1).isfinite(), BY_REQUEST)
        return torch.where(sound, ids, why)

    def _draw(
        self, logits: Tensor, best: Tensor, slots: list[int], positions: list[int], seeds: _Seeds
    ) -> Tensor:
        step = 1 if self._by_row else len(slots)  # by row: vector tails must not fall by batch size
        cuts = [slice(i, i + step) for i in range(0, len(slots), step)]
        parts = [self._draw_rows(logits[c], best[c], slots[c], positions[c], seeds) for c in cuts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _draw_rows(
        self, logits: Tensor, best: Tensor, slots: list[int], positions: list[int], seeds: _Seeds
    ) -> Tensor:
        filters = self._filters[slots]
        on_device = torch.from_numpy(filters).to(self._device)
        temperature, top_k, top_p, min_p = on_device.unbind(1)
        # Relative to the largest, so that a tiny temperature cannot overflow.
        scaled = (logits - best.unsqueeze(1)).div_(temperature.unsqueeze(1))
        unsound = ~best.isfinite()
        if unsound.is_cuda or bool(unsound.any()):  # see _flagged
            scaled.masked_fill_(unsound.unsqueeze(1), 0.0)
        if (filters[:, 1] > 0).any() or (filters[:, 2] < 1).any() or (filters[:, 3] > 0).any():
            scaled = keep_likely(scaled, top_k.long(), top_p, min_p)
        keys = torch.from_numpy(seeds[slots]).to(self._device)
        return draw(scaled, keys, torch.tensor(positions, device=self._device))

    def _adjust(self, logits: Tensor, slots: list[int]) -> Tensor:
        """Logits with penalties and bias; a copy if any row has one."""
        punished = [i for i, slot in enumerate(slots) if slot in self._penalties]
        biased = [i for i, slot in enumerate(slots) if slot in self._bias]
        if not punished and not biased:
            return logits
        logits = logits.clone()
        if punished and self._counts is not None and self._seen is not None:
            at = torch.tensor([slots[i] for i in punished], device=self._device)
            strength = torch.tensor([self._penalties[slots[i]] for i in punished], device=self._device)
            rows = torch.tensor(punished, device=self._device)
            logits[rows] = penalize(logits[rows], self._seen[at], self._counts[at], strength)
        for i in biased:
            ids, values = self._bias[slots[i]]
            logits[i].index_add_(0, ids, values)
        return logits

    def _count(self, opened: SlotOpen) -> None:
        if self._counts is None or self._seen is None:
            with torch.inference_mode(False):  # a warm-up is in it: what it makes cannot be set later
                self._counts = torch.zeros(self._size, dtype=torch.int32, device=self._device)
                self._seen = torch.zeros(self._size, dtype=torch.bool, device=self._device)
        tokens = torch.tensor(opened.tokens, dtype=torch.int64, device=self._device)
        self._seen[opened.slot] = False
        self._seen[opened.slot, tokens] = True
        self._counts[opened.slot] = torch.bincount(tokens[opened.prompt_tokens :], minlength=self._size[1])

    def remember(self, slots: list[int], ids: Tensor) -> None:
        """Count the tokens chosen for `slots`, where penalties ask for that."""
        counted = [i for i, slot in enumerate(slots) if slot in self._penalties]
        if counted and self._counts is not None and self._seen is not None:
            at = torch.tensor([slots[i] for i in counted], device=self._device)
            chosen = ids[torch.tensor(counted, device=self._device)].clamp_(min=0)
            self._counts[at, chosen] += 1
            self._seen[at, chosen] = True


def filters_of(wanted: Sampling) -> NDArray[np.float32]:
    """Temperature, top-k, top-p and min-p, as samplers read them: what is too small for float32 becomes what
    it tends to, a greedy choice, the likeliest token alone, no filter."""
    temperature = wanted.temperature if wanted.temperature >= _COLDEST else 0.0
    min_p = wanted.min_p if wanted.min_p >= _LEAST else 0.0
    top_k = min(wanted.top_k, _MOST_TOP_K)
    return np.array((temperature, top_k, max(wanted.top_p, _LEAST), min_p), dtype=np.float32)


def row_error_codes(ids: Tensor) -> Tensor:
    """ROW_ERRORS among `ids` as they are told in a done column: INVALID for the first, as the kernel does."""
    return INVALID + BY_MODEL - ids


def row_errors(done: list[int]) -> dict[int, str]:
    """Why rows of such a column have no token, by index; their entries become those of a StepResult."""
    flaws = {row: ROW_ERRORS[INVALID + BY_MODEL - code] for row, code in enumerate(done) if code >= INVALID}
    for row in flaws:
        done[row] = 2
    return flaws


def _likeliest(logits: Tensor) -> Tensor:
    """The first of the largest in each row. On a CPU by NumPy: an eighth of torch's time."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


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
    none, else 1 plus the number of alternatives. They are those of the model: of the logits before penalties,
    bias, temperature and filters."""
    rows = [i for i, wanted in enumerate(asked) if wanted]
    if not rows:
        return Logprobs()
    at = torch.tensor(rows, device=logits.device)
    table = logits[at].log_softmax(-1)
    chosen = [0.0] * len(asked)
    its = ids[at, None].clamp(min=0)  # rows without a token mean nothing
    for row, value in zip(rows, table.gather(1, its).squeeze(1).tolist(), strict=True):
        chosen[row] = value
    counts = [max(wanted - 1, 0) for wanted in asked]
    top = table.topk(min(max(counts), table.shape[-1]))
    top_ids, top_values = ints(), floats()
    for row, row_ids, row_values in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True):
        top_ids.extend(row_ids[: counts[row]])
        top_values.extend(row_values[: counts[row]])
    return Logprobs(floats(chosen), ints(counts), top_ids, top_values)
