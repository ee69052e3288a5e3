"""The sampler chooses each slot's next token: it applies the slots' parameters to the logits of a step.

Order: penalties (LOGITS), logit bias, no stop id before `min_tokens`, then the most likely token, or
temperature, top-k, top-p and min-p (FILTERS) and a draw. Work that no row requests is skipped. A draw depends
only on the slot's seed, the position and the logits. Where a kernel draws, `prepare` does what comes before.

A row without a finite largest logit (NaN, infinity, no token left) has no token: its id is one of ROW_ERRORS.
It does not affect other rows: batched computations read zeros in its place.

What slots of the torch and of the CUDA engine have in common: tokens, ends, the choices of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kernels.cpu_jit
from kernels.sampling.ref import COLUMN, FILTERS, INVALID, LOGITS, PARAMETERS, Stages, draw
from services.executor.engine import StepOutput
from shared.errors import EngineError
from shared.messages import (
    ROW_REFUSED,
    WHOLE_VECTOR,
    Ints,
    PromptTokens,
    Sampling,
    SlotOpen,
    StepPlan,
    floats,
    ints,
)

# Ids of a row without a token, by the reason; the done column has the same number without the sign.
BY_MODEL, BY_REQUEST = -INVALID, -INVALID - 1
ROW_ERRORS = {
    BY_MODEL: "the logits of this sequence are not finite: NaN, infinity, or no token may follow",
    BY_REQUEST: f"{ROW_REFUSED}its penalties and logit_bias leave no finite logits: ask for milder ones",
}
SCORED_ROWS = 64  # rows of a prompt whose logits exist at once: 152k tokens take 39 MB of float32
_STAGES = (*LOGITS, *FILTERS)
_READS = [[COLUMN[each.field] for each in stage.reads] for stage in _STAGES]
_OFF = np.array([each.off for each in PARAMETERS], dtype=np.float32)
_LOGITS, _FILTERS = range(len(LOGITS)), range(len(LOGITS), len(_STAGES))
_COUNTING = [at for at, stage in enumerate(_STAGES) if stage.history]
_HEAT = COLUMN["temperature"]
_SIGN = 1 << 63
_AGAIN = 0x5851F42D4C957F2D  # any constant: Philox with another key gives an independent sequence


class Sampler:
    """Sampling state of every slot. Token counts are allocated for the first slot with penalties.

    The host thread may choose for some slots while the device thread opens or closes others: each thread uses
    the rows and keys of its own slots, and counts are allocated before a slot with penalties is sampled.
    """

    def __init__(
        self, slots: int, vocab: int, device: torch.device, *, deterministic: bool, taken: Stages = ()
    ) -> None:
        """`taken`: the last of FILTERS, which a kernel runs with the draw. Raises ValueError for others."""
        self._left = _FILTERS[: len(FILTERS) - len(taken)]  # filters that `prepare` runs
        if FILTERS[len(self._left) :] != taken:
            raise ValueError("a kernel can only take the last filters: what it leaves runs before it")
        self._size = (slots, vocab)
        self._device = device
        self._by_row = deterministic
        self._draws = _fastest_draw(device)
        self._table = np.zeros((slots, len(PARAMETERS)), dtype=np.float32)
        self._on: list[set[int]] = [set() for _ in _STAGES]  # slots that each stage changes
        self._hot: set[int] = set()  # slots that draw
        self._seeds = np.zeros(slots, dtype=np.int64)
        self._logprobs = np.zeros(slots, dtype=np.int32)  # of SlotOpen
        self._pooling: dict[int, int] = {}  # of SlotOpen, by slot
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._unending: dict[int, tuple[int, Tensor]] = {}  # stop ids, forbidden below this position
        # `[slots, vocab]`: whether a token is in the prompt or the output, and how often in the output.
        self._history: tuple[Tensor, Tensor] | None = None

    def open(self, opened: SlotOpen) -> None:
        """Take over a slot's sampling parameters; token counts start from its tokens."""
        slot, wanted = opened.slot, opened.sampling
        self.close(slot)
        row = self._table[slot] = slot_row(wanted)
        self._seeds[slot], self._logprobs[slot] = seed_key(opened.seed), opened.logprobs
        if opened.pooling:
            self._pooling[slot] = opened.pooling
        if row[_HEAT] > 0:
            self._hot.add(slot)
        for stage in (*_LOGITS, *(_FILTERS if slot in self._hot else ())):
            if (row != _OFF)[_READS[stage]].any():
                self._on[stage].add(slot)
        if self._asking(_COUNTING, [slot]):
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
        for slots in (self._hot, *self._on):
            slots.discard(slot)
        self._bias.pop(slot, None)
        self._unending.pop(slot, None)
        self._pooling.pop(slot, None)

    def has_pooled(self, slots: Iterable[int]) -> bool:
        """Whether a row of these slots gives a vector."""
        return bool(self._pooling) and not self._pooling.keys().isdisjoint(slots)

    def with_vectors(self, output: StepOutput, hidden: Tensor | None, slots: list[int]) -> StepOutput:
        """`output` with the vectors of the rows that pool: their leading numbers, of length 1. `hidden`: see
        Pending."""
        if not self.has_pooled(slots) or hidden is None:
            return output
        asked = [(row, self._pooling[slot]) for row, slot in enumerate(slots) if slot in self._pooling]
        return replace(output, vectors=vectors_of(hidden, asked))

    def has_logit_changes(self, slot: int) -> bool:
        """Whether `prepare` changes a slot's logits: penalties, bias, a least length, a filter left to it."""
        stages = self._asking((*_LOGITS, *self._left), [slot])
        return bool(stages) or slot in self._bias or slot in self._unending

    def has_penalties(self, slots: list[int]) -> bool:
        """Whether a slot of these has penalties, which change with each token."""
        return bool(self._asking(_COUNTING, slots))

    def has_filters(self, slot: int) -> bool:
        """Whether a slot draws with a filter: top-k, top-p, min-p."""
        return bool(self._asking(_FILTERS, [slot]))

    def _asking(self, stages: Iterable[int], slots: list[int]) -> list[int]:
        """The indices of slots that any of these stages changes."""
        sets = [on for stage in stages if (on := self._on[stage])]
        return [i for i, slot in enumerate(slots) if any(slot in on for on in sets)] if sets else []

    def prepare(self, logits: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """The logits from which a kernel chooses: what it does not take, done. Arguments as of `choose`; the
        caller calls `remember` with the chosen tokens."""
        adjusted = self.adjusted(logits, slots, positions)
        if self._asking(self._left, slots):  # divided by 0, a greedy row keeps its likeliest tokens
            scaled = self._scaled(adjusted, adjusted.amax(-1), slots)
            dropped = self._through(self._left, scaled, slots, own=True) == -torch.inf
            adjusted = adjusted.masked_fill(dropped, -torch.inf)
        return adjusted

    def choose(self, logits: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """Ids `[rows]`: a token for each row of `logits` `[rows, vocab]` float32, or one of ROW_ERRORS. Row i
        belongs to `slots[i]`, its token to position `positions[i]` of the sequence. `logits` stays
        unchanged."""
        ids = self.pick(self.adjusted(logits, slots, positions), logits, slots, positions)
        self.remember(slots, ids)
        return ids

    def pick(
        self, adjusted: Tensor, logits: Tensor, slots: list[int], positions: list[int], *, again: bool = False
    ) -> Tensor:
        """Like `choose`, of logits that are `adjusted`, and without `remember`, which the caller calls with
        the final tokens. A draw `again` is independent of the first draw at the same position."""
        hot = [i for i, slot in enumerate(slots) if slot in self._hot]
        if len(hot) == len(slots):
            best = adjusted.amax(-1)
            ids = self._draw(adjusted, best, slots, positions, again=again)
        else:  # argmax of a row with NaN is the NaN; NumPy needs an eighth of torch's time on a CPU
            if adjusted.device.type == "cpu":
                host = adjusted.numpy()
                found = host.argmax(-1)
                ids = torch.from_numpy(found)
                if not hot and np.isfinite(host[np.arange(len(found)), found]).all():
                    return ids
            else:
                ids = adjusted.argmax(-1)
            best = adjusted.gather(1, ids.unsqueeze(1)).squeeze(1)
            if hot:
                rows = torch.tensor(hot, device=self._device)
                some, at = [slots[i] for i in hot], [positions[i] for i in hot]
                ids[rows] = self._draw(adjusted[rows], best[rows], some, at, again=again)
        sound = best.isfinite()
        if bool(sound.all()):
            return ids
        why = torch.full_like(ids, BY_MODEL)
        if adjusted is not logits:
            why.masked_fill_(logits.amax(-1).isfinite(), BY_REQUEST)
        return torch.where(sound, ids, why)

    def _draw(
        self, logits: Tensor, best: Tensor, slots: list[int], positions: list[int], *, again: bool
    ) -> Tensor:
        if self._by_row and len(slots) > 1:  # deterministic: vector tails must not depend on the batch
            each = (slice(i, i + 1) for i in range(len(slots)))
            return torch.cat(
                [self._draw(logits[i], best[i], slots[i], positions[i], again=again) for i in each]
            )
        heat = torch.from_numpy(self._table[slots, _HEAT]).to(self._device)
        keys = torch.from_numpy(self._seeds[slots] ^ _AGAIN * again).to(self._device)
        at = torch.tensor(positions, device=self._device)
        if not self._asking(_FILTERS, slots):
            return self._draws(logits, best, heat, keys, at)
        kept = self._through(_FILTERS, self._scaled(logits, best, slots), slots, own=True)
        return self._draws(kept, torch.zeros_like(best), torch.ones_like(heat), keys, at)

    def _scaled(self, logits: Tensor, best: Tensor, slots: list[int]) -> Tensor:
        return _scaled(logits, best, torch.from_numpy(self._table[slots, _HEAT]).to(self._device))

    def _through(self, stages: range, logits: Tensor, slots: list[int], *, own: bool = False) -> Tensor:
        """`logits` after these of _STAGES, each for the rows that ask for it; `own`: changed in place."""
        for stage in stages:
            asked = self._asking((stage,), slots)
            if not asked:
                continue
            whole, at = len(asked) == len(slots), [slots[i] for i in asked]
            rows = torch.tensor(asked, device=self._device)
            inputs = [logits if whole else logits[rows]]
            if _STAGES[stage].history and self._history is not None:
                its = torch.tensor(at, device=self._device)
                inputs += [each[its] for each in self._history]
            columns = torch.from_numpy(self._table[np.ix_(at, _READS[stage])]).to(self._device)
            changed = _STAGES[stage].run(*inputs, *columns.unbind(1))
            copy = logits.index_copy_ if own else logits.index_copy
            logits = changed if whole else copy(0, rows, changed)
        return logits

    def adjusted(self, logits: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """Logits with penalties and bias, and without early stop ids; a copy if any row has one."""
        adjusted = self._through(_LOGITS, logits, slots)
        biased = [i for i, slot in enumerate(slots) if slot in self._bias]
        early = [i for i, slot in enumerate(slots) if positions[i] < self._unending.get(slot, (0,))[0]]
        if (biased or early) and adjusted is logits:
            adjusted = logits.clone()
        for i in biased:
            ids, values = self._bias[slots[i]]
            adjusted[i].index_add_(0, ids, values)
        for i in early:
            adjusted[i].index_fill_(0, self._unending[slots[i]][1], float("-inf"))
        return adjusted

    def _count(self, opened: SlotOpen) -> None:
        if self._history is None:
            with torch.inference_mode(False):  # tensors made in a warm-up's inference mode cannot be written
                seen = torch.zeros(self._size, dtype=torch.bool, device=self._device)
                self._history = seen, torch.zeros(self._size, dtype=torch.int32, device=self._device)
        seen, counts = self._history
        tokens = torch.tensor(opened.tokens, dtype=torch.int64, device=self._device)
        seen[opened.slot] = False
        seen[opened.slot, tokens] = True
        counts[opened.slot] = torch.bincount(tokens[opened.prompt_tokens :], minlength=self._size[1])

    def remember(self, slots: list[int], ids: Tensor) -> None:
        """Count the chosen tokens of slots with penalties."""
        counted = self._asking(_COUNTING, slots)
        if counted and self._history is not None:
            seen, counts = self._history
            at = torch.tensor([slots[i] for i in counted], device=self._device)
            chosen = ids[torch.tensor(counted, device=self._device)].clamp_(min=0)
            counts[at, chosen] += 1
            seen[at, chosen] = True

    def with_logprobs(self, output: StepOutput, logits: Tensor, ids: Tensor, slots: list[int]) -> StepOutput:
        """`output` with the log probability of `ids[row]` and alternatives for each row of `logits`
        `[rows, vocab]` whose slot wants any. They are the model's: the logits are those before penalties,
        bias, temperature and filters. Another row has 0.0 and no alternatives."""
        asked = self._logprobs[slots]  # 0 for none, else 1 plus the number of alternatives
        if not asked.any():
            return output
        at = torch.from_numpy(asked.nonzero()[0]).to(logits.device)
        counts = torch.from_numpy(asked - 1).clamp(min=0)
        table = logits[at].log_softmax(-1)
        chosen = torch.zeros(len(slots), device=logits.device)
        chosen[at] = table.gather(1, ids[at, None].clamp(min=0)).squeeze(1)
        top = table.topk(min(int(counts.max()), table.shape[-1]))
        kept = torch.arange(top.values.shape[1], device=at.device) < counts.to(at.device)[at, None]
        return replace(
            output,
            logprobs=floats(chosen.tolist()),
            top_counts=ints(counts.tolist()),
            top_ids=ints(top.indices[kept].tolist()),
            top_logprobs=floats(top.values[kept].tolist()),
        )


def _scaled(logits: Tensor, best: Tensor, heat: Tensor) -> Tensor:
    """Logits divided by the temperature, relative to the largest: a tiny temperature cannot overflow."""
    scaled = (logits - best.unsqueeze(1)).div_(heat.unsqueeze(1))
    sound = best.isfinite()
    return scaled if bool(sound.all()) else scaled.masked_fill_(~sound.unsqueeze(1), 0.0)


def _draw_by_definition(
    logits: Tensor, best: Tensor, heat: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """See kernels.cpu_jit.draw.draw."""
    return draw(_scaled(logits, best, heat), seeds, positions)


def _fastest_draw(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The kernel on a CPU with Numba: 8 rows of 49,152 logits in 0.12 ms of one Zen 5 core, in torch 2.5."""
    if device.type == "cpu" and kernels.cpu_jit.available():
        return import_module("kernels.cpu_jit.draw").draw  # type: ignore[no-any-return]  # Numba's import
    return _draw_by_definition


def slot_row(wanted: Sampling) -> NDArray[np.float32]:
    """A row of the slot table, as the samplers read it: `[PARAMETERS]`. Values too small for float32 become
    their limit: greedy, the likeliest token alone, no filter."""
    return np.array([each.fit(getattr(wanted, each.field)) for each in PARAMETERS], dtype=np.float32)


def seed_key(seed: int) -> int:
    """The bits of a uint64 as int64."""
    return (seed ^ _SIGN) - _SIGN


def row_errors(done: list[int]) -> dict[int, str]:
    """Why rows have no token, by index of the done column. Their codes in `done` become 2, as in
    StepResult."""
    flaws = {row: ROW_ERRORS[-code] for row, code in enumerate(done) if code >= INVALID}
    for row in flaws:
        done[row] = 2
    return flaws


def vectors_of(hidden: Tensor, asked: Sequence[tuple[int, int]]) -> tuple[tuple[int, bytes], ...]:
    """The `vectors` of a StepOutput: of rows of `hidden`, each with how many leading numbers are `asked` or
    WHOLE_VECTOR, made of length 1."""
    rows = torch.tensor([row for row, _ in asked], device=hidden.device, dtype=torch.int64)
    vectors = []
    for (row, numbers), vector in zip(asked, hidden[rows].double().cpu(), strict=True):
        cut = vector if numbers == WHOLE_VECTOR else vector[:numbers]
        vectors.append((row, (cut / cut.norm()).float().numpy().tobytes()))
    return tuple(vectors)


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


def record_choices(last_tokens: Tensor, done: Tensor, slots: list[int], ids: Ints, ended: Ints) -> None:
    """Update `last_tokens` and `done`, `[slots]`, as sampling does, with columns of another rank: `ids`, and
    `ended` as in StepResult."""
    at, chosen, ends = (torch.tensor(each, device=done.device) for each in (slots, list(ids), list(ended)))
    last_tokens[at] = torch.where(ends == 2, last_tokens[at], chosen.to(last_tokens.dtype))
    done[at] = (ends != 0).to(done.dtype)


def prompt_scores(
    plan: StepPlan,
    first: Sequence[int] | NDArray[np.int64],
    asked: Mapping[int, SlotOpen],
    logits_of: Callable[[slice], Tensor],
) -> tuple[PromptTokens, ...]:
    """The log probabilities of the prompts of the slots `asked` that a step computes: row p of a prompt gives
    that of token p + 1. `first`: the first token row of each row of the plan; `logits_of`: the logits
    `[rows, vocab]` float32 of some token rows, at most SCORED_ROWS at once."""
    found = []
    for row, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
        if (opened := asked.get(slot)) is None:
            continue
        end, begin = min(start + count, opened.prompt_tokens - 1), int(first[row]) - start
        known = min(start, 1)  # the first token of a prompt follows none
        if start >= end + 1 - known:
            continue
        piece = PromptTokens(
            seq=opened.seq,
            step=plan.step,
            first=start + known,
            ids=opened.tokens[start + known : end + 1],
            logprobs=floats([0.0] * (1 - known)),
            top_counts=ints([0] * (1 - known)),
            ranks=ints([0] * (1 - known)),
        )
        for at in range(start, end, SCORED_ROWS):
            upto = min(at + SCORED_ROWS, end)
            table = logits_of(slice(begin + at, begin + upto)).log_softmax(-1)
            ids = torch.tensor(opened.tokens[at + 1 : upto + 1], dtype=torch.int64, device=table.device)
            chosen = table.gather(1, ids[:, None])
            top = table.topk(min(opened.prompt_alternatives, table.shape[-1]))
            piece.logprobs.extend(chosen.flatten().tolist())
            piece.ranks.extend((1 + (table > chosen).sum(-1)).tolist())
            piece.top_counts.extend([top.indices.shape[1]] * (upto - at))
            piece.top_ids.extend(top.indices.flatten().tolist())
            piece.top_logprobs.extend(top.values.flatten().tolist())
        found.append(piece)
    return tuple(found)
