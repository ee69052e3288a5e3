"""Compiles Triton's kernels at once, on threads, before the warm-up launches them one after the other.

    launches, without effect ─▶ a thread for each kernel that is not compiled: LLVM, ptxas ─▶ Triton's cache

Triton compiles a kernel when it is first launched, and nothing else happens meanwhile: an engine whose
machine has compiled nothing spent most of its start so. LLVM and ptxas run beside Python, so threads are
enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from shared.processes import usable_cores

MOST_THREADS = 16


@contextmanager
def _without_launches() -> Iterator[None]:
    """Kernels are compiled where they would be launched; what they write stays as it was."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compiled(function: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
        return run(function, *args, grid=grid, warmup=True, **how)

    JITFunction.run = compiled
    try:
        yield
    finally:
        JITFunction.run = run


def compile_ahead(launch: Callable[[], None]) -> int:
    """Compile the kernels that `launch` would start, and return how many of them Triton's cache did not have.
    Everything else in `launch` is done, over memory that no kernel has written. Raises Triton's errors."""
    from triton import AsyncCompileMode, knobs

    new: list[str] = []
    before = knobs.compilation.listener

    def note(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            new.append(src.name)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **more)

    knobs.compilation.listener = note
    threads = max(1, min(MOST_THREADS, int(usable_cores())))
    try:
        with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool), _without_launches():
            launch()
    finally:
        knobs.compilation.listener = before
    return len(new)
