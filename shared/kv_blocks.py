"""KV blocks have names: a hash chain over the tokens, so that equal prefixes have equal names everywhere.

    root = blake3("kv1" ‖ len ‖ fingerprint ‖ len ‖ salt)       key 0 ──▶ key 1 ──▶ key 2 ...
    key i = blake3(key i-1 ‖ tokens of block i as u32 little-endian)    (key -1 is the root)

A key names all tokens up to the end of its block, under one model layout (the fingerprint, which covers
the block size) and one tenant (the salt): another tenant cannot even find out that a block is cached.
Only full blocks have keys, and the partial tail of a paused sequence, which is never shared. The same in
every process and on every machine, unlike Python's `hash()`.

Block arithmetic of the paged KV cache, the seeds of choices and the rendezvous hash that picks a shard are
here, too.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable
from functools import lru_cache

from blake3 import blake3

KEY_BYTES = 32
ROOTS = 4_096  # remembered: of so many tenants


@lru_cache(maxsize=ROOTS)  # asked for at each arrival and each admission
def root_key(fingerprint: str, salt: str) -> bytes:
    """The key before the first block. Both parts carry their length, so no two pairs read alike."""
    parts = [text.encode() for text in (fingerprint, salt)]
    return blake3(b"kv1" + b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()


def extend(keys: list[bytes], root: bytes, tokens: array[int], block_tokens: int, upto: int) -> None:
    """Append the keys of the full blocks of `tokens[:upto]` that `keys` does not have yet.

    `tokens` is an int32 column without negative ids. Raises ValueError for a wider column and for
    `upto` beyond its end. About a microsecond for each new block of 16 tokens.
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
    """The key of a partial block of `tokens` behind the block (or root) with the key `before`."""
    column = tokens[:]
    if sys.byteorder == "big":
        column.byteswap()
    return blake3(b"tail" + before + column.tobytes()).digest()


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_tokens)


def choice_seed(seed: int, choice: int) -> int:
    """The uint64 seed of choice `choice` of a request: independent streams from one seed."""
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little") + choice.to_bytes(4, "little"), digest_size=8, person=b"headrace-choice"
    ).digest()
    return int.from_bytes(digest, "little")


def rendezvous(key: str, members: Iterable[str]) -> str:
    """The member that owns `key`; moves only the keys of a member that comes or goes.

    Highest random weight hashing, Thaler and Ravishankar 1998. Raises ValueError without members.
    """
    return max(members, key=lambda member: (_weight(key, member), member))


def _weight(key: str, member: str) -> bytes:
    return hashlib.blake2b(f"{member}\0{key}".encode(), digest_size=8).digest()
