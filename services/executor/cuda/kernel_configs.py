"""Kernel layouts of each device, measured once and checked in; the CUDA engine never tunes while it serves.

A device that is not listed uses the defaults and the library's matrix products. The method:
docs/benchmarks/gpu.md.

`row_by_row` derives the layouts of deterministic mode, in which a row's bits do not depend on the rest of its
step: every product and query has one order of summation for any number of rows and any chunks of a prompt.

`choices` has the kernel of each operation of an engine, and why a faster one does not run: the executor
logs it, and `headrace doctor` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kernels.attention.decode import Tuning as DecodeTuning
from kernels.attention.prefill import PrefillTuning, why_not_tma
from kernels.gemm.gpu import FixedTuning, MatmulTuning

# Layouts of deterministic products, the largest tiles first: they fit into 99 KiB of shared memory.
_FIXED = (FixedTuning(128, 128, 32, 4, 8), FixedTuning(64, 64, 64, 4, 4), FixedTuning(64, 32, 64, 4, 4))

# By weight [width, inner]: layouts that are faster than the library up to so many rows.
_ByRows = tuple[tuple[int, MatmulTuning], ...]
_Products = Mapping[tuple[int, int], _ByRows]


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of a step. `chained`: a kernel starts before the one before has ended, see
    kernels.gemm.gpu."""

    decode: DecodeTuning = field(default_factory=DecodeTuning)
    decode_fp8: DecodeTuning | None = None  # over KV in fp8; None: as over bf16
    products: _Products = field(default_factory=dict)
    chained: bool = False
    fp8: _Products = field(default_factory=dict)  # of weights in fp8

    def product(self, width: int, inner: int, rows: int, *, fp8: bool = False) -> MatmulTuning | None:
        """The layout of a product of so many rows; None: use the library."""
        products = self.fp8 if fp8 else self.products
        for limit, tuning in products.get((width, inner), ()):
            if rows <= limit:
                return tuning
        return None


@dataclass(frozen=True, slots=True)
class DeviceTuning:
    """The layouts of one device. Launches limit steps of up to `few_rows` tokens, work limits longer ones.
    Steps of up to `fewest_rows` may have layouts of their own."""

    few: Layouts = field(default_factory=Layouts)
    many: Layouts = field(default_factory=Layouts)
    few_rows: int = 32
    fewest: Layouts | None = None
    fewest_rows: int = 0
    prefill: PrefillTuning = field(default_factory=PrefillTuning)
    prefill_tma: PrefillTuning | None = None  # see with_tma
    fixed: tuple[FixedTuning, ...] = _FIXED
    by_row: bool = False  # see row_by_row

    def layouts_of(self, tokens: int) -> Layouts:
        if self.fewest is not None and tokens <= self.fewest_rows:
            return self.fewest
        return self.few if tokens <= self.few_rows else self.many

    def all(self) -> tuple[Layouts, ...]:
        return (self.few, self.many) if self.fewest is None else (self.fewest, self.few, self.many)

    def changed(self, change: Callable[[Layouts], Layouts]) -> DeviceTuning:
        """With each of the layouts of steps as `change` makes it."""
        fewest = None if self.fewest is None else change(self.fewest)
        return replace(self, few=change(self.few), many=change(self.many), fewest=fewest)


_NARROW = Layouts(decode=DecodeTuning(32, 2, 3, 4))
WIDE = DeviceTuning(  # float32: room for half the tile
    _NARROW, _NARROW, prefill=PrefillTuning(32, 32, 2, 4), fixed=(FixedTuning(32, 32, 32, 2, 4),)
)

# For weights in fp8; docs/benchmarks/gpu.md has the figures.
_FEW_FP8 = {
    (6144, 4096): ((32, MatmulTuning(64, 128, 4, 6, ahead=256, chained=True)),),
    (4096, 4096): ((32, MatmulTuning(64, 256, 2, 6, ahead=256, chained=True)),),
    (28672, 4096): (
        (16, MatmulTuning(64, 256, 1, 4, ahead=256, gated=True, chained=True)),
        (32, MatmulTuning(128, 128, 1, 4, ahead=256, gated=True, chained=True)),
    ),
    (4096, 14336): ((32, MatmulTuning(64, 256, 4, 4, ahead=256, chained=True)),),
}
_MANY_FP8 = {
    (6144, 4096): ((64, MatmulTuning(64, 128, 2, 6)),),
    (4096, 4096): ((128, MatmulTuning(64, 128, 2, 6)), (256, MatmulTuning(64, 128, 2, 4))),
    (28672, 4096): ((64, MatmulTuning(128, 128, 1, 4)),),
    (4096, 14336): ((128, MatmulTuning(64, 256, 2, 4)),),
}

