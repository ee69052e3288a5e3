"""Samples on a GPU, in Triton: filters, the draw and the end of a slot, in two launches for any batch.

    1. groups of 256 logits each: masked, their maximum and mass                reads all logits once
    2. one program a row: choose group and token; update last token and done    reads few groups

The draw is the one of kernels.sampling.ref: one Gumbel noise chooses the group, one the token, from
Philox(seed, position, level), so it depends on neither batch nor slot.

Each filter is a least logit. The k-th largest group maximum is at most the k-th largest logit, so top-k and
its top-p lie in the few groups with a maximum of at least that; top-p alone tries the 96 best groups. Their
logits from that bound on are the candidates, and bisection of a key finds the least kept one: exact, without
a sort, in a bounded number of rounds. A key is a float32's bits as an integer of the same order. If a filter
keeps more than _CANDIDATES logits (a flat distribution, a large top-k), the same program bisects over all
logits of the row: exact, but slower.

A slot may have a mask, a bit a token. Pass 1 reads it from pinned memory of the host, where it may be written
until this kernel is queued, and sets the logits of forbidden tokens to minus infinity.

Parameters are columns of the slot table (COLUMN). Torch first runs the stages that are not in TAKEN.
A row without a finite largest logit (the first pass stores infinity for NaN) has no token: it is INVALID, and
its slot is done. The kernel treats it like a greedy row, which always ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.ref import COLUMN, GROUP_TOKENS, INVALID, LIKELY

TAKEN = (LIKELY,)  # the last of FILTERS
_PER_PROGRAM = 8  # groups of pass 1
_TRIED = 96  # groups with candidates
_CANDIDATES = 2048  # logits to bisect
_SCAN = 16  # groups read at a time
_INVALID = tl.constexpr(INVALID)
_COLUMNS, _TEMPERATURE = tl.constexpr(len(COLUMN)), tl.constexpr(COLUMN["temperature"])
_TOP_K, _TOP_P, _MIN_P = (tl.constexpr(COLUMN[name]) for name in ("top_k", "top_p", "min_p"))
LOWEST = tl.constexpr(-0x7FFFFFFF)  # below the key of minus infinity


@triton.jit
def noise(seed: tl.tensor, index: tl.tensor, position: tl.tensor, LEVEL: tl.constexpr) -> tl.tensor:
    """Standard Gumbel noise, equal to kernels.sampling.ref."""
    zero = index * 0
    word, _, _, _ = tl.philox(seed, index, zero + position, zero + LEVEL, zero)
    uniform = ((word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def key_of(value: tl.tensor) -> tl.tensor:
    """Float32 to int32 of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def largest(keys: tl.tensor, low: tl.tensor, high: tl.tensor, count: tl.tensor) -> tl.tensor:
    """The largest key from `low` to `high` that at least `count` of `keys` reach."""
    while low < high:
        middle = (low + high + 1) >> 1
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low


@triton.jit
def least_within(
    keys: tl.tensor, masses: tl.tensor, low: tl.tensor, high: tl.tensor, limit: tl.tensor
) -> tl.tensor:
    """The least key from `low` to `high` with less than `limit` of `masses` above it."""
    while low < high:
        middle = (low + high) >> 1
        inner = tl.sum(tl.where(keys > middle.to(tl.int32), masses, 0.0), 0) < limit
        low, high = tl.where(inner, low, middle + 1), tl.where(inner, middle, high)
    return low


