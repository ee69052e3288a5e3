"""Exchange by copies against a process group's, on gloo ranks with memory in files."""

from __future__ import annotations

import pytest
import torch
from support.executor.host_memory import GroupCollectives, HostMemory
from support.executor.rank_side import on_ranks
from torch import Tensor

from services.executor.parallel.ranks import MappedCopies, Ranks

ROUNDS = 6


def _on_rank(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """What copies and the process group made of the same, in every way, one after the other."""
    copies, group = MappedCopies(HostMemory(1 << 12)), GroupCollectives()
    found = []
    for turn in range(ROUNDS):
        generator = torch.Generator().manual_seed(100 * turn + ranks.rank)
        x = torch.randint(-99, 99, (ranks.size, 3, turn + 1), generator=generator)
        for exchanged in (copies, group):
            gathered, part, whole = x.new_empty(ranks.size, *x.shape), x.new_empty(3, turn + 1), x.clone()
            exchanged.all_gather_into(gathered, x)
            exchanged.reduce_scatter_into(part, x)
            doubled = torch.empty_like(gathered)
            exchanged.all_gather_each((doubled, gathered), (2 * x, x + 1))  # in a row, into the same memory
            exchanged.all_reduce(whole)
            found.append(torch.cat([doubled.flatten(), gathered.flatten(), part.flatten(), whole.flatten()]))
    return list(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_exchange_by_copies_equals_that_by_the_group(size: int) -> None:
    for answers in on_ranks(size, _on_rank):
        assert len(answers) == ROUNDS
        for by_copies, by_group in answers:
            assert torch.equal(by_copies, by_group)


def _misuse(ranks: Ranks) -> str:
    copies = MappedCopies(HostMemory(64))
    with pytest.raises(ValueError) as raised:
        copies.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError):
        copies.reduce_scatter_into(torch.ones(8, 2), torch.ones(2, 8, 2))
    return str(raised.value)


def test_impossible_exchange_by_copies_is_an_error() -> None:
    assert on_ranks(2, _misuse) == ["1 elements for 2 ranks"] * 2
