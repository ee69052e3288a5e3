"""Pages of lists."""

from __future__ import annotations

import pytest

from services.keeper.batches.batch_verbs import page_of
from shared import bodies


@pytest.mark.parametrize(
    ("asked", "page"),
    [
        ({}, (["c", "b", "a"], 100)),
        ({"order": "desc", "limit": 2}, (["c", "b", "a"], 2)),
        ({"order": "asc", "limit": 500}, (["a", "b", "c"], 100)),
        ({"after": "b"}, (["a"], 100)),
        ({"after": "b", "order": "asc"}, (["c"], 100)),
    ],
)
def test_a_page_follows_its_order(asked: bodies.PageAsked, page: tuple[list[str], int]) -> None:
    assert page_of(["c", "b", "a"], asked) == page
