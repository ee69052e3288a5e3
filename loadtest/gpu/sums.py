"""Measures all-reduces over GPUs by size: NCCL, and one-shot through mapped memory, each in a graph of many.

Short ones also with the norm after them: as two kernels and as one.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.cuda import CUDAGraph

from kernels.collectives.gpu import Norm, all_reduce_add_rms_norm_
from kernels.elementwise.gpu import add_rms_norm_
from loadtest.gpu.timing import eager_ms
from services.executor.parallel.peer_memory import OneShotAllReduce
from services.executor.parallel.ranks import DistributedRanks, join, rendezvous

SIZES = tuple(1 << power for power in range(13, 25))  # bytes
LAUNCHES, WITHIN_S = 64, 300.0
WIDTH = 4096  # of the rows that are normalised


def sums(size: int) -> list[dict[str, Any]]:
    """µs of a sum on rank 0, by bytes and way; None: there is no such way here."""
    spawning = multiprocessing.get_context("spawn")
    store, answers = rendezvous(size), spawning.SimpleQueue()
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
    if ranks.one_shot is not None:
        ranks.one_shot = OneShotAllReduce(size, device, SIZES[-1])
    found = []
    for size_bytes in SIZES:
        x = torch.ones(size_bytes // 2, dtype=torch.bfloat16, device=device)
        row: dict[str, Any] = {"bytes": size_bytes, "nccl_us": _graph_us(torch.distributed.all_reduce, x)}
        row["short_us"] = None if ranks.one_shot is None else _graph_us(ranks.one_shot.all_reduce, x)
        _check(ranks, x)
        row |= _with_norm(ranks, x)
        found.append(row)
    if rank == 0:
        answers.put(found)


def _with_norm(ranks: DistributedRanks, x: Tensor) -> dict[str, float]:
    """µs of a sum with the residual add and the norm behind it, apart, and in one kernel."""
    rows = x.view(-1, WIDTH)
    boxes = ranks.symmetric.of(len(rows), WIDTH * x.element_size()) if ranks.symmetric is not None else None
    if boxes is None or ranks.one_shot is None:
        return {}
    short, turns = ranks.one_shot, itertools.cycle((0, 1))
    residual, weight = torch.zeros_like(rows), torch.ones_like(rows[0])
    residual.normal_()

    def apart(_: Tensor) -> None:
        add_rms_norm_(short.all_reduce(rows), residual, weight, 1e-5)

    def together(_: Tensor) -> None:
        all_reduce_add_rms_norm_(rows, residual, Norm(weight, 1e-5, chained=True), boxes, next(turns))

    def once(x: Tensor) -> None:  # a graph begins and ends as the one before
        together(x)
        together(x)

    return {"apart_us": _graph_us(apart, x), "norm_us": _graph_us(once, x) / 2}


def _check(ranks: DistributedRanks, x: Tensor) -> None:
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
