"""Products with matrices in 4 or 8 bits on a GPU, also of experts, by the kernels of humming-kernels.

The library has its own order of a matrix's numbers, and builds a kernel for each shape and range of rows,
by NVRTC or nvcc, once for a machine (`$HUMMING_CACHE_DIR`, else `~/.humming/cache`). `prepare` does both, so
that a product only launches: a CUDA graph can capture it.

Numbers are widened to bfloat16 and multiplied with scales rounded to it, as are zeros that are no whole
numbers. Programs that share a tile add their parts up in the output, in bfloat16, more than three of them in
the order in which they end: the last bits of
a product may differ from run to run. They take turns by `locks`, which are zeros again at a kernel's end: two
products with one matrix must not run at once.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.int4.ref import Int4Groups, pack

_LOCKS = 2048  # the library's own count: over those that 132 processors need
# The library's choice for these numbers of rows serves those below, too: it has 92 choices, many alike.
_ROWS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 2048)
_ROWS_OF_EXPERTS = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)  # of all together
_CHAINED_ROWS = 32  # of a step: DeviceTuning.few_rows of one GPU
_MOST_ROWS = 1 << 30  # the last choice is for all longer steps


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix of `shape` in the library's order, or one for each of `experts`. `kernels`: its kernels by the
    number of rows, on the host."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None
    locks: Tensor
    kernels: Tensor
    shape: tuple[int, int]
    experts: int = 0

    def __len__(self) -> int:
        return self.experts or self.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is in the memory of the device."""
        zeros = () if self.zeros is None else (self.zeros,)
        return (self.numbers, self.scales, self.locks, *zeros)


@functools.cache
def _library() -> Any:
    """The library; a wheel has its native parts, so that the import starts no processes to build them.
    Raises ImportError."""
    kept = os.environ.get("HUMMING_DISABLE_PARALLEL_BUILD")
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    try:
        import humming.dtypes
        import humming.kernel.humming
        import humming.ops
        import humming.schema
        import humming.transform
        import humming.tune
    finally:
        if kept is None:
            del os.environ["HUMMING_DISABLE_PARALLEL_BUILD"]
        else:
            os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = kept
    return humming


def prepare(matrix: Int4Groups, experts: int = 0) -> Int4Weight:
    """For products; with `experts` those of so many matrices of one size below each other. Both sizes are
    multiples of 128, groups of 16, 32, 64, 128 columns or a row. Builds kernels for a shape that this
    machine has not seen, in some seconds. Raises ImportError without the library, and RuntimeError, OSError,
    ValueError or AssertionError if it cannot build."""
    library = _library()
    rows, columns = matrix.shape
    rows //= experts or 1
    scales, zeros = matrix.scales.bfloat16(), matrix.zeros
    fractions = zeros is not None and zeros.is_floating_point()
    kinds = (f"uint{matrix.bits}", "bfloat16")
    if matrix.e2m1:  # powers of two: the bits of their exponents
        scales = (scales.view(torch.int16) >> 7).to(torch.uint8).view(torch.float8_e8m0fnu)
        kinds = ("float4e2m1", "float8e8m0")
    of_numbers, of_scales = map(library.dtypes.DataType.from_str, kinds)
    schema = library.schema.HummingWeightSchema(
        b_dtype=of_numbers,
        bs_dtype=of_scales,
        weight_scale_group_size=0 if matrix.group == columns else matrix.group,
        has_zero_point=zeros is not None,
        is_fp_zero_point=fractions,
    )
    tensors = {"weight": matrix.numbers, "weight_scale": scales}
    if zeros is not None:
        tensors["zero_point"] = zeros.bfloat16() if fractions else pack(zeros.T).T.contiguous()
    if experts:
        tensors = {name: each.unflatten(0, (experts, -1)) for name, each in tensors.items()}
    device, kind = matrix.numbers.device, "grouped_contiguous" if experts else "dense"
    with torch.cuda.device(device):
        config, found = library.transform.prepare_and_transform_humming_tensors(
            tensors, rows, columns, schema, num_experts=experts, torch_dtype=torch.bfloat16, device=device
        )
        kernels = library.kernel.humming.HummingKernel.prepare_kernels(
            config.to_str(),
            json.dumps({"gemm_type": kind}),
            json.dumps(_choices(config, kind, device)),
            device,
        )
    locks = torch.zeros(_LOCKS, dtype=torch.int32, device=device)
    return Int4Weight(
        found["weight"], found["weight_scale"], found.get("zero_point"), locks, kernels, (rows, columns),
        experts,
    )  # fmt: skip


def _choices(config: Any, kind: str, device: torch.device) -> list[tuple[int, int, dict[str, Any]]]:
    """Layouts of a matrix, each for rows from over the first number to the second."""
    found: list[tuple[int, int, dict[str, Any]]] = []
    counts = _ROWS_OF_EXPERTS if config.num_experts else _ROWS
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    for rows in counts:
        layout = _library().tune.get_heuristics_config(config, rows, gemm_type=kind, device=device)
        if hopper and rows <= _CHAINED_ROWS and not config.num_experts:
            layout = _in_a_chain(
                layout, config, rows, torch.cuda.get_device_properties(device).multi_processor_count
            )
        begin = found[-1][1] if found else 0
        if found and found[-1][2] == layout:
            begin = found.pop()[0]
        found.append((begin, _MOST_ROWS if rows == counts[-1] else rows, layout))
    return found


def _in_a_chain(layout: dict[str, Any], config: Any, rows: int, processors: int) -> dict[str, Any]:
    """The library's layout of few rows as it is faster between the kernels of a decode step on an H100 (in
    docs/benchmarks/gpu.md): chained like them (kernels.launch); for up to 8 rows with tiles twice as deep, or
    without shares in a tile where the tiles occupy most of the device. Not for experts: their kernels read
    bounds before they wait."""
    layout = layout | {"use_pdl": True}
    numbers = config.b_dtype.num_bits, config.weight_scale_group_size
    if rows > 8 or numbers != (4, 128) or tuple(layout["block_shape"]) != (8, 128, 128):
        return layout  # not measured
    wide, deep, each = config.shape_n // 128, config.shape_k // 128, layout["num_ctas_per_sm"]
    if each == 1 and wide * deep >= 1024 and deep % 2 == 0:
        return layout | {"block_shape": (8, 128, 256)}
    whole = each == 2 and 0.8 <= wide / (each * processors) <= 1
    return layout | {"use_stream_k": False} if whole else layout


def product(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, *, bounds: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias` of `x` `[rows, inner]` bfloat16, contiguous: `[rows, width]` bfloat16. Experts
    multiply the rows within their `bounds` (kernels.moe.Permutation); rows after the last are undefined."""
    found: Tensor = _library().ops.launch_kernel(
        configs=weight.kernels, inputs=x, weight=weight.numbers, weight_scale=weight.scales,
        zero_point=weight.zeros, locks=weight.locks, expert_layout=bounds,
    )  # fmt: skip
    return found if bias is None else found.add_(bias)
