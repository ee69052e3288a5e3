"""Drafts on a GPU, in Triton: proposed before a step's forward, accepted after its sampling.

    propose ─▶ inputs of 1 + count tokens a row ─▶ forward ─▶ a token chosen at each ─▶ accept

No host is between, so a step that is queued after another finds its drafts. Each has one program a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.drafts.ref import LEAST, MOST, WINDOW
from kernels.elementwise.gpu import DraftState
from kernels.sampling.gpu import Choices

_BLOCK = 2048
_PLACES = tl.constexpr(1 << 24)  # above any position: a match's key is its length, then its place
_LEAST, _MOST, _WINDOW = tl.constexpr(LEAST), tl.constexpr(MOST), tl.constexpr(WINDOW)
COLUMNS = 3  # of `accept`'s answer after the ids: count, done, drafted


@triton.jit
def _longest(
    text: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The longest run of tokens that ends from `begin` to before `stop` and is alike the tokens that end at
    `place`, none of which is before `first`: as its length times _PLACES and its end; 0: none."""
    best = tl.full([], 0, tl.int32)
    for block in range(begin, stop, BLOCK):
        end = block + tl.arange(0, BLOCK)
        alike, run = end < stop, tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(_MOST):
            there = alike & (end >= begin + back) & (place - back >= first)
            wanted = tl.load(text + tl.maximum(place - back, 0))
            alike = there & (tl.load(text + end - back, mask=there, other=-1) == wanted)
            run += alike.to(tl.int32)
        best = tl.maximum(best, tl.max(tl.where(run > 0, run * _PLACES + end, 0), 0))
    return best


@triton.jit(do_not_specialize=["width"])
def _propose(
    slots: tl.tensor,
    done: tl.tensor,
    places: tl.tensor,
    prompts: tl.tensor,
    predicted: tl.tensor,
    history: tl.tensor,
    ids: tl.tensor,
    width: tl.tensor,
    STRIDE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    slot = tl.load(slots + tl.program_id(0) * STRIDE).to(tl.int64)
    place = tl.where(tl.load(done + slot) != 0, 0, tl.load(places + slot))
    text, begin = history + slot * width, tl.maximum(place + 1 - _WINDOW, 0)
    own = _longest(text, begin, place, place, begin, BLOCK)
    prompt, foreseen = tl.load(prompts + slot), tl.load(predicted + slot)
    likely = _longest(text, width - foreseen, width, place, prompt, BLOCK)
    answer = tl.maximum(place + 1 - prompt, 1)
    least = tl.minimum(tl.maximum(own // _PLACES, _LEAST), answer)
    is_likely = (likely // _PLACES >= least) & (likely % _PLACES + 1 < width) & (place > 0)
    alike = tl.where(own // _PLACES >= _LEAST, own // _PLACES, 0)
    alike = tl.where(is_likely, likely // _PLACES, alike)
    i = tl.arange(0, COUNT)
    repeated = own % _PLACES + 1 + i % tl.maximum(place - own % _PLACES, 1)
    at = tl.where(is_likely, likely % _PLACES + 1 + i, repeated)
    tl.store(ids + slot * COUNT + i, tl.load(text + at, mask=(i < alike) & (at < width), other=-1))


@triton.jit
def _accept(
    token_rows: tl.tensor,
    slots: tl.tensor,
    chosen: tl.tensor,
    ended: tl.tensor,
    token_ids: tl.tensor,
    last_tokens: tl.tensor,
    done: tl.tensor,
    places: tl.tensor,
    history: tl.tensor,
    answer: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    QUERIES: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    q, own = tl.arange(0, QUERIES), row * QUERIES
    slot = tl.load(slots + own).to(tl.int64)
    ids, ends = tl.load(chosen + own + q), tl.load(ended + own + q)
    draft = tl.load(token_ids + tl.load(token_rows + own) + 1 + q, mask=q < QUERIES - 1, other=-1)
    stays = (draft >= 0) & (draft == ids) & (ends == 0)
    last = tl.min(tl.where(stays, QUERIES, q), 0)
    flawed = tl.sum(tl.where((q == last) & (ids < 0), 1, 0), 0)
    last = tl.maximum(last - flawed, 0)  # a later token with a flaw is that of the next step
    token, end = tl.sum(tl.where(q == last, ids, 0), 0), tl.sum(tl.where(q == last, ends, 0), 0)
    before = tl.load(done + slot)
    tl.store(answer + q * rows + row, tl.where((before == 0) & (q <= last), ids, -1))
    column = answer + QUERIES * rows + row
    tl.store(column, tl.where(before == 0, last + 1, 1))
    tl.store(column + rows, tl.where(before == 0, end, 2))
    tl.store(column + 2 * rows, tl.where(before == 0, tl.sum((draft >= 0).to(tl.int32), 0), 0))
    if before == 0:
        place = tl.load(places + slot) + 1
        tl.store(history + slot * width + place + q, tl.maximum(ids, 0), mask=q <= last)
        tl.store(places + slot, place + last)
        tl.store(last_tokens + slot, tl.maximum(token, 0))
        tl.store(done + slot, tl.where(end != 0, 1, 0))


def propose(slots: Tensor, queries: int, done: Tensor, state: DraftState) -> None:
    """Set the drafts of the slot of every `queries`-th entry of `slots` `[rows * queries]`."""
    count = state.ids.shape[1]
    _propose[(len(slots) // queries,)](
        slots, done, state.places, state.prompts, state.predicted, state.history, state.ids,
        state.history.shape[1],
        STRIDE=queries, COUNT=count, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def accept(
    samples: tuple[Tensor, Tensor], chosen: Tensor, token_ids: Tensor, choices: Choices, answer: Tensor
) -> None:
    """Accept drafts, and update the places, last tokens, ends and history of `choices`.

    `samples`: the token rows and slots `[rows * queries]` of the sample rows, of which each `queries` belong
    to one slot and to tokens in order. `chosen` `[2, at least rows * queries]` is what `choose` gave for
    them; `token_ids` of the step as kernels.elementwise resolves them. `answer` `[queries + COLUMNS, rows]`
    gets the ids of each row, -1 after its last; their number, done as in a StepResult, and the number of
    drafts."""
    queries, rows = len(answer) - COLUMNS, answer.shape[1]
    assert choices.places is not None
    assert choices.history is not None
    _accept[(rows,)](
        *samples, chosen[0], chosen[1], token_ids, choices.last_tokens, choices.done, choices.places,
        choices.history, answer, rows, choices.history.shape[1], QUERIES=queries, num_warps=1,
    )  # fmt: skip
