"""Drafts in torch: the text after the last place where a sequence had the tokens that it has at its end.

    tokens   a b c d e f a b c        the longest end that occurred before: a b c, at 0
    drafts   d e f a ...              what followed it there; from the end of the text on it repeats

The sampler chooses a token at each draft's position, with that position's own noise. A draft is kept where it
is the chosen token, so drafts change no token. Prompt lookup: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST, MOST = 3, 16  # tokens that must be alike; no more than MOST are compared
WINDOW = 32_768  # of the last tokens: only these are searched


def propose(tokens: Tensor, count: int) -> Tensor:
    """`count` drafts after `tokens` `[length]`, all -1 if its last LEAST tokens did not occur before. The
    last one of the longest matches counts."""
    tokens = tokens[-WINDOW:]
    length = len(tokens)
    ends = torch.arange(max(length - 1, 0))  # the last index of a match
    alike, run = torch.ones_like(ends, dtype=torch.bool), torch.zeros_like(ends)
    for back in range(min(MOST, length)):
        alike = alike & (ends >= back) & (tokens[(ends - back).clamp(min=0)] == tokens[length - 1 - back])
        run += alike
    if not len(ends) or run.max() < LEAST:
        return torch.full((count,), -1, dtype=tokens.dtype)
    best = int((run * length + ends).argmax())
    return tokens[best + 1 + torch.arange(count) % (length - 1 - best)]


def accept(chosen: Tensor, ended: Tensor, drafts: Tensor) -> Tensor:
    """How many of the tokens `chosen` `[rows, 1 + count]` each row has, `[rows]`, from 1 on: those up to the
    first that differs from the draft after it, or that ends its sequence (`ended`, of the same shape, is not
    0). `drafts` `[rows, count]`; a negative one is none. A flaw (a negative token) counts as the first token
    of a row, and not as a later one: the next step meets it."""
    stays = (chosen[:, :-1] == drafts) & (drafts >= 0) & (ended[:, :-1] == 0)
    last = stays.long().cumprod(-1).sum(-1)
    flawed = chosen.gather(1, last[:, None]).squeeze(1) < 0
    return (1 + last - flawed.long()).clamp(min=1)
