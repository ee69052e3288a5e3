"""Halves of a step: as many tokens in each, every token once, and its prompt's tokens in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.executor.cuda.halves import halves
from services.executor.cuda.inputs import Chunk


def laid_out(counts: list[int], starts: list[int]) -> list[Chunk]:
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    return [Chunk(i, *where) for i, where in enumerate(zip(firsts, starts, counts, strict=True))]


def test_a_cut_goes_through_a_prompt() -> None:
    before, behind = halves(laid_out([100, 300], [0, 50]), cut=64)
    assert before == (Chunk(0, 0, 0, 100), Chunk(1, 100, 50, 92))
    assert behind == (Chunk(1, 0, 142, 208),)


def test_prompts_of_one_length_are_not_cut() -> None:
    chunks = laid_out([1024] * 4, [0] * 4)
    before, behind = halves(chunks)
    assert before == tuple(chunks[:2])
    assert [(chunk.slot, chunk.first, chunk.start, chunk.count) for chunk in behind] == [
        (2, 0, 0, 1024),
        (3, 1024, 0, 1024),
    ]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9)), min_size=1, max_size=9), st.integers(1, 64)
)
def test_every_token_is_in_one_half(sizes: list[tuple[int, int]], cut: int) -> None:
    counts, starts = (list(column) for column in zip(*sizes, strict=True))
    chunks = laid_out(counts, starts)
    parts = halves(chunks, cut)
    positions = [
        (chunk.slot, chunk.start + i) for part in parts for chunk in part for i in range(chunk.count)
    ]
    assert positions == [(chunk.slot, chunk.start + i) for chunk in chunks for i in range(chunk.count)]
    tokens = [sum(chunk.count for chunk in part) for part in parts]
    assert abs(tokens[0] - tokens[1]) <= cut + 1
    assert sum(counts) < 2 * cut or min(tokens) > 0
    assert tokens[0] % cut == 0
    for part in parts:
        assert [chunk.first for chunk in part] == [sum(c.count for c in part[:i]) for i in range(len(part))]
