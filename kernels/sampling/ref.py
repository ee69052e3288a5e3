"""Sampling in torch: the parameters, the stages that read them, and a draw by the Gumbel-max trick.

A row of logits passes the stages of LOGITS, then is divided by the temperature, then passes those of FILTERS,
and a token is drawn. A stage is a parameter or a few that are computed together. This is the definition; a
kernel may take the last filters and the draw (see TAKEN of kernels.sampling.gpu).

The draw has two levels. The largest `logit + Gumbel` of a group of tokens is distributed as `logsumexp(group)
+ Gumbel`, and its token does not depend on its size (Gumbel max-stability; Maddison et al. 2014,
arXiv:1411.0030). So one noise per group of 256 tokens chooses the group, and one per token of that group the
token: exact, and 448 Philox calls instead of 49,152 for the default model.

Noise is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the
sequence's seed as key and the counter (index, position, level): index is the token at level 0 and the group
at level 1, position that of the new token in its sequence. Random numbers are a function of key and counter
without state, so a draw does not depend on the batch, the slot, the step or earlier draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_TOKENS = 256
INVALID = 3  # in a done column: the row's logits are not finite, its slot has ended without a token
_SORTED = (256, 2048)  # largest logits sorted for a top-k up to this, else all: 0.2, 0.5, 4 ms a row
_BINS, _BINS_PER_UNIT = 4096, 128  # for top-p: down to 32 below the largest logit, e^-32 of its probability
_LEVEL_TOKEN, _LEVEL_GROUP = 0, 1

# Constants of Philox.
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MUL_A, _MUL_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def penalize(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Logits `[rows, vocab]` with penalties for the tokens in `seen`. Only those are computed.

    `seen` `[rows, vocab]`, bool: in the prompt or the output. `counts` `[rows, vocab]`: times in the output.
    Penalties are `[rows]`: repetition (divides a positive logit, multiplies a negative one; Keskar et al.
    2019, arXiv:1909.05858), presence and frequency (subtracted once, and per occurrence; OpenAI's API).
    """
    row, token = seen.nonzero().unbind(1)
    plain, times, each = logits[row, token], counts[row, token], repetition[row]
    repeated = torch.where(plain > 0, plain / each, plain * each)
    return logits.index_put((row, token), repeated - presence[row] * (times > 0) - frequency[row] * times)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits `[rows, vocab]` with minus infinity at every token that a filter drops.

    Filters apply one after the other: `top_k` (0 = off), then `top_p` on the rest, renormalised (the
    smallest set of most likely tokens with at least this mass), then `min_p` (relative to the likeliest
    token). Each is a least logit, so tokens of equal logits are kept or dropped together.
    """
    top_k = top_k.long()
    least = logits.amax(-1) + torch.log(min_p)  # log(0) = -inf: off
    by_k, by_p = top_k > 0, (top_k == 0) & (top_p < 1)
    if len(rows := by_k.nonzero().squeeze(1)):
        found = _least_of_top_k(_rows(logits, rows), top_k[rows], top_p[rows])
        least[rows] = torch.maximum(least[rows], found)
    if len(rows := by_p.nonzero().squeeze(1)):
        found = _least_of_top_p(_rows(logits, rows), top_p[rows])
        least[rows] = torch.maximum(least[rows], found)
    return torch.where(logits < least.unsqueeze(-1), -torch.inf, logits)


def _least_of_top_k(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least logit that top-k, then top-p keep, `[rows]`; sorts the largest logits only."""
    vocab = logits.shape[-1]
    top_k = top_k.clamp(max=vocab)
    least, below = torch.empty_like(top_p), 0
    for width in (*(size for size in _SORTED if size < vocab), vocab):
        rows = ((top_k > below) & (top_k <= width)).nonzero().squeeze(1)
        if len(rows):
            top = _rows(logits, rows).topk(width).values
            least[rows] = _least_of_sorted(top, top_k[rows], top_p[rows])
        below = width
    return least


