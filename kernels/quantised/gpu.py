"""Products with matrices in 4 or 8 bits on a GPU, also of experts, by the kernels of humming-kernels.

The library has its own order of a matrix's numbers, and builds a kernel for each shape and range of rows,
by NVRTC or nvcc, once for a machine (`$HUMMING_CACHE_DIR`, else `~/.humming/cache`). `prepare` does both, so
that a product only launches: a CUDA graph can capture it.

Numbers are widened to bfloat16 and multiplied with scales rounded to it, as are zeros that are no whole
numbers. Programs that share a tile add their parts up in the output, in bfloat16, more than three of them in
the order in which they end: the last bits of
a product may differ from run to run. They take turns by `locks`, which are zeros again at a kernel's end: two
products with one matrix must not run at once.

Fp8 rows on a GPU: a product of the library, and the quantising of rows in Triton.

Norms and SwiGLU write fp8 rows themselves (kernels.elementwise.gpu) through `in_fp8`: a row is in one
program, so its largest magnitude is at hand. `quantise_rows` is for what other kernels make.
Products of few rows are in kernels.gemm.gpu.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import FP8
from kernels.gemm.gpu import begin, ready
from kernels.quantised.ref import Fp8Rows, Int4Groups, pack

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


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """The environment has this variable meanwhile."""
    kept = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if kept is None:
            del os.environ[name]
        else:
            os.environ[name] = kept


def building(workers: int) -> AbstractContextManager[None]:
    """`prepare` builds so many kernels of a matrix at a time meanwhile, if the library's own variable is not
    set; else one on each core."""
    name = "HUMMING_MAX_PARALLEL_BUILD_WORKERS"
    return _variable(name, os.environ.get(name, str(max(1, workers))))


@functools.cache
def _library() -> Any:
    """The library; a wheel has its native parts, so that the import starts no processes to build them.
    Raises ImportError."""
    with _variable("HUMMING_DISABLE_PARALLEL_BUILD", "1"):
        import humming.dtypes
        import humming.kernel.humming
        import humming.ops
        import humming.schema
        import humming.transform
        import humming.tune
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
    docs/benchmarks/gpu.md): chained like them (kernels.gemm.gpu); up to 8 rows with tiles twice as deep, or
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


@triton.jit
def in_fp8(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A row of float32 numbers, zeros past its end, over its scale; and the scale: kernels.quantised.ref."""
    largest = tl.max(tl.abs(value), 0)
    scale = tl.where(largest == 0, 1.0, largest / 448.0)
    return tl.clamp(value * (1.0 / scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL), scale


@triton.jit
def _quantise(
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ready(CHAINED)
    value, scale = in_fp8(tl.load(x + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32))
    tl.store(numbers + row * WIDTH + at, value.to(numbers.dtype.element_ty), mask=at < WIDTH)
    tl.store(scales + row, scale)


def empty_rows(rows: int, width: int, device: torch.device) -> Fp8Rows:
    """Fp8 rows for a kernel to write."""
    return Fp8Rows(
        torch.empty(rows, width, dtype=FP8, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def warps_of(block: int) -> int:
    """Warps of a program with a row of `block` numbers, so that a thread holds 16."""
    return min(32, max(1, block // 512))


def quantise_rows(x: Tensor, *, chained: bool = False) -> Fp8Rows:
    """See kernels.quantised.ref; `x` is contiguous."""
    rows, width = x.shape
    found, block = empty_rows(rows, width, x.device), triton.next_power_of_2(width)
    _quantise[(rows,)](
        x, found.numbers, found.scales, WIDTH=width, BLOCK=block, CHAINED=chained, launch_pdl=chained,
        num_warps=warps_of(block),
    )  # fmt: skip
    return found


def scaled_mm(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, `[rows, width]` bfloat16. Both sizes of the weight must be multiples of 16."""
    return torch._scaled_mm(
        x.numbers, weight.numbers.T, scale_a=x.scales[:, None], scale_b=weight.scales[None, :], bias=bias,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
