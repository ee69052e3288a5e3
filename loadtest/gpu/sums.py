"""Sums over GPUs by size: NCCL, and every GPU reading the others' numbers, each in a graph of many."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.cuda import CUDAGraph

from loadtest.gpu.timing import eager_ms
from services.executor.cuda.short_sums import ShortSums
from services.executor.ranks import Spread, join, meeting

SIZES = tuple(1 << power for power in range(13, 25))  # bytes
LAUNCHES, WITHIN_S = 64, 300.0


def sums(size: int) -> list[dict[str, Any]]:
    """µs of a sum on rank 0, by bytes and way; None: there is no such way here."""
    spawning = multiprocessing.get_context("spawn")
    store, answers = meeting(size), spawning.SimpleQueue()
    ranks = [spawning.Process(target=_rank, args=(rank, size, store.port, answers)) for rank in range(size)]
    for process in ranks:
        process.start()
    ranks[0].join(WITHIN_S)
    for process in ranks:
        process.kill()
    if answers.empty():
        raise RuntimeError("rank 0 has not measured any sum")
    found: list[dict[str, Any]] = answers.get()
    for row in found:
        print("sums", row, flush=True)
    return found


def _rank(rank: int, size: int, port: int, answers: Any) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = join(rank, size, port, device)
    if ranks.short is not None:
        ranks.short = ShortSums(size, device, SIZES[-1])
    found = []
    for size_bytes in SIZES:
        x = torch.ones(size_bytes // 2, dtype=torch.bfloat16, device=device)
        row: dict[str, Any] = {"bytes": size_bytes, "nccl_us": _graph_us(torch.distributed.all_reduce, x)}
        row["short_us"] = None if ranks.short is None else _graph_us(ranks.short.all_reduce, x)
        _check(ranks, x)
        found.append(row)
    if rank == 0:
        answers.put(found)


def _check(ranks: Spread, x: Tensor) -> None:
    x.fill_(ranks.rank + 1)
    ranks.all_reduce(x)
    assert bool((x == ranks.size * (ranks.size + 1) / 2).all()), "a sum is wrong"


def _graph_us(run: Callable[[Tensor], object], x: Tensor) -> float:
    x.zero_()
    run(x)
    torch.cuda.synchronize()
    graph = CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(LAUNCHES):
            run(x)
    return 1e3 * eager_ms(graph.replay) / LAUNCHES