def _least_of_sorted(top: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The same, given the `top` logits in falling order, at least `top_k` of them."""
    inside = top >= top.gather(-1, top_k.unsqueeze(-1) - 1)
    probability = torch.where(inside, top, -torch.inf).softmax(-1)
    before = probability.cumsum(-1) - probability
    kept = inside & ((before < top_p.unsqueeze(-1)) | (top_p >= 1).unsqueeze(-1))
    return torch.where(kept, top, torch.inf).amin(-1)


def _least_of_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """The least logit that top-p keeps, `[rows]`, without sorting the vocabulary.

    A token is kept if the likelier tokens have less than `top_p` of the mass. Mass is summed by bins of
    similar logits; the least kept token is in the last bin with less than `top_p` before it, and only the
    tokens of that bin are sorted. Measured on one Zen 3 core, 32 rows of 49,152 flat logits: 15 ms, with a
    sort 136 ms.
    """
    mass = logits.softmax(-1).double()
    below = logits.amax(-1, keepdim=True) - logits
    bins = below.mul_(_BINS_PER_UNIT).clamp_(max=_BINS - 1).long()
    by_bin = mass.new_zeros(len(logits), _BINS).scatter_add_(1, bins, mass)
    before_bin = F.pad(by_bin.cumsum(-1)[:, :-1], (1, 0))
    last = (before_bin < top_p.unsqueeze(-1)).sum(-1, keepdim=True).sub_(1).clamp_(min=0)  # -1: NaN logits

    row, token = (bins == last).nonzero().unbind(1)
    by_logit = logits[row, token].argsort(descending=True)
    order = by_logit[row[by_logit].argsort(stable=True)]
    row, token = row[order], token[order]
    logit, inside = logits[row, token], mass[row, token]
    before = inside.cumsum(0) - inside
    before = before - before[torch.searchsorted(row, row)] + before_bin.gather(1, last)[row, 0]
    candidates = torch.where(before < top_p[row], logit, torch.inf)
    least = torch.full_like(top_p, torch.inf).scatter_reduce_(0, row, candidates, "amin")
    return torch.where(least < torch.inf, least, -torch.inf)  # only the last bin can be empty: keep all


def _rows(logits: Tensor, rows: Tensor) -> Tensor:
    """Some rows in rising order; all rows without a copy, which costs as much as a filter."""
    return logits if len(rows) == len(logits) else logits[rows]


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token per row, `[rows]`, with probability softmax(`logits`), `[rows, vocab]` in float32.

    `seeds` and `positions` are `[rows]` int64. Minus infinity is never drawn; a row needs one finite logit.
    """
    rows, vocab = logits.shape
    groups = -(-vocab // GROUP_TOKENS)
    grouped = F.pad(logits, (0, groups * GROUP_TOKENS - vocab), value=-torch.inf).view(
        rows, groups, GROUP_TOKENS
    )
    key, position = seeds.unsqueeze(1), positions.unsqueeze(1)
    index = torch.arange(groups, device=logits.device).unsqueeze(0)
    noise = gumbel(philox(key, index, position, _LEVEL_GROUP))
    group = (grouped.logsumexp(-1) + noise).argmax(-1, keepdim=True)
    inside = grouped.gather(1, group.unsqueeze(-1).expand(-1, 1, GROUP_TOKENS)).squeeze(1)
    token = group * GROUP_TOKENS + torch.arange(GROUP_TOKENS, device=logits.device)
    noise = gumbel(philox(key, token, position, _LEVEL_TOKEN))
    return token.gather(1, (inside + noise).argmax(-1, keepdim=True)).squeeze(1)


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: int) -> Tensor:
    """Word 0 of the block at counter (c0, c1, c2, 0) for key `seed`: uint32 values in int64. Equal to
    Triton's `tl.philox(seed, c0, c1, c2, c3)`: the key is the seed's low and high half.

    `seed`, `c0` and `c1` are int64 and broadcast together; a seed is the bits of a uint64.
    """
    low, high = seed & _MASK, (seed >> 32) & _MASK
    x0, x1, x2, x3 = c0 & _MASK, c1 & _MASK, torch.full_like(c0, c2), torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        a, b = x0 * _MUL_A, x2 * _MUL_B  # wraps past 2^63, but the 64 bits are right
        x0, x1, x2, x3 = (b >> 32) & _MASK ^ x1 ^ low, b & _MASK, (a >> 32) & _MASK ^ x3 ^ high, a & _MASK
        low, high = (low + _KEY_A) & _MASK, (high + _KEY_B) & _MASK
    return x0


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float32 from uint32 words: -log(-log(u)), u the middle of 2^23 equal cells."""
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that a request sets: a column of the slot table, float32."""

    field: str  # of shared.messages.Sampling
    off: float  # the value that changes nothing
    fit: Callable[[float], float] = float  # a value as the column has it: what is too small for float32


@dataclass(frozen=True, slots=True)
class Stage:
    """Changes logits `[rows, vocab]`, for rows with a parameter that is not off: `run(logits, *columns)`
    returns others, each column `[rows]`. With `history` the columns come after seen and counts, as in
    `penalize`."""

    reads: tuple[Parameter, ...]
    run: Callable[..., Tensor]
    history: bool = False


_COLDEST = 1e-6  # temperature: below it a draw is greedy, except among equal logits
_LEAST = torch.finfo(torch.float32).tiny  # below it float32 rounds, or a device flushes, to zero
_MOST_TOP_K = 1 << 24  # exact in float32, and above any vocabulary

TEMPERATURE = Parameter("temperature", 1.0, lambda value: value if value >= _COLDEST else 0.0)
PENALTIES = Stage(
    (
        Parameter("repetition_penalty", 1.0), Parameter("presence_penalty", 0.0),
        Parameter("frequency_penalty", 0.0),
    ),
    penalize, history=True,
)  # fmt: skip
LIKELY = Stage(
    (
        Parameter("top_k", 0.0, lambda value: min(value, _MOST_TOP_K)),
        Parameter("top_p", 1.0, lambda value: max(value, _LEAST)),
        Parameter("min_p", 0.0, lambda value: value if value >= _LEAST else 0.0),
    ),
    keep_likely,
)
Stages = tuple[Stage, ...]
LOGITS: Stages = (PENALTIES,)
FILTERS: Stages = (LIKELY,)  # of logits after the temperature: a dropped token is minus infinity
PARAMETERS = (TEMPERATURE, *(each for stage in (*LOGITS, *FILTERS) for each in stage.reads))
COLUMN = {each.field: column for column, each in enumerate(PARAMETERS)}  # of the slot table
