"""Policies of kind `kv`: how many blocks a sequence is promised when it is admitted.

Signature: (tokens: int, max_length: int, block_tokens: int) -> int, blocks; `tokens` are known now,
`max_length` is the most there may ever be.
"""

from __future__ import annotations

from shared.blocks import blocks_for

CHUNK_TOKENS = 1_024
GREEDY = ("greedy", "by_chunk")


def on_demand(tokens: int, max_length: int, block_tokens: int) -> int:
    """What it needs to come to its next token. It grows as it goes, and may be paused for want of a block."""
    return blocks_for(min(tokens + 1, max_length), block_tokens)


def foreseen(tokens: int, max_length: int, block_tokens: int) -> int:
    """As much; but where nothing except its length ends a sequence, admission looks ahead along its whole
    growth, and nobody is paused for that: see growth.py."""
    return on_demand(tokens, max_length, block_tokens)


def greedy(tokens: int, max_length: int, block_tokens: int) -> int:
    """As much; but admission leaves nothing free for growth, whoever comes back is not spared, and nobody is
    ever promised more. A baseline, which pauses much."""
    return on_demand(tokens, max_length, block_tokens)


def by_chunk(tokens: int, max_length: int, block_tokens: int) -> int:
    """What its first chunk needs, and else as greedy: as vLLM V1 admits. It may be paused within its prompt
    for want of a block. A baseline."""
    return blocks_for(min(tokens + 1, max_length, CHUNK_TOKENS), block_tokens)


def reserve(tokens: int, max_length: int, block_tokens: int) -> int:
    """All that it may ever need: it is never paused, and what it does not use lies idle."""
    return blocks_for(max_length, block_tokens)
