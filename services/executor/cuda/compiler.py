"""Checks that Triton can compile, and reports kernels that it compiles while the CUDA engine serves.

A request waits a second or more for a compilation. So the warm-up must meet every kernel in every form
(types, alignments, constants). A kernel from Triton's cache takes milliseconds, but it is reported as well: a
new machine would have to compile it.
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
    """Raises SetupError if Triton cannot start kernels. It needs a C compiler and maps the compiled module
    from its cache."""
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
    """Logs a warning for each kernel compiled from `start` to `stop`. One a process."""

    def __init__(self) -> None:
        self.kernels: list[str] = []  # in the order of their compilation

    def start(self) -> None:
        """Call it after the warm-up."""
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._compiled

    def stop(self) -> None:
        """Call it when the engine ends. The watch of another engine stays."""
        from triton import knobs

        if knobs.runtime.jit_post_compile_hook == self._compiled:
            knobs.runtime.jit_post_compile_hook = None

    def _compiled(self, *, repr: str, **more: Any) -> None:
        self.kernels.append(repr)
        log.warning("compiled under a request, the warm-up missed it: %s", repr)
