"""Chained launches: a kernel starts while the kernel before it still runs, and waits for its results in
`ready`.

This is programmatic dependent launch (since CUDA 12.3 and sm_90). `begin` lets the next kernel start once all
programs of this one have started; `ready` waits for the end of the kernel before and its writes. Before
`ready` a kernel may use only memory that no kernel of the chain writes: weights, tables, the step's plan.
Every kernel that calls `begin` must call `ready` on every path; then all earlier kernels have ended, too, not
only the last.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(CHAINED: tl.constexpr) -> None:
    """Let the next kernel start."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def ready(CHAINED: tl.constexpr) -> None:
    """Wait for the end of the kernel before."""
    if CHAINED:
        gdc_wait()


@triton.jit
def prefetch(pointers: tl.tensor) -> None:
    """Load the cache lines at `pointers` into the second-level cache, without a wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
