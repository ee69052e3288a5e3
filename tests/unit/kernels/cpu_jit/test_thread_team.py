"""How the panels of a matrix are shared out to threads, and where machine code is kept."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import config

from kernels.cpu_jit import thread_team
from kernels.cpu_jit.thread_team import Kernel, shares


@given(count=st.integers(1, 5000), threads=st.integers(1, 128))
def test_every_panel_is_in_one_piece_and_no_thread_waits_long_for_the_last(count: int, threads: int) -> None:
    starts = shares(count, threads).tolist()
    assert starts[0] == 0
    assert starts[-1] == count
    sizes = [end - begin for begin, end in pairwise(starts)]
    assert min(sizes) == sizes[-1] == 1  # the end
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= max(1, count // threads)  # each thread gets one


def _count(p: Any) -> None:
    p[0] += 1


@contextmanager
def _short_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_kernels_run_where_their_code_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    thread_team._first_start()  # chooses the folder of the other tests
    caplog.set_level(logging.WARNING, "headrace.kernels")
    kept = tmp_path / "kept"

    def start(folder: Path) -> str:
        monkeypatch.setattr(config, "CACHE_DIR", str(folder))
        monkeypatch.setattr(thread_team, "_cache", {"usable": True})
        caplog.clear()
        Kernel(_count)(1)
        Kernel(_count)(1)
        return caplog.text

    assert start(kept) == start(kept) == ""
    (code,) = kept.rglob("*.nbi")
    code.write_bytes(b"")  # as after a loss of power
    assert f"{kept} cannot keep kernels" in start(kept)
    assert "NotADirectoryError" in start(code / "x")
    assert not [*Path(__file__).parent.rglob("*.nbi")]
    with _short_files():
        assert "cannot keep kernels: they are compiled at every start (OSError(27" in start(tmp_path / "full")
    assert caplog.text.count("cannot keep") == 1
