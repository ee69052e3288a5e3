"""Block arithmetic, choice seeds, rendezvous hashing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv_blocks import blocks_for, choice_seed, rendezvous


@given(st.integers(0, 10**6), st.integers(1, 256))
def test_blocks_are_just_enough(tokens: int, block_tokens: int) -> None:
    blocks = blocks_for(tokens, block_tokens)
    assert blocks * block_tokens >= tokens
    assert blocks == 0 or (blocks - 1) * block_tokens < tokens


def test_choice_seeds_are_frozen_and_distinct() -> None:
    """A change would change every seeded answer: frozen values."""
    assert choice_seed(7, 0) == 0x1C84B2D313C86E54
    assert choice_seed(2**64 - 1, 3) == 0x485D22A536CE7274
    seeds = {choice_seed(seed, choice) for seed in range(100) for choice in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_is_uint64(seed: int) -> None:
    with pytest.raises(OverflowError):
        choice_seed(seed, 0)


@given(st.text(), st.sets(st.text(min_size=1), min_size=2, max_size=8), st.data())
def test_only_the_keys_of_a_lost_member_move(key: str, members: set[str], data: st.DataObject) -> None:
    owner = rendezvous(key, members)
    assert owner in members
    assert rendezvous(key, sorted(members, reverse=True)) == owner
    gone = data.draw(st.sampled_from(sorted(members)))
    if gone != owner:
        assert rendezvous(key, members - {gone}) == owner


def test_members_share_the_keys() -> None:
    counts = Counter(rendezvous(f"request-{i}", ["a", "b", "c", "d"]) for i in range(4000))
    assert set(counts) == {"a", "b", "c", "d"}
    assert min(counts.values()) > 850


def test_no_owner_has_a_key_without_members() -> None:
    with pytest.raises(ValueError, match="empty"):
        rendezvous("key", [])
