"""Runs a function on several ranks, each in a process of its own, as an executor's group has them."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch

from services.executor.parallel.ranks import Ranks, join, rendezvous

T = TypeVar("T")

WITHIN_S = 240.0
# A rank forks from a server that has imported these: to import them again takes most of its time. No rank
# makes a model of transformers, whose modules the server would import for seconds.
PRELOADED = ["services.executor.cpu.engine", "transformers", "gguf", "hypothesis", "pytest"]


def on_ranks(size: int, function: Callable[..., T], *arguments: object, ordered: bool = False) -> list[T]:
    """`function(ranks, *arguments)` on each of `size` gloo ranks: what they returned, by rank. The function
    stands at the top of a file; its arguments and its answer are pickled."""
    place = (function.__code__.co_filename, function.__name__)  # a test's module has no name elsewhere
    store = rendezvous(size)
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(size, forking) as pool:
        calls = [
            pool.submit(_rank, (rank, size, store.port), ordered, place, arguments) for rank in range(size)
        ]
        try:
            return [call.result(WITHIN_S) for call in calls]
        except BaseException:
            for process in list(pool._processes.values()):
                process.kill()  # a rank that waits for one that failed would keep the pool waiting
            raise


def _rank(
    position: tuple[int, int, int], ordered: bool, place: tuple[str, str], arguments: tuple[object, ...]
) -> object:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("on_a_rank", place[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ranks: Ranks = join(*position, torch.device("cpu"), ordered=ordered)
    try:
        return getattr(module, place[1])(ranks, *arguments)
    finally:
        ranks.close()
