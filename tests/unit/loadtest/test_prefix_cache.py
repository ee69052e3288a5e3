"""The prefix cache on a whole public trace, request by request, against a plain dict."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

from loadtest.bench.document import text_of
from loadtest.prefix_cache import POOLS, compact, keys_of, load, replay

ROOT = Path(__file__).parents[3]
TRACE = ROOT / "tests" / "data" / "mooncake_conversation.txt.gz"
RESULT = ROOT / "loadtest" / "results" / "prefix_cache" / "prefix_cache.json.gz"
SAMPLE = ROOT / "tests" / "data" / "mooncake_conversation_150.jsonl"


@pytest.fixture(scope="module")
def requests() -> list[list[int]]:
    return load(TRACE)


@pytest.fixture(scope="module")
def chains(requests: list[list[int]]) -> list[list[bytes]]:
    return keys_of(requests)


def hits_of_a_dict(requests: list[list[int]], pool_blocks: int) -> tuple[list[int], int]:
    """Blocks found per request and blocks evicted, by a dict of block ids, the next to evict first."""
    cache: dict[int, None] = {}
    found, evicted = [], 0
    for ids in requests:
        hits = next((i for i, block in enumerate(ids) if block not in cache), len(ids))
        for block in ids[:hits]:
            del cache[block]
        short = max(len(cache) + len(ids) - pool_blocks, 0)
        for block in list(islice(cache, short)):
            del cache[block]
        assert not cache.keys() & set(ids), "a block outlived the blocks before it"
        cache |= dict.fromkeys(reversed(ids))
        found.append(hits)
        evicted += short
    return found, evicted


@pytest.mark.parametrize("pool_blocks", POOLS[::2])
def test_hits_are_those_of_a_dict(
    requests: list[list[int]], chains: list[list[bytes]], pool_blocks: int
) -> None:
    result = replay(chains, pool_blocks)
    found, evicted = hits_of_a_dict(requests, pool_blocks)
    assert result.hits == found
    assert result.evicted == evicted
    report = json.loads(text_of(RESULT))
    (row,) = [row for row in report["pools"] if row["pool_blocks"] == pool_blocks]
    assert (row["hit_blocks"], row["evicted_blocks"]) == (sum(found), evicted)


def test_an_endless_pool_finds_what_the_trace_repeats(
    requests: list[list[int]], chains: list[list[bytes]]
) -> None:
    seen: set[int] = set()
    repeated = []
    for ids in requests:
        repeated.append(next((i for i, block in enumerate(ids) if block not in seen), len(ids)))
        seen.update(ids)
    result = replay(chains, len(seen))
    assert (result.hits, result.evicted) == (repeated, 0)
    assert (sum(repeated), sum(map(len, requests)), len(seen)) == (105_710, 288_500, 182_790)


def test_the_compact_trace_is_the_published_one(requests: list[list[int]]) -> None:
    published = load(SAMPLE)
    assert requests[: len(published)] == published
    assert gzip.decompress(compact(requests)) == gzip.decompress(TRACE.read_bytes())
    assert max(map(len, requests)) == 247


@pytest.mark.parametrize("spoilt", [[0, 3], [0, 1, 3], [1], [0, 2, 1], [2, 0]])
def test_a_trace_that_is_no_tree_cannot_be_compacted(spoilt: list[int]) -> None:
    tree = [[0, 1], [], [0, 1], [0]]
    assert compact(tree)
    with pytest.raises(ValueError, match="request 4 does not continue a tree"):
        compact([*tree, spoilt])


def test_a_prompt_larger_than_the_pool_is_refused(chains: list[list[bytes]]) -> None:
    with pytest.raises(ValueError, match="a prompt of 14 blocks does not fit a pool of 13"):
        replay(chains, 13)
