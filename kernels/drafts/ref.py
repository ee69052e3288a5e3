"""Drafts in torch: the text after the last place where a sequence had the tokens that it has at its end.

    tokens   a b c d e f a b c        the longest end that occurred before: a b c, at 0
    drafts   d e f                    what followed it there, as many tokens; after its end a text repeats

The sampler chooses a token at each draft's position, with that position's own noise. A draft is kept where it
is the chosen token, so drafts change no token. Prompt lookup: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST, MOST = 2, 16  # tokens that must be alike; no more than MOST are compared
WINDOW = 32_768  # of the last tokens: only these are searched


def propose(tokens: Tensor, count: int, prediction: Tensor | None = None, prompt: int = 0) -> Tensor:
    """Up to `count` drafts after `tokens` `[length]`, then -1: what followed the longest match of the last
    LEAST to MOST tokens among the tokens before, no more than are alike; of several such matches the last
    one counts.

    A match in `prediction` `[length]` comes first, if a token follows it. It is of tokens after the first
    `prompt`, LEAST or all of them, and must not be shorter than the match among the tokens, unless it is of
    all tokens after `prompt`."""
    own = tokens[-WINDOW:]
    drafts, length = torch.full((count,), -1, dtype=tokens.dtype), len(own)
    alike, end = _longest(own[:-1], own)
    answer = tokens[prompt:]
    if prediction is not None and len(prediction) and len(answer):
        its, at = _longest(prediction, answer)
        if its >= max(min(LEAST, len(answer)), min(alike, len(answer))) and at + 1 < len(prediction):
            found = prediction[at + 1 : at + 1 + min(count, its)]
            drafts[: len(found)] = found
            return drafts
    if alike >= LEAST:
        drafts[:alike] = own[end + 1 + torch.arange(min(count, alike)) % (length - 1 - end)]
    return drafts


def _longest(text: Tensor, last: Tensor) -> tuple[int, int]:
    """The most tokens, up to MOST, at the end of `last` that occur in `text`, and where they end there."""
    ends = torch.arange(len(text))
    alike, run = torch.ones_like(ends, dtype=torch.bool), torch.zeros_like(ends)
    for back in range(min(MOST, len(last))):
        alike = alike & (ends >= back) & (text[(ends - back).clamp(min=0)] == last[-1 - back])
        run += alike
    if not len(text) or not run.any():
        return 0, 0
    best = int((run * len(text) + ends).argmax())
    return int(run[best]), best


def accept(chosen: Tensor, ended: Tensor, drafts: Tensor) -> Tensor:
    """How many of the tokens `chosen` `[rows, 1 + count]` each row has, `[rows]`, from 1 on: those up to the
    first that differs from the draft after it, or that ends its sequence (`ended`, of the same shape, is not
    0). `drafts` `[rows, count]`; a negative one is none. A flaw (a negative token) counts as the first token
    of a row, and not as a later one: the next step meets it."""
    stays = (chosen[:, :-1] == drafts) & (drafts >= 0) & (ended[:, :-1] == 0)
    last = stays.long().cumprod(-1).sum(-1)
    flawed = chosen.gather(1, last[:, None]).squeeze(1) < 0
    return (1 + last - flawed.long()).clamp(min=1)