_FEW = Layouts(
    decode=DecodeTuning(64, 2, 7, 4, chained=True),
    decode_fp8=DecodeTuning(128, 2, 7, 4, chained=True),
    products={
        (6144, 4096): ((32, MatmulTuning(64, 64, 2, 6, chained=True)),),
        (4096, 4096): (
            (16, MatmulTuning(64, 64, 4, 6, chained=True)),
            (32, MatmulTuning(64, 128, 2, 4, chained=True)),
        ),
        (28672, 4096): ((32, MatmulTuning(64, 128, 1, 4, gated=True, chained=True)),),
        (4096, 14336): (
            (16, MatmulTuning(64, 128, 4, 4, chained=True)),
            (32, MatmulTuning(64, 128, 2, 6, chained=True)),
        ),
    },
    chained=True,
    fp8=_FEW_FP8,
)
_H200 = DeviceTuning(
    few=_FEW,
    many=Layouts(
        decode=DecodeTuning(64, 2, 5, 4),
        decode_fp8=DecodeTuning(128, 3, 5, 4, chained=True),
        products={
            (4096, 4096): ((128, MatmulTuning(64, 128, 2, 4)),),
            (4096, 14336): ((64, MatmulTuning(64, 128, 2, 6)), (128, MatmulTuning(64, 128, 2, 4))),
        },
        fp8=_MANY_FP8,
    ),
    fewest=replace(_FEW, decode=DecodeTuning(128, 1, 5, 4, chained=True)),
    fewest_rows=16,
    prefill=PrefillTuning(128, 64, 5, 8, per_sm=1),
    prefill_tma=PrefillTuning(128, 128, 2, per_sm=1, tma=True),
    fixed=(
        FixedTuning(128, 256, 64, 3, 8),
        FixedTuning(128, 128, 64, 4, 8),
        FixedTuning(64, 64, 128, 4, 4),
        FixedTuning(64, 32, 128, 4, 4),
    ),
)


def _one_each(tile: int, splits: int = 1, ahead: int = 0, *, gated: bool = False) -> _ByRows:
    """Layouts for a rank's part of a weight, with so many stages that a processor has memory for one program
    only. Otherwise the first free processors would get two programs of a chained kernel, and others none."""

    def of(stages: int) -> MatmulTuning:
        return MatmulTuning(tile, 64, splits, stages, ahead=ahead, gated=gated, chained=True)

    return (16, of(12)), (32, of(10)), (64, of(8))


# With several ranks: launches and the other ranks limit short steps.
_SHARED_H200 = replace(
    _H200,
    few=Layouts(
        decode=DecodeTuning(128, 1, 5, 4, chained=True),
        products={
            (1536, 4096): _one_each(64, 4, 512),  # a quarter of qkv, out, gate and up, down
            (4096, 1024): _one_each(64, 2, 512),
            (7168, 4096): _one_each(64, 1, 512, gated=True),
            (4096, 3584): _one_each(64, 2, 128),
            (3072, 4096): _one_each(64, 2, 512),  # a half of each
            (4096, 2048): _one_each(64, 2, 512),
            (14336, 4096): _one_each(128, 1, 512, gated=True),
            (4096, 7168): _one_each(64, 2, 128),
        },
        chained=True,
    ),
    few_rows=256,
    fewest=None,
)
# An H100 has the same processors and slower memory. These products of few rows beat its library by 7 %.
_H100 = replace(_H200, many=replace(_H200.many, decode_fp8=DecodeTuning(64, 3, 5, 4)))
_BY_NAME = {
    "NVIDIA H200": (_H200, _SHARED_H200),
    "NVIDIA H100 80GB HBM3": (_H100, replace(_SHARED_H200, many=_H100.many)),
}


