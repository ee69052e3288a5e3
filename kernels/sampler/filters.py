"""Which logits of a row the filters keep, and the draw among groups: parts of the sampler, in Triton.

Keys are the bits of a float32 in an order that integers have, so that a least logit is found by bisection.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-0x7FFFFFFF)  # below the key of minus infinity


@triton.jit
def noise(seed: tl.tensor, index: tl.tensor, position: tl.tensor, LEVEL: tl.constexpr) -> tl.tensor:
    """Standard Gumbel noise, as kernels.philox.ref makes it."""
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
    """The largest key, `low` to `high`, that so many of `keys` reach."""
    while low < high:
        middle = (low + high + 1) >> 1
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low


@triton.jit
def least_within(
    keys: tl.tensor, masses: tl.tensor, low: tl.tensor, high: tl.tensor, limit: tl.tensor
) -> tl.tensor:
    """The least key, `low` to `high`, with less than `limit` of `masses` above it."""
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
    """How many logits of a row are at or above the key `least`, and their mass relative to the largest."""
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
    """Write down the groups whose maximum reaches `bound`; how many they are."""
    g = tl.arange(0, GROUPS_PAD)
    able = ((keys >= bound.to(tl.int32)) & (g < groups)).to(tl.int32)
    tl.debug_barrier()  # what was listed before has been read
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
    """The group drawn among those listed, by the mass of what reaches the key `least`."""
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
