"""What a rank on a GPU checks, with the other ranks and the device played by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.executor.empty_plans import plan
from support.executor.partitions import shapes

from services.executor.checkpoint.weights import partition
from services.executor.cuda.engine import _check_alike, _check_same
from services.executor.engine import Pending
from services.executor.parallel.ranks import Solo
from shared.errors import EngineError, SetupError
from shared.messages import ints


class Recording(Solo):
    """The facts of ranks that hold these parts of a model with so many heads and KV heads."""

    def __init__(self, heads: int, kv_heads: int, size: int) -> None:
        self.size = size
        self.parts = [partition(shapes(heads, kv_heads, 256), rank, size).shapes for rank in range(size)]

    def exchange(self, mine: Any) -> list[Any]:
        found = [(part.heads, part.kv_heads) for part in self.parts]
        assert mine == found[0]
        return found


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 8, 2), (32, 8, 4), (32, 8, 16), (12, 2, 4)])
def test_ranks_with_as_many_heads_are_alike(heads: int, kv_heads: int, size: int) -> None:
    ranks = Recording(heads, kv_heads, size)
    _check_alike(ranks.parts[0], ranks)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 2), (32, 8, 3), (9, 3, 4)])
def test_ranks_with_other_heads_are_refused(heads: int, kv_heads: int, size: int) -> None:
    ranks = Recording(heads, kv_heads, size)
    with pytest.raises(SetupError, match="use a number that divides them"):
        _check_alike(ranks.parts[0], ranks)


@dataclass
class Event:
    """An event of a device that has come, or not yet."""

    come: bool

    def query(self) -> bool:
        return self.come


def test_a_rank_that_has_chosen_something_else_goes() -> None:
    event: Any = Event(True)
    pending = Pending(plan=plan(3), forwarded=event, answer=torch.tensor([[4, -1, 9], [0, 2, 0]]))
    _check_same(pending, ints([4, -1]))  # the buffer is wider than the step
    with pytest.raises(EngineError, match=r"step 3: the driver chose \[4, 5\], this rank \[4, -1\]"):
        _check_same(pending, ints([4, 5]))
    late: Any = Event(False)
    _check_same(replace(pending, forwarded=late), ints([4, 5]))  # it cannot know yet
