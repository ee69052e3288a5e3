"""Weights as checkpoints store them: places in a file until they are loaded, then only their part."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.checkpoint.stored import Cut, Dense

CPU = torch.device("cpu")
WHOLE = torch.arange(48.0).view(6, 8)


class Counting:
    """A tensor of a file, and the numbers that were read."""

    shape = WHOLE.shape

    def __init__(self) -> None:
        self.read = 0

    def __getitem__(self, at: tuple[slice, ...]) -> torch.Tensor:
        found = WHOLE[at]
        self.read += found.numel()
        return found


def test_only_loading_reads_and_only_the_part() -> None:
    source = Counting()
    part = Dense.of(source).cut(Cut(0, 1, 5)).cut(Cut(1, 2, 4)).cut(Cut(0, 1, 3))
    assert (part.shape, source.read) == ((2, 2), 0)
    loaded = part.loaded(torch.float64, CPU)
    assert loaded.values.equal(WHOLE[2:4, 2:4].double())
    assert source.read == 4


@given(st.data())
def test_a_cut_keeps_nothing_of_the_rest(data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, 1))
    begin = data.draw(st.integers(0, WHOLE.shape[dim] - 1))
    end = data.draw(st.integers(begin + 1, WHOLE.shape[dim]))
    found = Dense.of(WHOLE).cut(Cut(dim, begin, end)).loaded(torch.float32, CPU).values
    assert found.equal(WHOLE.narrow(dim, begin, end - begin))
    assert found.untyped_storage().nbytes() == found.nbytes
    assert found.is_contiguous()


def test_the_whole_stays_where_it_is() -> None:
    assert Dense.of(WHOLE).loaded(torch.float32, CPU).values is WHOLE
    assert Dense.of(WHOLE).join([]).values is WHOLE


def test_rows_and_what_is_joined() -> None:
    first, second = (Dense.of(WHOLE).cut(Cut(0, *rows)) for rows in ((0, 2), (4, 6)))
    assert first.join([second]).values.equal(WHOLE[[0, 1, 4, 5]])
    assert first.join([second]).rows(torch.tensor([3, 0])).values.equal(WHOLE[[5, 0]])
