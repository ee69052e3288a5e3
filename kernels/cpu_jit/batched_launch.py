"""Runs many kernels one after the other from one call of machine code.

A layer is nine kernels of 5 to 300 µs, and to start one from Python takes 10 µs. So the calls are written
into a table,

    table [layer][call][function, counter of pieces, numbers...]    after a row of the barrier's counters

and each thread of torch's team runs through it, and waits for the others after every call: a thread that has
waited for LOOKS gives its core away, since the one that it waits for may need it. OpenMP's own barrier only
lets all threads begin together: between calls it would wait either too long, or not long enough for the
worker threads to be still awake when the next step begins (services.launcher.serve).

The team uses all cores, so the processes that send the last tokens would wait for the next tick of Linux (4
ms). So a thread yields its core every EVERY_NS. If it returns late, because other processes compute, too, it
stops yielding for BACK_OFF_NS: each yield costs a time slice (Linux 6.18), so it would get little CPU time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

import numpy as np

from kernels.cpu_jit.llvm_intrinsics import call_at, clock_ns, fetch_add, i64_at, look_for, offset_by
from kernels.cpu_jit.thread_team import Call, Kernel, openmp, team_size

EVERY_NS = 150_000
LONG_NS = 3_000_000  # longer than a service works at a time
BACK_OFF_NS = 50_000_000
LOOKS = 500  # about 25 us
_WIDTH, _LINE = 24, 8  # numbers of a call: whole cache lines, so that the counters of two calls share none


def _run(p: Any) -> None:
    table, barrier, clock, give_way, not_before = i64_at(p[1]), p[3], p[4], p[5], i64_at(p[6])
    ends, team = table, offset_by(table, _LINE)  # how often a thread has ended a call; threads
    fetch_add(team)
    if barrier:
        call_at(barrier, table)
    all_ends, since = 0, clock_ns(clock)
    for i in range(1, p[2]):
        call = offset_by(table, i * _WIDTH)
        call_at(call[0], offset_by(call, 1))
        all_ends += team[0]
        fetch_add(ends)
        while not look_for(ends, all_ends, LOOKS):
            call_at(give_way, call)
        now = clock_ns(clock)
        if now - since >= EVERY_NS and now >= not_before[0]:
            call_at(give_way, call)
            since = clock_ns(clock)
            if since - now >= LONG_NS:
                not_before[0] = since + BACK_OFF_NS


_RUN = Kernel(_run)


class Launch:
    """Calls that run in order, `times` times, at each `run`. A number of a call is an int for all times, or
    an array with one for each. The caller keeps the memory at their addresses. For one thread."""

    def __init__(self, calls: Sequence[Call], times: int) -> None:
        self._table = np.zeros((1 + times * len(calls), _WIDTH), np.int64)  # counters, calls
        self._each = self._table[1:].reshape(times, len(calls), _WIDTH)
        self._each[:, :, 0] = [call.kernel.address for call in calls]
        self._numbers: list[tuple[Any, ...]] = [()] * len(calls)
        for i, call in enumerate(calls):
            self.put(i, call)
        self._counters = [(i, 2 + call.counters) for i, call in enumerate(calls) if call.counters]

    def put(self, i: int, call: Call) -> None:
        """Set the numbers of a call of the same kernel."""
        before, self._numbers[i] = self._numbers[i], call.numbers
        for place, (number, old) in enumerate(zip_longest(call.numbers, before), 2):
            if number is not old and (type(number) is not int or number != old):
                self._each[:, i, place] = number

    def run(self) -> None:
        """Run the calls."""
        table, threads, team = self._table, team_size(), openmp()
        table[0], table[1:, 1] = 0, 0
        for i, end in self._counters:
            self._each[:, i, 2:end] = 0
        barrier = team.barrier if team is not None and threads > 1 else 0
        _RUN(threads, table.ctypes.data, len(table), barrier, *_libc(), _not_before.ctypes.data)


@cache
def _libc() -> tuple[int, int]:
    """The addresses of `clock_gettime` and `sched_yield`."""
    library = ctypes.CDLL(None)
    clock, give_way = (
        ctypes.cast(library[name], ctypes.c_void_p) for name in ("clock_gettime", "sched_yield")
    )
    return clock.value or 0, give_way.value or 0


_not_before = np.zeros(1, np.int64)  # ns
