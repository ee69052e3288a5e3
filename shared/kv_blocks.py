"""Keys of KV blocks: a hash chain over the tokens, so that equal prefixes have equal keys everywhere.

    root = blake3("kv1" ‖ len ‖ fingerprint ‖ len ‖ salt [‖ len ‖ adapter])     key 0 ──▶ key 1 ──▶ key 2 ...
    key i = blake3(key i-1 ‖ tokens of block i as u32 little-endian)    (key -1 is the root)

A key identifies all tokens up to the end of its block, for one model layout (the fingerprint, which covers
the block size), one adapter (its digest, so that weights under a known name are another adapter) and one
tenant (the salt): another tenant cannot detect that a block is cached. Only full
blocks have keys, and the partial tail of a preempted sequence, which is never shared. Keys are the same in
every process and on every machine, unlike Python's `hash()`.

This module also has the block arithmetic of the paged KV cache, the seeds of choices, and the rendezvous hash
that picks a shard.
"""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections.abc import Iterable, Mapping
from functools import lru_cache

from blake3 import blake3

KEY_BYTES = 32
ROOTS = 4_096  # cached root keys, one for each tenant


@lru_cache(maxsize=ROOTS)  # used at each arrival and each admission
def root_key(fingerprint: str, salt: str, adapter: str = "") -> bytes:
    """The key before the first block. All parts carry their length, so that no two of them are equal."""
    parts = [text.encode() for text in (fingerprint, salt, *filter(None, (adapter,)))]
    return blake3(b"kv1" + b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()


def extend(keys: list[bytes], root: bytes, tokens: array[int], block_tokens: int, upto: int) -> None:
    """Append the missing keys of the full blocks of `tokens[:upto]` to `keys`.

    `tokens` is an int32 column without negative ids. Raises ValueError for a wider column and for `upto`
    beyond its end. A new block of 16 tokens takes about a microsecond.
    """
    first, full = len(keys), upto // block_tokens
    if full <= first:
        return
    if tokens.itemsize != 4 or upto > len(tokens):
        raise ValueError(f"keys of {upto} int32 tokens asked, of {len(tokens)} with {tokens.itemsize} bytes")
    fresh = tokens[first * block_tokens : full * block_tokens]
    if sys.byteorder == "big":
        fresh.byteswap()
    data, width = fresh.tobytes(), 4 * block_tokens
    key = keys[-1] if keys else root
    for at in range(0, len(data), width):
        key = blake3(key + data[at : at + width]).digest()
        keys.append(key)


def tail_key(before: bytes, tokens: array[int]) -> bytes:
    """The key of a partial block of `tokens` after the block (or root) with the key `before`."""
    column = tokens[:]
    if sys.byteorder == "big":
        column.byteswap()
    return blake3(b"tail" + before + column.tobytes()).digest()


def blocks_for(tokens: int, block_tokens: int) -> int:
    """The number of blocks for `tokens` tokens."""
    return -(-tokens // block_tokens)


def choice_seed(seed: int, choice: int) -> int:
    """The uint64 seed of choice `choice` of a request: independent streams from one seed."""
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little") + choice.to_bytes(4, "little"), digest_size=8, person=b"headrace-choice"
    ).digest()
    return int.from_bytes(digest, "little")


def rendezvous(key: str, members: Iterable[str], weights: Mapping[str, int] | None = None) -> str:
    """The member that owns `key`. When a member joins or leaves, only its keys move.

    A member owns keys in proportion to its weight, at least 1; all weigh 1 without `weights`. Highest random
    weight hashing, Thaler and Ravishankar 1998. Raises ValueError without members.
    """
    return max(
        members, key=lambda member: (_score(key, member, weights.get(member, 1) if weights else 1), member)
    )


def _score(key: str, member: str, weight: int) -> float:
    digest = hashlib.blake2b(f"{member}\0{key}".encode(), digest_size=8).digest()
    drawn = ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52  # between 0 and 1, neither of them
    return -max(weight, 1) / math.log(drawn)
