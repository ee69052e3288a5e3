"""Runs many kernels one after the other from one call of machine code.

A layer is nine kernels of 5 to 300 µs, and to start one from Python takes 10 µs. So the calls are written
into a table,

    table [layer][call][function, counter of pieces, numbers...]    then some calls once, e.g. of the head

and each thread of torch's team runs through it. It takes pieces of a call until none is left, then waits for
the threads that are still inside of the call. A thread without a core between two calls delays no other: it
finds no pieces when it comes, and soon catches up. A thread that has waited for LOOKS gives its core away,
since the one that it waits for may need it. OpenMP only starts the threads and joins them.

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

from kernels.cpu_jit.llvm_intrinsics import (
    call_at,
    clock_ns,
    fast,
    fetch_add,
    i64_at,
    look_past,
    offset_by,
    publish,
)
from kernels.cpu_jit.thread_team import Call, Kernel, team_size

EVERY_NS = 150_000
LONG_NS = 3_000_000  # longer than a service works at a time
BACK_OFF_NS = 50_000_000
LOOKS = 500  # about 25 us
_WIDTH, _LINE = 24, 8  # numbers of a call and a cache line: no two threads' counters share a line
_OUTSIDE = -1  # a thread's state while it is not inside of a call, else the call's place in the table


@fast
def _wait(states: Any, threads: int, call: int, give_way: int) -> None:
    """Wait until no thread is inside of the call, after its pieces are taken. A thread publishes its state
    before it takes a piece, so one that took some is seen here."""
    for i in range(threads):
        state = offset_by(states, i * _LINE)
        while not look_past(state, call, LOOKS):
            call_at(give_way, state)


def _run(p: Any) -> None:
    states, threads, table, calls = i64_at(p[1]), p[2], i64_at(p[3]), p[4]
    clock, give_way, not_before = p[5], p[6], i64_at(p[7])
    state, since = offset_by(states, fetch_add(p) * _LINE), clock_ns(clock)
    for i in range(calls):
        call = offset_by(table, i * _WIDTH)
        publish(state, i)
        call_at(call[0], offset_by(call, 1))
        publish(state, _OUTSIDE)
        _wait(states, threads, i, give_way)
        now = clock_ns(clock)
        if now - since >= EVERY_NS and now >= not_before[0]:
            call_at(give_way, call)
            since = clock_ns(clock)
            if since - now >= LONG_NS:
                not_before[0] = since + BACK_OFF_NS


_RUN = Kernel(_run)


class Launch:
    """Calls that run in order at each `run`: `calls` so many `times`, then `last` once. A number of one of
    `calls` is an int for all times, or an array with one for each. The caller keeps the memory at their
    addresses. For one thread."""

    def __init__(self, calls: Sequence[Call], times: int, last: Sequence[Call] = ()) -> None:
        end = times * len(calls)
        self._table = np.zeros((end + len(last), _WIDTH), np.int64)
        self._rows = [self._table[i : end : len(calls)] for i in range(len(calls))]  # of each call, all times
        self._rows += [self._table[end + i : end + i + 1] for i in range(len(last))]
        self._states = np.zeros((team_size(), _LINE), np.int64)
        self._numbers: list[tuple[Any, ...]] = [()] * len(self._rows)
        for i, call in enumerate((*calls, *last)):
            self._rows[i][:, 0] = call.kernel.address
            self.put(i, call)
        counters = [call.counters for call in (*calls, *last)]
        self._counters = [(i, 2 + count) for i, count in enumerate(counters) if count]

    def put(self, i: int, call: Call) -> None:
        """Set the numbers of a call of the same kernel; those of `last` come after those of `calls`."""
        before, self._numbers[i] = self._numbers[i], call.numbers
        for place, (number, old) in enumerate(zip_longest(call.numbers, before), 2):
            if number is not old and (type(number) is not int or number != old):
                self._rows[i][:, place] = number

    def run(self) -> None:
        """Run the calls on as many threads as there were in the team when this was made."""
        table, states = self._table, self._states
        table[:, 1], states[:, 0] = 0, _OUTSIDE
        for i, end in self._counters:
            self._rows[i][:, 2:end] = 0
        addresses = states.ctypes.data, len(states), table.ctypes.data, len(table)
        _RUN(len(states), *addresses, *_libc(), _not_before.ctypes.data)


@cache
def _libc() -> tuple[int, int]:
    """The addresses of `clock_gettime` and `sched_yield`."""
    library = ctypes.CDLL(None)
    clock, give_way = (
        ctypes.cast(library[name], ctypes.c_void_p) for name in ("clock_gettime", "sched_yield")
    )
    return clock.value or 0, give_way.value or 0


_not_before = np.zeros(1, np.int64)  # ns
