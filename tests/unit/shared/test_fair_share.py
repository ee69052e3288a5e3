"""Turns and shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.fair_share import Turns, has_no_room, is_over_share


@pytest.mark.parametrize(
    ("own", "held", "tenants", "refused"),
    [(11, 11, 1, True), (10, 10, 1, False), (6, 11, 2, True), (5, 11, 2, False), (1, 99, 10, False)],
)
def test_full_queue_refuses_a_tenant_with_an_equal_part(
    own: int, held: int, tenants: int, refused: bool
) -> None:
    assert is_over_share(own, held, 10, tenants) is refused


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())))
def test_tenant_waits_for_at_most_one_of_each_other_tenant(steps: list[tuple[str, bool]]) -> None:
    """Each tenant's own are in order, and between two of one that waits is at most one of each other."""
    turns: Turns[tuple[str, int]] = Turns()
    waiting: list[tuple[str, int]] = []
    since: dict[str, list[str]] = {t: [] for t in "abc"}  # whose turn it was since their last, or they came
    for number, (tenant, takes) in enumerate(steps):
        if takes and waiting:
            taken = turns.pop()
            assert taken == next(item for item in waiting if item[0] == taken[0])
            waiting.remove(taken)
            since = {t: [] if t == taken[0] else [*since[t], taken[0]] for t in since}
        else:
            if not any(item[0] == tenant for item in waiting):
                since[tenant] = []
            turns.put(tenant, (tenant, number))
            waiting.append((tenant, number))
        for each in {item[0] for item in waiting}:
            assert len(since[each]) == len(set(since[each]))
        assert len(turns) == len(waiting)
        assert turns.tenants == len({item[0] for item in waiting})
        assert turns.count_of("a") == sum(item[0] == "a" for item in waiting)


@pytest.mark.parametrize(
    ("own", "held", "tenants", "refused"),
    [(0, 19, 9, False), (0, 20, 9, True), (0, 99, 1, True), (1, 9, 9, False), (1, 10, 9, True)],
)
def test_a_tenant_of_which_nothing_waits_finds_room_up_to_twice_the_bound(
    own: int, held: int, tenants: int, refused: bool
) -> None:
    """Any client may invent names."""
    assert has_no_room(own, 1, held, 10, tenants) is refused
