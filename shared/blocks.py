"""Block arithmetic of the paged KV cache, and the rendezvous hash that picks a shard."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


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
