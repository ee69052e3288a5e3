"""Measures products of fixed order against the library's: which layout is fastest for how many rows.

It also checks that all layouts give a row the same bits, because deterministic mode uses different layouts
for different numbers of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kernels.gemm.gpu import layout_of, matmul_fixed
from loadtest.gpu.timing import graph_us
from services.executor.cuda.kernel_configs import device_tuning

WEIGHTS = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 32, 64, 128, 256, 1024, 8192)
_COPIES = 4  # of a weight: more than the second-level cache holds


@torch.inference_mode()
def products() -> list[dict[str, Any]]:
    """Times in µs by weight and rows. Raises AssertionError where a layout gives a row other bits."""
    device = torch.device("cuda")
    layouts = device_tuning(torch.cuda.get_device_name()).fixed
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    for name, (width, inner) in WEIGHTS.items():
        weights = [
            torch.randn(width, inner, dtype=torch.bfloat16, device=device) * 0.02 for _ in range(_COPIES)
        ]
        x = torch.randn(max(ROWS), inner, dtype=torch.bfloat16, device=device)
        wanted = matmul_fixed(x, weights[0], None, layouts[0])
        for rows in ROWS:
            some = x[:rows]
            us = {}
            for tuning in layouts:
                same = torch.equal(matmul_fixed(some, weights[0], None, tuning), wanted[:rows])
                assert same, f"{name}, {rows} rows: {tuning} gives other bits than {layouts[0]}"
                us[f"{tuning.rows} x {tuning.tile}"] = graph_us(
                    lambda i: matmul_fixed(some, weights[i % _COPIES], None, tuning),  # noqa: B023
                    _COPIES,
                )
            chosen = layout_of(rows, width, processors, layouts)
            found.append({
                "weight": name, "rows": rows, "us": us, "chosen": f"{chosen.rows} x {chosen.tile}",
                "library_us": graph_us(lambda i: F.linear(some, weights[i % _COPIES]), _COPIES),  # noqa: B023
            })  # fmt: skip
            rounded = {layout: round(each, 1) for layout, each in us.items()}
            print("products", found[-1] | {"us": rounded}, flush=True)
    return found
