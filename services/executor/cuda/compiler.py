"""Triton's compiler: what it needs of a machine, and what it compiles while an engine serves.

A request waits for a compilation, for a second or more. The warm-up is to meet every kernel in every form
(types, alignments, constants), so that nothing is left. What was compiled on an earlier start comes from
Triton's cache, in milliseconds; it is told all the same, since on a new machine it would not.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from shared.errors import SetupError

log = logging.getLogger("headrace.executor")


def check_compiler() -> None:
    """Raises SetupError where Triton could not start a kernel: by a module that a C compiler makes and that
    is mapped from its cache."""
    from triton import knobs

    cache = Path(knobs.cache.dir)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        raise SetupError(
            f"Triton's cache {cache} lies on a file system that is mounted noexec, and its kernels cannot be "
            "started from there: set TRITON_CACHE_DIR to a folder on another one"
        )
    if not os.access(there, os.W_OK):
        raise SetupError(
            f"Triton's cache {cache} cannot be written: set TRITON_CACHE_DIR to a folder of this user"
        )
    if not (
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or any(cache.glob("*/*.so"))
    ):
        raise SetupError(
            "the GPU engine needs a C compiler, with which Triton starts kernels: install gcc and libc6-dev, "
            "or name one in CC"
        )


class CompileWatch:
    """Tells what is compiled from `start` to `stop`. One of a process."""

    def __init__(self) -> None:
        self.kernels: list[str] = []  # in the order in which they were compiled

    def start(self) -> None:
        """The warm-up is over."""
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._compiled

    def stop(self) -> None:
        """The engine ends; another one may have begun."""
        from triton import knobs

        if knobs.runtime.jit_post_compile_hook == self._compiled:
            knobs.runtime.jit_post_compile_hook = None

    def _compiled(self, *, repr: str, **more: Any) -> None:
        self.kernels.append(repr)
        log.warning("compiled under a request, the warm-up missed it: %s", repr)