def device_tuning(name: str, ranks: int = 1) -> DeviceTuning:
    """The layouts for the device of this name, with `ranks` devices for one model."""
    if name not in _BY_NAME:
        return DeviceTuning()
    alone, shared = _BY_NAME[name]
    return alone if ranks == 1 else shared


def with_tma(tuning: DeviceTuning, head_dim: int, block_tokens: int) -> DeviceTuning:
    """Layouts for activations in bf16: with the prefill kernel of kernels.attention.hopper where the
    device has it and it takes these shapes."""
    if tuning.prefill_tma is None or why_not_tma(head_dim, block_tokens):
        return tuning
    return replace(tuning, prefill=tuning.prefill_tma)


def for_fp8_kv(tuning: DeviceTuning) -> DeviceTuning:
    """Layouts for KV in fp8: a tile of it has half the bytes."""
    return tuning.changed(lambda own: replace(own, decode=own.decode_fp8 or own.decode))


def for_large_heads(tuning: DeviceTuning) -> DeviceTuning:
    """Layouts for heads over 128 wide: their tiles in bf16 are as large as float32 tiles of narrow heads, so
    the tiles of float32 are used."""
    tiles = tuning.changed(lambda own: replace(own, decode=WIDE.few.decode))
    return replace(tiles, prefill=WIDE.prefill)


def row_by_row(tuning: DeviceTuning) -> DeviceTuning:
    """The layouts of deterministic mode for the same device: products with fixed tiles instead of the
    library, each decode attended as a chunk of one token, and one loop over all KV."""
    plain = Layouts(decode=tuning.many.decode)
    prefill = replace(tuning.prefill, one_loop=True)
    return replace(tuning, few=plain, many=plain, fewest=None, prefill=prefill, by_row=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What an engine computes on a GPU, as far as it decides the kernels."""

    device: str  # the name of the GPU
    head_dim: int
    block_tokens: int
    ranks: int = 1
    wide: bool = False  # activations in float32
    fp8_kv: bool = False
    deterministic: bool = False
    kept_in: str = ""  # the weights of products: fp8, int4; else as activations
    options: bool = False  # the model computes something beside Llama's, perhaps in attention


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of an operation. `faster`: what would be faster, and why it does not run; empty: nothing."""

    operation: str
    kernel: str
    faster: str = ""

    def __str__(self) -> str:
        return f"{self.operation}: {self.kernel}" + (f"; faster: {self.faster}" if self.faster else "")


def tuning_for(computed: Computed) -> DeviceTuning:
    """The layouts of an engine."""
    tuning = WIDE if computed.wide else device_tuning(computed.device, computed.ranks)
    if computed.fp8_kv:
        tuning = for_fp8_kv(tuning)
    if computed.head_dim > 128:
        tuning = for_large_heads(tuning)
    if computed.deterministic:
        return row_by_row(tuning)
    return (
        tuning
        if computed.wide or computed.options
        else with_tma(tuning, computed.head_dim, computed.block_tokens)
    )


def choices(computed: Computed) -> tuple[Choice, ...]:
    """The kernel of each operation of an engine."""
    prompts, why = "Triton, any GPU", ""
    if tuning_for(computed).prefill.tma:
        prompts = "Gluon, K and V by TMA"
    elif device_tuning(computed.device).prefill_tma is not None:
        unfit = why_not_tma(computed.head_dim, computed.block_tokens)
        if computed.deterministic:
            unfit = "not in deterministic mode"
        elif computed.wide:
            unfit = "only with activations in bf16 (--dtype bf16)"
        elif computed.options:
            unfit = "it knows no windows, caps or sinks"
        why = f"Gluon, K and V by TMA: {unfit}"
    named = computed.device in _BY_NAME
    library = "the library's"
    if computed.kept_in == "int4":
        products = "humming-kernels"
    elif computed.deterministic:
        products = "Triton, one order of summation"
    else:
        products = f"Triton for few rows, else {library}" if named and not computed.wide else library
    untuned = "" if named or computed.wide else f"layouts of its own: none is measured on {computed.device}"
    one = "Triton, a decode as a chunk of one token" if computed.deterministic else "Triton"
    return (
        Choice("attention of prompts", prompts, why),
        Choice("attention of decodes", one, untuned),
        Choice("products", products, untuned if products == library else ""),
        Choice("sampling", "Triton"),
    )
