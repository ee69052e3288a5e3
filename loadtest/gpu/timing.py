"""Time on the device: medians of graphs of many launches, so that gaps between launches do not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import CUDAGraph, Event


def eager_ms(run: Callable[[], object], times: int = 7) -> float:
    """Median time of `run`, by events; for work of milliseconds."""
    run()
    found: list[float] = []
    event: Any = Event  # untyped
    for _ in range(times):
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return sorted(found)[times // 2]


def graph_us(run: Callable[[int], object], launches: int, times: int = 7) -> float:
    """Median time of one `run(i)`, in a graph of `launches` of them. Give each its own data where what lies
    in the cache would flatter."""
    run(0)
    torch.cuda.synchronize()
    graph = CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i)
    return 1e3 * eager_ms(graph.replay, times) / launches
