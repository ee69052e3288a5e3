"""Calls in machine code, one after the other: when a computing thread offers its core to others."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu_jit import batched_launch
from kernels.cpu_jit.llvm_intrinsics import fetch_add, i64_at, offset_by
from kernels.cpu_jit.thread_team import Call, Kernel

TICK_NS = 20_000  # from one look at the clock to the next
GET_TIME = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
GIVE_WAY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _nothing(p: Any) -> None:
    p[0] = 0


def _add_neighbours(p: Any) -> None:
    """One row of Pascal's triangle from the one before, a number for each piece of work."""
    before, row = i64_at(p[1]), i64_at(p[2])
    while True:
        piece = fetch_add(p)
        if piece >= p[3]:
            return
        row[piece] = (before[piece] + before[(piece + 1) % p[3]]) % 1_000_003


def offers(monkeypatch: pytest.MonkeyPatch, calls: int, away_ns: int) -> list[int]:
    """When the core was offered during so many calls; it is back after `away_ns`."""
    now, offered = [7_999_990_000], []

    def get_time(kind: int, spec: Any) -> int:
        now[0] += TICK_NS
        spec[0], spec[1] = divmod(now[0], 10**9)
        return 0

    def give_way(call: Any) -> None:
        offered.append(now[0])
        now[0] += away_ns

    kept = GET_TIME(get_time), GIVE_WAY(give_way)
    addresses = tuple(ctypes.cast(function, ctypes.c_void_p).value for function in kept)
    monkeypatch.setattr(batched_launch, "_libc", lambda: addresses)
    monkeypatch.setattr(batched_launch, "_not_before", np.zeros(1, np.int64))
    batched_launch.Launch([Call(Kernel(_nothing), 1, ())], calls).run()
    return offered


@pytest.mark.parametrize("away_ns", [0, batched_launch.LONG_NS - 2 * TICK_NS])
def test_a_core_is_offered_again_and_again(monkeypatch: pytest.MonkeyPatch, away_ns: int) -> None:
    offered = offers(monkeypatch, 1_000, away_ns)
    between = {later - sooner - away_ns for sooner, later in pairwise(offered)}
    assert len(offered) > 100
    assert between == {-(-batched_launch.EVERY_NS // TICK_NS) * TICK_NS + TICK_NS}


def test_batched_launch_is_not_offered_for_a_while_after_a_late_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = offers(monkeypatch, 10_000, batched_launch.LONG_NS)
    between = [later - sooner for sooner, later in pairwise(offered)]
    assert len(between) == 3
    assert min(between) >= batched_launch.LONG_NS + batched_launch.BACK_OFF_NS


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_call_begins_when_all_threads_have_ended_the_one_before(threads: int) -> None:
    calls, width = 2_000, 16
    rows = np.zeros((calls + 1, width), np.int64)
    rows[0] = expected = np.arange(width) ** 2
    at = rows.ctypes.data + np.arange(calls) * rows[0].nbytes
    torch.set_num_threads(threads)
    batched_launch.Launch(
        [Call(Kernel(_add_neighbours), width, (at, at + rows[0].nbytes, width))], calls
    ).run()
    for _ in range(calls):
        expected = (expected + np.roll(expected, -1)) % 1_000_003
    assert rows[-1].tolist() == expected.tolist()


def _count_and_store(p: Any) -> None:
    """How many pieces of work were done before, counted in a number of the call, in each of `p[3]`."""
    stored = i64_at(p[2])
    while True:
        piece = fetch_add(p)
        if piece >= p[3]:
            return
        stored[piece] = fetch_add(offset_by(p, 1))


def test_a_launch_runs_again_with_other_numbers() -> None:
    times, width = 3, 4
    stored = np.full((4, times, width), -1, np.int64)
    at = stored.ctypes.data + np.arange(4 * times).reshape(4, times) * stored[0, 0].nbytes
    kernel = Kernel(_count_and_store)
    calls = [Call(kernel, width, (0, at[i], width), counters=1) for i in range(4)]
    launch = batched_launch.Launch(calls[:2], times)
    launch.run()
    assert (stored[:2] == np.arange(width)).all()
    stored[:2] = -1
    launch.put(0, calls[2])
    launch.put(0, Call(kernel, width - 1, (0, at[2], width - 1), counters=1))
    launch.run()
    assert (stored[0] == -1).all()
    assert (stored[1] == np.arange(width)).all()
    assert stored[2].tolist() == [[0, 1, 2, -1]] * times


def test_a_thread_that_does_not_come_delays_no_other() -> None:
    rows = np.zeros((101, 16), np.int64)
    rows[0] = expected = np.arange(16)
    at = rows.ctypes.data + np.arange(100) * rows[0].nbytes
    torch.set_num_threads(2)
    launch = batched_launch.Launch([Call(Kernel(_add_neighbours), 16, (at, at + rows[0].nbytes, 16))], 100)
    torch.set_num_threads(1)
    launch.run()
    for _ in range(100):
        expected = (expected + np.roll(expected, -1)) % 1_000_003
    assert rows[-1].tolist() == expected.tolist()


def test_the_last_calls_run_once_after_the_others() -> None:
    kernel, rows = Kernel(_add_neighbours), np.zeros((4, 3), np.int64)
    rows[0] = 1
    first, second, third = (rows.ctypes.data + i * rows[0].nbytes for i in range(3))
    once = [Call(kernel, 3, (i, i + rows[0].nbytes, 3)) for i in (second, third)]
    launch = batched_launch.Launch([Call(kernel, 3, (first, second, 3))], 2, once)
    launch.run()
    assert rows[:, 0].tolist() == [1, 2, 4, 8]
    launch.put(2, Call(kernel, 3, (first, third + rows[0].nbytes, 3)))
    launch.run()
    assert rows[:, 0].tolist() == [1, 2, 4, 2]


def test_the_clock_and_the_offer_are_there() -> None:
    assert all(batched_launch._libc())
