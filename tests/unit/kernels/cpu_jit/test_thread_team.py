"""How the panels of a matrix are shared out to threads."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu_jit.thread_team import shares


@given(count=st.integers(1, 5000), threads=st.integers(1, 128))
def test_every_panel_is_in_one_piece_and_no_thread_waits_long_for_the_last(count: int, threads: int) -> None:
    starts = shares(count, threads).tolist()
    assert starts[0] == 0
    assert starts[-1] == count
    sizes = [end - begin for begin, end in pairwise(starts)]
    assert min(sizes) == sizes[-1] == 1  # the end
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= max(1, count // threads)  # each thread gets one
