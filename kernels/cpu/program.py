"""Many kernels, one after the other, from one call of machine code.

A layer is nine kernels of 5 to 300 µs, and starting one from Python takes ten. Here the calls are written
into a table first,

    table [layer][call][function, 0, numbers...]

and each thread of torch's team goes through it, waiting for the others behind every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.cpu.machine import after, call_at, i64_at
from kernels.cpu.team import Call, Kernel, openmp, team_size

_WIDTH = 24  # numbers of a call: whole lines of the cache, so that who takes work of one disturbs no other


def _run(p: Any) -> None:
    entry, barrier = i64_at(p[1]), p[3]
    for i in range(p[2]):
        call = after(entry, i * _WIDTH)
        call_at(call[0], after(call, 1))
        if barrier:
            call_at(barrier, call)


_RUN = Kernel(_run)


def run(calls: Sequence[Call], times: int) -> None:
    """Make the calls, in order, `times` times. A number of a call is one for all times, or an array of one
    for each. What they point to stays until this returns."""
    table = np.zeros((times, len(calls), _WIDTH), np.int64)
    for i, call in enumerate(calls):
        table[:, i, 0] = call.kernel.address
        for place, number in enumerate(call.numbers, 2):
            table[:, i, place] = number
    threads, team = team_size(), openmp()
    barrier = team.barrier if team is not None and threads > 1 else 0
    _RUN(threads, table.ctypes.data, times * len(calls), barrier)
