"""Halves of a step: as many tokens in each, every token once, and its prompt's tokens in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.executor.parallel.step_split import Chunk, split, split_chunks
from shared.messages import StepPlan, ints


def laid_out(counts: list[int], starts: list[int]) -> list[Chunk]:
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    return [Chunk(i, *where) for i, where in enumerate(zip(firsts, starts, counts, strict=True))]


def test_a_cut_goes_through_a_prompt() -> None:
    before, after = split_chunks(laid_out([100, 300], [0, 50]), cut=64)
    assert before == (Chunk(0, 0, 0, 100), Chunk(1, 100, 50, 92))
    assert after == (Chunk(1, 0, 142, 208),)


def test_prompts_of_one_length_are_not_cut() -> None:
    chunks = laid_out([1024] * 4, [0] * 4)
    before, after = split_chunks(chunks)
    assert before == tuple(chunks[:2])
    assert [(chunk.slot, chunk.first, chunk.start, chunk.count) for chunk in after] == [
        (2, 0, 0, 1024),
        (3, 1024, 0, 1024),
    ]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9)), min_size=1, max_size=9), st.integers(1, 64)
)
def test_every_token_is_in_one_micro_batch(sizes: list[tuple[int, int]], cut: int) -> None:
    counts, starts = (list(column) for column in zip(*sizes, strict=True))
    chunks = laid_out(counts, starts)
    parts = split_chunks(chunks, cut)
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


def plan_of(starts: list[int], counts: list[int], samples: list[tuple[int, int]]) -> StepPlan:
    """Rows of the slots 10, 11, ...; decodes are fed by the device. `samples`: row and slot."""
    return StepPlan(
        exec_epoch=3, step=7, mode="run_ahead", micro_batch=0, slots=ints(range(10, 10 + len(counts))),
        starts=ints(starts), counts=ints(counts), from_device=ints(int(count == 1) for count in counts),
        sample_rows=ints(row for row, _ in samples), sample_slots=ints(slot for _, slot in samples),
        table_slots=ints([10]), table_first=ints([0]), table_counts=ints([1]), table_blocks=ints([5]),
        copy_from=ints([1]), copy_to=ints([2]), two_stream=True,
    )  # fmt: skip


def test_a_plan_is_cut_through_a_row_and_samples_go_with_its_end() -> None:
    plan = plan_of([40, 9, 0, 30], [1, 1, 100, 60], [(3, 13), (0, 10), (2, 12), (2, 20), (1, 11)])
    found = split(plan, cut=16)
    assert found is not None
    first, second = found.first, found.second
    assert (first.slots, first.starts) == (ints([10, 11, 12]), ints([40, 9, 0]))
    assert (second.slots, second.starts) == (ints([12, 13]), ints([78, 30]))
    assert (first.counts, second.counts) == (ints([1, 1, 78]), ints([22, 60]))
    assert (first.from_device, second.from_device) == (ints([1, 1, 0]), ints([0, 0]))
    assert (first.sample_rows, first.sample_slots) == (ints([0, 1]), ints([10, 11]))
    assert (second.sample_rows, second.sample_slots) == (ints([1, 0, 0]), ints([13, 12, 20]))
    both = [*first.sample_slots, *second.sample_slots]
    assert [both[at] for at in found.order] == [13, 10, 12, 20, 11]
    for half in (first, second):
        assert (half.table_slots, half.table_blocks, half.copy_from, half.copy_to) == (ints(),) * 4
    assert (first.step, second.exec_epoch) == (7, 3)


def test_a_short_step_stays_whole() -> None:
    assert split(plan_of([0], [127], [])) is None
    assert split(plan_of([0], [128], [])) is not None
