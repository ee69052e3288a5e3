"""The sampler chooses each slot's next token: it applies the slots' parameters to the logits of a step.

Order: penalties, logit bias, no stop id before `min_tokens`, then the most likely token, or temperature,
top-k, top-p, min-p and a draw. Work that no row requests is skipped. A draw depends only on the slot's seed,
the position and the logits.

A row without a finite largest logit (NaN, infinity, no token left) has no token: its id is one of ROW_ERRORS.
It does not affect other rows: batched computations read zeros in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import INVALID, draw, keep_likely, penalize
from shared.messages import ROW_REFUSED, Floats, Ints, Sampling, SlotOpen, floats, ints

# Ids of rows without a token, and why. BY_REQUEST: penalties or bias of the request caused it.
BY_MODEL, BY_REQUEST = -1, -2
ROW_ERRORS = {
    BY_MODEL: "the logits of this sequence are not finite: NaN, infinity, or no token may follow",
    BY_REQUEST: f"{ROW_REFUSED}its penalties and logit_bias leave no finite logits: ask for milder ones",
}
_COLDEST = 1e-6  # temperature: below it a draw is greedy, except among equal logits
_LEAST = float(np.finfo(np.float32).tiny)  # below it float32 rounds, or a device flushes, to zero
_MOST_TOP_K = 1 << 24  # exact in float32, and above any vocabulary
_SIGN = 1 << 63
_AGAIN = 0x5851F42D4C957F2D  # any constant: Philox with another key gives an independent sequence
_Seeds = NDArray[np.int64]


class Sampler:
    """Sampling state of every slot. Token counts are allocated for the first slot with penalties.

    The host thread may choose for some slots while the device thread opens or closes others: each thread uses
    the rows and keys of its own slots, and counts are allocated before a slot with penalties is sampled.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device, *, deterministic: bool) -> None:
        self._size = (slots, vocab)
        self._device = device
        self._by_row = deterministic
        self._filters = np.zeros((slots, 4), dtype=np.float32)  # temperature, top-k, top-p, min-p
        self._seeds = np.zeros(slots, dtype=np.int64)
        self._penalties: dict[int, tuple[float, float, float]] = {}
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._unending: dict[int, tuple[int, Tensor]] = {}  # stop ids, forbidden below this position
        self._seen: Tensor | None = None  # [slots, vocab], in the prompt or the output
        self._counts: Tensor | None = None  # [slots, vocab], times in the output

    def open(self, opened: SlotOpen) -> None:
        """Take over a slot's sampling parameters; token counts start from its tokens."""
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
        if opened.min_tokens:
            stops = [token for token in opened.stop_ids if 0 <= token < self._size[1]]
            stops_here = torch.tensor(stops, dtype=torch.int64, device=self._device)
            self._unending[slot] = (opened.prompt_tokens + opened.min_tokens, stops_here)

    def close(self, slot: int) -> None:
        """Forget what changes a slot's logits."""
        for state in (self._penalties, self._bias, self._unending):
            state.pop(slot, None)

    def changes_logits(self, slot: int) -> bool:
        """Whether a slot has penalties, bias or a least length."""
        return slot in self._penalties or slot in self._bias or slot in self._unending

    def filters(self, slot: int) -> bool:
        """Whether a slot draws with top-k, top-p or min-p."""
        temperature, top_k, top_p, min_p = self._filters[slot]
        return bool(temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0))

    def choose(self, logits: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """Ids `[rows]`: a token for each row of `logits` `[rows, vocab]` float32, or one of ROW_ERRORS. Row i
        belongs to `slots[i]`, its token to position `positions[i]` of the sequence. `logits` stays
        unchanged."""
        ids = self.propose(logits, slots, positions)
        self.remember(slots, ids)
        return ids

    def propose(
        self, logits: Tensor, slots: list[int], positions: list[int], *, again: bool = False
    ) -> Tensor:
        """Like `choose`, but without `remember`, which the caller calls with the final tokens. A draw `again`
        is independent of the first draw at the same position."""
        adjusted = self._adjust(logits, slots, positions)
        hot = [i for i, slot in enumerate(slots) if self._filters[slot, 0] > 0]
        seeds = self._seeds ^ _AGAIN * again
        if len(hot) == len(slots):
            best = adjusted.amax(-1)
            ids = self._draw(adjusted, best, slots, positions, seeds)
        else:
            ids = _likeliest(adjusted)  # argmax of a row with NaN is the NaN
            best = adjusted.gather(1, ids.unsqueeze(1)).squeeze(1)
            if hot:
                rows = torch.tensor(hot, device=self._device)
                some, at = [slots[i] for i in hot], [positions[i] for i in hot]
                ids[rows] = self._draw(adjusted[rows], best[rows], some, at, seeds)
        return self._flagged(ids, best, logits, changed=adjusted is not logits)

    def _flagged(self, ids: Tensor, best: Tensor, logits: Tensor, *, changed: bool) -> Tensor:
        """`ids`, with one of ROW_ERRORS where the largest logit, `best`, is not finite. `logits` are those
        before penalties and bias, which have `changed` some."""
        sound = best.isfinite()
        if not sound.is_cuda and bool(sound.all()):  # on a GPU this would wait for the device
            return ids
        why = torch.full_like(ids, BY_MODEL)
        if changed:
            why.masked_fill_(logits.amax(-1).isfinite(), BY_REQUEST)
        return torch.where(sound, ids, why)

    def _draw(
        self, logits: Tensor, best: Tensor, slots: list[int], positions: list[int], seeds: _Seeds
    ) -> Tensor:
        step = 1 if self._by_row else len(slots)  # deterministic: vector tails must not depend on the batch
        cuts = [slice(i, i + step) for i in range(0, len(slots), step)]
        parts = [self._draw_rows(logits[c], best[c], slots[c], positions[c], seeds) for c in cuts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _draw_rows(
        self, logits: Tensor, best: Tensor, slots: list[int], positions: list[int], seeds: _Seeds
    ) -> Tensor:
        filters = self._filters[slots]
        on_device = torch.from_numpy(filters).to(self._device)
        temperature, top_k, top_p, min_p = on_device.unbind(1)
        # Relative to the largest logit, so that a tiny temperature cannot overflow.
        scaled = (logits - best.unsqueeze(1)).div_(temperature.unsqueeze(1))
        unsound = ~best.isfinite()
        if unsound.is_cuda or bool(unsound.any()):  # see _flagged
            scaled.masked_fill_(unsound.unsqueeze(1), 0.0)
        if (filters[:, 1] > 0).any() or (filters[:, 2] < 1).any() or (filters[:, 3] > 0).any():
            scaled = keep_likely(scaled, top_k.long(), top_p, min_p)
        keys = torch.from_numpy(seeds[slots]).to(self._device)
        return draw(scaled, keys, torch.tensor(positions, device=self._device))

    def _adjust(self, logits: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """Logits with penalties and bias, and without early stop ids; a copy if any row has one."""
        punished = [i for i, slot in enumerate(slots) if slot in self._penalties]
        biased = [i for i, slot in enumerate(slots) if slot in self._bias]
        early = [i for i, slot in enumerate(slots) if positions[i] < self._unending.get(slot, (0,))[0]]
        if not punished and not biased and not early:
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
        for i in early:
            logits[i].index_fill_(0, self._unending[slots[i]][1], float("-inf"))
        return logits

    def _count(self, opened: SlotOpen) -> None:
        if self._counts is None or self._seen is None:
            with torch.inference_mode(False):  # tensors made in a warm-up's inference mode cannot be written
                self._counts = torch.zeros(self._size, dtype=torch.int32, device=self._device)
                self._seen = torch.zeros(self._size, dtype=torch.bool, device=self._device)
        tokens = torch.tensor(opened.tokens, dtype=torch.int64, device=self._device)
        self._seen[opened.slot] = False
        self._seen[opened.slot, tokens] = True
        self._counts[opened.slot] = torch.bincount(tokens[opened.prompt_tokens :], minlength=self._size[1])

    def remember(self, slots: list[int], ids: Tensor) -> None:
        """Count the chosen tokens of slots with penalties."""
        counted = [i for i, slot in enumerate(slots) if slot in self._penalties]
        if counted and self._counts is not None and self._seen is not None:
            at = torch.tensor([slots[i] for i in counted], device=self._device)
            chosen = ids[torch.tensor(counted, device=self._device)].clamp_(min=0)
            self._counts[at, chosen] += 1
            self._seen[at, chosen] = True


def filters_of(wanted: Sampling) -> NDArray[np.float32]:
    """Temperature, top-k, top-p and min-p, as the samplers read them. Values too small for float32 become
    their limit: greedy, the likeliest token alone, no filter."""
    temperature = wanted.temperature if wanted.temperature >= _COLDEST else 0.0
    min_p = wanted.min_p if wanted.min_p >= _LEAST else 0.0
    top_k = min(wanted.top_k, _MOST_TOP_K)
    return np.array((temperature, top_k, max(wanted.top_p, _LEAST), min_p), dtype=np.float32)


def row_error_codes(ids: Tensor) -> Tensor:
    """The codes of ROW_ERRORS in a done column: INVALID for BY_MODEL (the kernel's code), then BY_REQUEST."""
    return INVALID + BY_MODEL - ids


def row_errors(done: list[int]) -> dict[int, str]:
    """Why rows have no token, by index of the done column. Their codes in `done` become 2, as in
    StepResult."""
    flaws = {row: ROW_ERRORS[INVALID + BY_MODEL - code] for row, code in enumerate(done) if code >= INVALID}
    for row in flaws:
        done[row] = 2
    return flaws


def _likeliest(logits: Tensor) -> Tensor:
    """The first index of the largest logit in each row. NumPy needs an eighth of torch's time on a CPU."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Columns of a StepResult; empty if no row wants any. Among others a row without has 0.0 and no
    alternatives."""

    chosen: Floats = field(default_factory=floats)
    top_counts: Ints = field(default_factory=ints)
    top_ids: Ints = field(default_factory=ints)
    top_values: Floats = field(default_factory=floats)


def logprobs(logits: Tensor, ids: Tensor, asked: list[int]) -> Logprobs:
    """The log probability of `ids[row]` for each row of `logits` `[rows, vocab]`; `asked[row]` is 0 for none,
    else 1 plus the number of alternatives. They are the model's: the logits are those before penalties, bias,
    temperature and filters."""
    rows = [i for i, wanted in enumerate(asked) if wanted]
    if not rows:
        return Logprobs()
    at = torch.tensor(rows, device=logits.device)
    table = logits[at].log_softmax(-1)
    chosen = [0.0] * len(asked)
    its = ids[at, None].clamp(min=0)  # the value of a row without a token is not used
    for row, value in zip(rows, table.gather(1, its).squeeze(1).tolist(), strict=True):
        chosen[row] = value
    counts = [max(wanted - 1, 0) for wanted in asked]
    top = table.topk(min(max(counts), table.shape[-1]))
    top_ids, top_values = ints(), floats()
    for row, row_ids, row_values in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True):
        top_ids.extend(row_ids[: counts[row]])
        top_values.extend(row_values[: counts[row]])
    return Logprobs(floats(chosen), ints(counts), top_ids, top_values)