@triton.jit
def scan(
    logits: tl.tensor,
    least: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    GROUP: tl.constexpr,
    SCAN: tl.constexpr,
) -> tl.tensor:
    """The number of a row's logits at or above the key `least`, and their mass relative to the largest."""
    count, total = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    for first in range(0, groups, SCAN):
        token = (first + tl.arange(0, SCAN))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        value = tl.load(logits + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        kept = (key_of(value) >= least.to(tl.int32)) & (token < vocab)
        count += tl.sum(tl.sum(kept.to(tl.int32), 1), 0)
        total += tl.sum(tl.sum(tl.where(kept, tl.exp((value - best) / temperature), 0.0), 1), 0)
    return count, total


@triton.jit
def least_of_all(
    logits: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    GROUP: tl.constexpr,
    SCAN: tl.constexpr,
) -> tl.tensor:
    """The key of the least logit that top-k, then top-p keep, from all logits of a row."""
    top = key_of(best).to(tl.int64)
    least = tl.full([], LOWEST, tl.int64)
    if top_k > 0:
        high = top
        while least < high:
            middle = (least + high + 1) >> 1
            count, _ = scan(logits, middle, best, temperature, vocab, groups, GROUP, SCAN)
            enough = count >= tl.minimum(top_k, vocab)
            least, high = tl.where(enough, middle, least), tl.where(enough, high, middle - 1)
    if top_p < 1.0:
        _, whole = scan(logits, least, best, temperature, vocab, groups, GROUP, SCAN)
        high = top
        while least < high:
            middle = (least + high) >> 1
            _, above = scan(logits, middle + 1, best, temperature, vocab, groups, GROUP, SCAN)
            inner = above < top_p * whole
            least, high = tl.where(inner, least, middle + 1), tl.where(inner, middle, high)
    return least


@triton.jit
def list_groups(
    keys: tl.tensor,
    bound: tl.tensor,
    listed: tl.tensor,
    groups: tl.tensor,
    GROUPS_PAD: tl.constexpr,
) -> tl.tensor:
    """List the groups with a maximum of at least `bound`; their number."""
    g = tl.arange(0, GROUPS_PAD)
    able = ((keys >= bound.to(tl.int32)) & (g < groups)).to(tl.int32)
    tl.debug_barrier()  # all reads of the list before have ended
    tl.store(listed + tl.cumsum(able, 0) - 1, g, mask=able > 0)
    tl.debug_barrier()
    return tl.sum(able, 0)


@triton.jit
def listed_logits(
    logits: tl.tensor,
    listed: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    vocab: tl.tensor,
    GROUP: tl.constexpr,
    SCAN: tl.constexpr,
) -> tl.tensor:
    """Some listed groups, their logits, and which of these exist."""
    at = first + tl.arange(0, SCAN)
    group = tl.load(listed + at, mask=at < count, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (at < count)[:, None] & (token < vocab)
    return group, tl.load(logits + token, mask=inside, other=-float("inf")).to(tl.float32), inside


@triton.jit
def draw_group(
    logits: tl.tensor,
    listed: tl.tensor,
    count: tl.tensor,
    least: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    vocab: tl.tensor,
    GROUP: tl.constexpr,
    SCAN: tl.constexpr,
) -> tl.tensor:
    """Draw one of the listed groups, by the mass of its logits from the key `least` on."""
    top_score, chosen = tl.full([], -float("inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, count, SCAN):
        group, value, inside = listed_logits(logits, listed, first, count, vocab, GROUP, SCAN)
        kept = inside & (key_of(value) >= least.to(tl.int32))
        mass = tl.sum(tl.where(kept, tl.exp((value - best) / temperature), 0.0), 1)
        score = tl.where(mass > 0, tl.log(mass) + noise(seed, group, position, 1), -float("inf"))
        here = tl.max(score, 0)
        its_group = tl.sum(tl.where(tl.arange(0, SCAN) == tl.argmax(score, 0), group, 0), 0)
        chosen = tl.where(here > top_score, its_group, chosen)
        top_score = tl.maximum(top_score, here)
    return chosen


@triton.jit
def least_kept(
    logits: tl.tensor,
    most: tl.tensor,
    mass: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    GROUPS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    TRIED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SCAN: tl.constexpr,
) -> tl.tensor:
    """The key of the least logit that the filters keep."""
    best = tl.max(most, 0)
    keys, top = key_of(most), key_of(best).to(tl.int64)
    least = tl.where(min_p > 0.0, key_of(best + temperature * tl.log(min_p)), LOWEST).to(tl.int64)
    if (top_k > 0) | (top_p < 1.0):
        wanted = tl.minimum(tl.where(top_k > 0, tl.minimum(top_k, TRIED), TRIED), groups)
        bound = largest(keys, tl.full([], LOWEST, tl.int64), top, wanted)
        count = list_groups(keys, bound, listed, groups, GROUPS_PAD)
        found = tl.full([], 0, tl.int32)
        for first in range(0, count, SCAN):
            _, value, inside = listed_logits(logits, listed, first, count, vocab, GROUP, SCAN)
            able = (inside & (key_of(value) >= bound.to(tl.int32))).to(tl.int32)
            each = tl.sum(able, 1)
            place = found + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(able, 1) - 1
            tl.store(candidates + place, value, mask=(able > 0) & (place < CANDIDATES))
            found += tl.sum(each, 0)
        tl.debug_barrier()
        c = tl.arange(0, CANDIDATES)
        likely = tl.load(candidates + c, mask=c < found, other=-float("inf"))
        likely_keys = tl.where(c < found, key_of(likely), LOWEST)
        kept_least = bound
        fits = found <= CANDIDATES
        if top_k > 0:
            fits = fits & (found >= tl.minimum(top_k, vocab))
            if fits:
                kept_least = largest(likely_keys, bound, top, tl.minimum(top_k, vocab))
        if fits & (top_p < 1.0):
            kept = (c < found) & (likely_keys >= kept_least.to(tl.int32))
            probability = tl.where(kept, tl.exp((likely - best) / temperature), 0.0)
            reached = tl.sum(probability, 0)
            whole = tl.sum(tl.where(mass > 0, mass * tl.exp((most - best) / temperature), 0.0), 0)
            whole = tl.where(top_k > 0, reached, whole)
            fits = reached >= top_p * whole
            if fits:
                kept_least = least_within(likely_keys, probability, kept_least, top, top_p * whole)
        if not fits:
            kept_least = least_of_all(
                logits, best, temperature, top_k, top_p, vocab, groups, GROUP, SCAN
            )  # fmt: skip
        least = tl.maximum(least, kept_least)
    return least


@triton.jit
def _groups(
    logits: tl.tensor,
    slots: tl.tensor,
    parameters: tl.tensor,
    masked: tl.tensor,
    masks: tl.tensor,
    maxima: tl.tensor,
    masses: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    group = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits += row * vocab
    value = tl.load(logits + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    if tl.load(masked + slot) != 0:
        byte = group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
        bits = tl.load(masks + slot * groups * (GROUP // 8) + byte, mask=(group < groups)[:, None], other=0)
        each = (bits.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        forbidden = tl.reshape(each, [COUNT, GROUP]) == 0
        value = tl.where(forbidden, -float("inf"), value)
        tl.store(logits + token, value, mask=token < vocab)  # pass 2 reads them again; whole vectors
    value = tl.where(value < float("inf"), value, float("inf"))  # a maximum may pass over a NaN
    temperature = tl.load(parameters + slot * _COLUMNS + _TEMPERATURE)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    most = tl.max(value, 1)
    finite = tl.where(most > -float("inf"), most, 0.0)
    mass = tl.sum(tl.exp((value - finite[:, None]) / temperature), 1)
    tl.store(maxima + row * groups + group, most, mask=group < groups)
    tl.store(masses + row * groups + group, mass, mask=group < groups)


@triton.jit
def _choose(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    parameters: tl.tensor,
    seeds: tl.tensor,
    maxima: tl.tensor,
    masses: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    last_tokens: tl.tensor,
    done: tl.tensor,
    max_lengths: tl.tensor,
    stop_ids: tl.tensor,
    places: tl.tensor | None,
    history: tl.tensor | None,
    ids: tl.tensor,
    dones: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    history_width: tl.tensor,
    GROUPS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    TRIED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SCAN: tl.constexpr,
    STOPS: tl.constexpr,
    PLACED: tl.constexpr,
    VERIFIES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    position, seed = tl.load(positions + row), tl.load(seeds + slot)
    if PLACED:
        position = tl.where(position < 0, tl.load(places + slot) - position, position)
    parameters += slot * _COLUMNS
    top_k, top_p = tl.load(parameters + _TOP_K).to(tl.int32), tl.load(parameters + _TOP_P)
    min_p = tl.load(parameters + _MIN_P)
    logits += row * vocab
    g = tl.arange(0, GROUPS_PAD)
    most = tl.load(maxima + row * groups + g, mask=g < groups, other=-float("inf"))
    mass = tl.load(masses + row * groups + g, mask=g < groups, other=0.0)
    best = tl.max(most, 0)
    sound = (best > -float("inf")) & (best < float("inf"))
    heat = tl.where(sound, tl.load(parameters + _TEMPERATURE), 0.0)
    temperature = tl.where(heat > 0, heat, 1.0)
    least = tl.full([], LOWEST, tl.int64)
    if heat > 0:
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            listed += row * GROUPS_PAD
            least = least_kept(
                logits, most, mass, listed, candidates + row * CANDIDATES, temperature, top_k, top_p, min_p,
                vocab, groups, GROUPS_PAD, GROUP, TRIED, CANDIDATES, SCAN,
            )  # fmt: skip
            count = list_groups(key_of(most), least, listed, groups, GROUPS_PAD)
            chosen = draw_group(
                logits, listed, count, least, best, temperature, seed, position, vocab, GROUP, SCAN
            )  # fmt: skip
        else:
            score = tl.log(mass) + (most - best) / temperature + noise(seed, g, position, 1)
            chosen = tl.argmax(tl.where((g < groups) & (mass > 0), score, -float("inf")), 0)
    else:
        chosen = tl.argmax(most, 0)
    token = chosen * GROUP + tl.arange(0, GROUP)
    value = tl.load(logits + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    score = value
    if heat > 0:
        score = (value - best) / temperature + noise(seed, token, position, 0)
        score = tl.where((token < vocab) & (key_of(value) >= least.to(tl.int32)), score, -float("inf"))
    answer = tl.where(sound, chosen * GROUP + tl.argmax(score, 0), -1)

    before = tl.load(done + slot)
    s = tl.arange(0, STOPS)
    stopped = tl.sum((tl.load(stop_ids + slot * STOPS + s) == answer).to(tl.int32), 0) > 0
    stopped = stopped | (position + 1 >= tl.load(max_lengths + slot))
    ended = tl.where(sound, stopped.to(tl.int32), _INVALID)
    if VERIFIES:
        tl.store(ids + row, answer)
        tl.store(dones + row, ended)
    else:
        tl.store(ids + row, tl.where(before != 0, -1, answer))
        tl.store(dones + row, tl.where(before != 0, 2, ended))
        if before == 0:
            tl.store(last_tokens + slot, tl.maximum(answer, 0))  # must be a token: it is read again
            tl.store(done + slot, tl.where(ended != 0, 1, 0))
            if PLACED:
                tl.store(places + slot, position)
                tl.store(history + slot * history_width + position, tl.maximum(answer, 0))


@dataclass(frozen=True, slots=True)
class Choices:
    """How each slot's tokens are chosen and when it ends, `[slots, ...]` each. `choose` updates
    `last_tokens` and `done`."""

    parameters: Tensor  # [slots, PARAMETERS] float32, the slot table; temperature 0 is greedy
    seeds: Tensor  # int64, the bits of a uint64
    max_lengths: Tensor  # int32
    stop_ids: Tensor  # [slots, stops] int32, padded with -1; stops is a power of two
    last_tokens: Tensor  # int32
    done: Tensor  # int32
    masked: Tensor  # int32, whether the slot has a mask
    masks: Tensor  # uint8, see `mask_room`
    places: Tensor | None = None  # int32, the position of each slot's last token; None: hosts have it
    history: Tensor | None = None  # [slots, context + 1] int32, with `places`: the tokens by position


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of the kernels for up to `rows` rows."""

    maxima: Tensor  # [rows, groups]
    masses: Tensor
    listed: Tensor  # [rows, groups], groups rounded up
    candidates: Tensor  # [rows, candidates]


def scratch(rows: int, vocab: int, device: torch.device) -> Scratch:
    """Memory for steps of up to `rows` rows."""
    groups = triton.cdiv(vocab, GROUP_TOKENS)
    return Scratch(
        maxima=torch.empty(rows, groups, device=device),
        masses=torch.empty(rows, groups, device=device),
        listed=torch.empty(rows, _padded(groups), dtype=torch.int32, device=device),
        candidates=torch.empty(rows, _CANDIDATES, device=device),
    )


def mask_room(slots: int, vocab: int, device: torch.device) -> Tensor:
    """The masks of `slots` slots, on the host, pinned for a GPU: `[slots, bytes]` uint8, bit `t % 8` of byte
    `t // 8` is 1 if token t may follow. All are 0 at first, and the bits from `vocab` on have no meaning."""
    row_bytes = triton.cdiv(vocab, GROUP_TOKENS) * GROUP_TOKENS // 8
    return torch.zeros(slots, row_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def choose(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    choices: Choices,
    room: Scratch,
    chosen: Tensor,
    *,
    verifies: bool = False,
) -> None:
    """A token for each row of `logits` `[rows, vocab]`, for slot `slots[row]` at position `positions[row]` of
    its sequence; -n is n positions after the slot's place. `chosen` `[2, rows]` int32 gets the ids and done,
    as in a StepResult: done slots id -1 and done 2, rows without a finite largest logit id -1 and done
    INVALID. Logits that a mask forbids change.

    If it `verifies`, slots stay as they are, and `chosen` has what each row would be of a slot that is not
    done: kernels.drafts accepts some."""
    rows, vocab = logits.shape
    history = choices.history
    groups = triton.cdiv(vocab, GROUP_TOKENS)
    _groups[(rows, triton.cdiv(groups, _PER_PROGRAM))](
        logits, slots, choices.parameters, choices.masked, choices.masks, room.maxima, room.masses, vocab,
        groups, GROUP=GROUP_TOKENS, COUNT=_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    _choose[(rows,)](
        logits, slots, positions, choices.parameters, choices.seeds, room.maxima, room.masses, room.listed,
        room.candidates, choices.last_tokens, choices.done, choices.max_lengths, choices.stop_ids,
        choices.places, history, chosen[0], chosen[1], vocab, groups,
        0 if history is None else history.shape[1], GROUPS_PAD=_padded(groups), GROUP=GROUP_TOKENS,
        TRIED=_TRIED, CANDIDATES=_CANDIDATES, SCAN=_SCAN, STOPS=choices.stop_ids.shape[1],
        PLACED=choices.places is not None, VERIFIES=verifies, num_warps=8,
    )  # fmt: skip


def _padded(groups: int) -> int:
    return max(16, int(triton.next_power_of_2(groups)))
