"""How long an answer may be where no field states it: as long as what the executors hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler.world import World

from services.scheduler.headroom import can_fit
from services.scheduler.load_shedding import with_possible_max_tokens
from services.scheduler.state.requests import Arrived, PeerDraining
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.messages import Tokenized, ints


def world(blocks: int = 8, max_context: int = 64) -> World:
    made = World()
    made.add_engine(blocks=blocks, block_tokens=4, slots=4, max_context=max_context)
    return made


@pytest.mark.parametrize(
    ("prompt", "n", "length"),
    [(5, 1, 27), (31, 1, 1), (5, 2, 11), (9, 2, 11), (8, 4, 4), (9, 4, 3)],
    ids=str,
)
def test_unstated_length_is_the_largest_that_fits(prompt: int, n: int, length: int) -> None:
    """8 blocks of 4 tokens; choices share the full blocks of their prompt."""
    made = world()
    made.ask("a", list(range(1, prompt + 1)), 1_000, n=n, open_end=True)
    assert not made.rejected
    sequences = made.scheduler.state.requests["public", "a"].sequences
    assert [s.max_length - s.prompt_tokens for s in sequences] == [length] * n
    made.run()
    assert [len(reader.tokens) for reader in made.readers_of("a")] == [length] * n
    made.assert_idle()


def test_stated_length_is_refused_where_it_does_not_fit() -> None:
    made = world()
    made.ask("a", [1] * 5, 28)
    made.ask("b", [1] * 32, 1_000, open_end=True)
    made.ask("c", [1] * 8, 5, n=4)
    made.ask("d", [1] * 8, 4, n=5, open_end=True)
    never = "never fit: the context is 64 tokens and the KV cache holds 32"
    fewer = "or for fewer choices"
    assert [(r.request, r.code, r.message) for r in made.rejected] == [
        ("a", 400, f"5 prompt tokens + 28 to generate, times 1, {never}; ask for fewer max_tokens"),
        ("b", 400, f"32 prompt tokens + 1 to generate, times 1, {never}; shorten the prompt"),
        ("c", 400, f"8 prompt tokens + 5 to generate, times 4, {never}; ask for fewer max_tokens, {fewer}"),
        ("d", 400, f"8 prompt tokens + 1 to generate, times 5, {never}; shorten the prompt, {fewer}"),
    ]


def test_the_largest_executor_counts_that_stays() -> None:
    made = world()
    made.add_engine("e2", blocks=12, block_tokens=4, slots=4, max_context=40)
    made.ask("a", [1] * 5, 1_000, open_end=True)
    made.handle(PeerDraining("executor", "e2"))
    made.ask("b", [1] * 5, 1_000, open_end=True)
    requests = made.scheduler.state.requests
    assert [requests["public", name].tokenized.max_tokens for name in "ab"] == [35, 27]


def test_a_request_that_goes_on_elsewhere_is_fitted_there_and_loses_nothing() -> None:
    made = world()
    asked = Tokenized(
        request="a",
        attempt=1,
        tenant="public",
        model="m",
        inbox="i",
        timeout_us=10**9,
        max_tokens=1_000,
        open_end=True,
        tokens=ints([1, 2, 3, 4, 5, 6, 7]),
        generated=ints([2]),
        reasons=("",),
    )
    made.handle(Arrived("detokenizer.d1", asked))
    assert [len(reader.tokens) for reader in made.readers_of("a")] == [2]
    made.run()
    assert [len(reader.tokens) for reader in made.readers_of("a")] == [27]


@given(
    blocks=st.integers(1, 40),
    block_tokens=st.integers(1, 5),
    context=st.integers(2, 60),
    n=st.integers(1, 5),
    prompt=st.integers(1, 40),
)
def test_fitted_length_fits_and_a_token_more_does_not(
    blocks: int, block_tokens: int, context: int, n: int, prompt: int
) -> None:
    made = World()
    made.add_engine(blocks=blocks, block_tokens=block_tokens, slots=4, max_context=context)
    executor = made.scheduler.state.executors["e1"]
    made.ask("a", [1] * prompt, 1_000, n=n, open_end=True)
    if made.rejected:
        assert made.rejected[0].code == 400
        return
    asked = made.asked["a"]
    length = with_possible_max_tokens(made.scheduler.state, asked).max_tokens
    sequences = made.scheduler.state.requests["public", "a"].sequences
    assert all(s.max_length == prompt + length for s in sequences)
    group = SequenceGroup(sequences[0].request, sequences, 1)
    for sequence in sequences:
        sequence.tokens = sequence.tokens[:prompt]
    assert can_fit(executor, group)
    for sequence in sequences:
        sequence.max_length += 1
    assert not can_fit(executor, group)
