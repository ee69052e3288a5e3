"""Launches that overlap: a kernel starts while the one before it still runs, and waits where it must.

With programmatic dependent launch (CUDA 12.3 and sm_90 on) `begin` lets the next kernel start as soon as all
programs of this one have, and `ready` waits for the kernel before and all it has written. Between the two a
kernel may touch only what no kernel of the chain writes: weights, tables, the step's plan. Every kernel that
begins must also wait, on every path: then all before it are complete, too, not only the last.
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
    """Wait for what the kernel before has written."""
    if CHAINED:
        gdc_wait()


@triton.jit
def prefetch(pointers: tl.tensor) -> None:
    """Have the lines at `pointers` brought into the second-level cache; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
