"""Block keys: golden vectors from bytes written by hand, and what a key must and must not depend on."""

from __future__ import annotations

import sys
from array import array
from itertools import takewhile

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from shared.kv_blocks import KEY_BYTES, extend, root_key
from shared.messages import ints

ROOT = blake3(b"kv1" + b"\x02\x00\x00\x00fp" + b"\x05\x00\x00\x00caf\xc3\xa9").digest()
TOKENS = [1, 258, 50_000, 2**31 - 1, 0, 7, 9]
FIRST = blake3(ROOT + b"\x01\x00\x00\x00" + b"\x02\x01\x00\x00").digest()
SECOND = blake3(FIRST + b"\x50\xc3\x00\x00" + b"\xff\xff\xff\x7f").digest()
THIRD = blake3(SECOND + b"\x00\x00\x00\x00" + b"\x07\x00\x00\x00").digest()
TOKEN_LISTS = st.lists(st.integers(0, 2), max_size=24)


def keys_of(tokens: list[int], upto: int, block_tokens: int = 2, root: bytes = ROOT) -> list[bytes]:
    keys: list[bytes] = []
    extend(keys, root, ints(tokens), block_tokens, upto)
    return keys


def test_a_chain_is_these_bytes() -> None:
    assert blake3(b"").hexdigest() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert root_key("fp", "café") == ROOT
    assert ROOT.hex() == "ea654ab576303e5111b50f48c3a2d3bb8ab532ae74b4e8053d6f0bb5aaf09614"
    assert keys_of(TOKENS, 7) == [FIRST, SECOND, THIRD]
    assert FIRST.hex() == "0c5dd3b6be0a0acb12acd8bdb0a8e6baf6d7c819e27a305607c327cc6e169d0f"
    assert SECOND.hex() == "1da5b3b0a8b57f921d7cd2a11970cf71bea59b6a701f0dff62980bcde109c18c"
    assert {len(key) for key in (ROOT, FIRST, SECOND, THIRD)} == {KEY_BYTES}


@pytest.mark.parametrize(("upto", "blocks"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (7, 3)])
def test_only_full_blocks_have_keys(upto: int, blocks: int) -> None:
    assert keys_of(TOKENS, upto) == [FIRST, SECOND, THIRD][:blocks]


def test_no_two_roots_read_alike() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("ab", ""), ("", ""), ("\0", ""), ("", "\0")]
    assert len({root_key(fingerprint, salt) for fingerprint, salt in pairs}) == len(pairs)


def test_the_keys_of_a_tenant_are_its_own() -> None:
    mine, other = (keys_of(TOKENS, 6, root=root_key("fp", salt)) for salt in ("mine", "other"))
    assert not set(mine) & set(other)


def test_the_byte_order_of_the_machine_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The column as the other kind of machine has it in memory, read by that kind of machine."""
    theirs = ints(TOKENS)
    theirs.byteswap()
    before = theirs[:]
    monkeypatch.setattr(sys, "byteorder", {"little": "big", "big": "little"}[sys.byteorder])
    keys: list[bytes] = []
    extend(keys, ROOT, theirs, 2, 7)
    assert keys == [FIRST, SECOND, THIRD]
    assert theirs == before


@pytest.mark.parametrize(("tokens", "upto"), [(ints(TOKENS), 8), (array("q", TOKENS), 4)])
def test_a_column_that_cannot_be_named_is_refused(tokens: array[int], upto: int) -> None:
    keys: list[bytes] = []
    with pytest.raises(
        ValueError, match=rf"keys of {upto} int32 tokens asked, of 7 with {tokens.itemsize} b"
    ):
        extend(keys, ROOT, tokens, 2, upto)
    assert keys == []


@given(tokens=TOKEN_LISTS, block_tokens=st.integers(1, 4), stops=st.lists(st.integers(0, 24)))
def test_chain_is_the_same_in_any_steps(tokens: list[int], block_tokens: int, stops: list[int]) -> None:
    keys: list[bytes] = []
    for upto in [*(min(stop, len(tokens)) for stop in stops), len(tokens)]:
        extend(keys, ROOT, ints(tokens), block_tokens, upto)
    assert keys == keys_of(tokens, len(tokens), block_tokens)
    assert len(keys) == len(tokens) // block_tokens


@given(one=TOKEN_LISTS, other=TOKEN_LISTS, block_tokens=st.integers(1, 4))
def test_keys_agree_exactly_on_the_common_prefix(one: list[int], other: list[int], block_tokens: int) -> None:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    common = len(list(same)) // block_tokens
    mine, theirs = keys_of(one, len(one), block_tokens), keys_of(other, len(other), block_tokens)
    assert mine[:common] == theirs[:common]
    assert not set(mine[common:]) & set(theirs)
    assert len(set(mine)) == len(mine)
