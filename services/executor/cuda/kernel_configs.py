"""How kernels are laid out on each device: measured once, checked in, never searched for while serving.

A device that is not listed gets the defaults and the library's matrix products. How they were found:
docs/benchmarks/gpu.md.

`row_by_row` makes of a device's layouts those in which a row's bits do not depend on the rest of its step:
one order of adding up for every product and every query, whatever the number of rows and the prompt's cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kernels.attention.decode import Tuning as DecodeTuning
from kernels.attention.prefill import PrefillTuning
from kernels.gemm.gpu import FixedTuning, MatmulTuning

# Of products in which no row sees the others, the largest tiles first: they fit in 99 KiB of shared memory.
_FIXED = (FixedTuning(128, 128, 32, 4, 8), FixedTuning(64, 64, 64, 4, 4), FixedTuning(64, 32, 64, 4, 4))

# Of a weight [width, inner]: up to so many rows this layout heartbeats the library.
_ByRows = tuple[tuple[int, MatmulTuning], ...]
_Products = Mapping[tuple[int, int], _ByRows]


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of a step. `chained`: kernels start under the ones before, see kernels.launch."""

    decode: DecodeTuning = field(default_factory=DecodeTuning)
    products: _Products = field(default_factory=dict)
    chained: bool = False

    def product(self, width: int, inner: int, rows: int) -> MatmulTuning | None:
        """The layout of a product of so many rows; None: the library's."""
        for limit, tuning in self.products.get((width, inner), ()):
            if rows <= limit:
                return tuning
        return None


@dataclass(frozen=True, slots=True)
class DeviceTuning:
    """The layouts of one device: steps of up to `few_rows` tokens wait for launches, longer ones for work."""

    few: Layouts = field(default_factory=Layouts)
    many: Layouts = field(default_factory=Layouts)
    few_rows: int = 32
    prefill: PrefillTuning = field(default_factory=PrefillTuning)
    fixed: tuple[FixedTuning, ...] = _FIXED
    by_row: bool = False  # see row_by_row

    def of(self, tokens: int) -> Layouts:
        """The layouts of a step of so many tokens."""
        return self.few if tokens <= self.few_rows else self.many


_NARROW = Layouts(decode=DecodeTuning(32, 2, 3, 4))
WIDE = DeviceTuning(  # float32: room for half the tile
    _NARROW, _NARROW, prefill=PrefillTuning(32, 32, 2, 4), fixed=(FixedTuning(32, 32, 32, 2, 4),)
)

_H200 = DeviceTuning(
    few=Layouts(
        decode=DecodeTuning(64, 2, 7, 4, chained=True),
        products={
            (6144, 4096): ((32, MatmulTuning(64, 64, 2, 6, chained=True)),),
            (4096, 4096): (
                (16, MatmulTuning(64, 64, 4, 6, chained=True)),
                (32, MatmulTuning(64, 128, 2, 4, chained=True)),
            ),
            (28672, 4096): ((32, MatmulTuning(64, 128, 1, 4, chained=True)),),
            (4096, 14336): (
                (16, MatmulTuning(64, 128, 4, 4, chained=True)),
                (32, MatmulTuning(64, 128, 2, 6, chained=True)),
            ),
        },
        chained=True,
    ),
    many=Layouts(
        decode=DecodeTuning(64, 2, 5, 4),
        products={
            (4096, 4096): ((128, MatmulTuning(64, 128, 2, 4)),),
            (4096, 14336): ((64, MatmulTuning(64, 128, 2, 6)), (128, MatmulTuning(64, 128, 2, 4))),
        },
    ),
    prefill=PrefillTuning(128, 64, 5, 8, per_sm=1),
    fixed=(
        FixedTuning(128, 256, 64, 3, 8),
        FixedTuning(128, 128, 64, 4, 8),
        FixedTuning(64, 64, 128, 4, 4),
        FixedTuning(64, 32, 128, 4, 4),
    ),
)


def _one_each(tile: int, splits: int = 1, ahead: int = 0, *, gated: bool = False) -> _ByRows:
    """Layouts of a part of a weight, of so many stages that a processor has memory for one program. Of a
    kernel that starts under the one before, the processors free first would get two, and others none."""

    def of(stages: int) -> MatmulTuning:
        return MatmulTuning(tile, 64, splits, stages, ahead=ahead, gated=gated, chained=True)

    return (16, of(12)), (32, of(10)), (64, of(8))


_SHARED_H200 = (
    replace(  # by ranks of one host: in short steps everything waits for launches and for the others
        _H200,
        few=Layouts(
            decode=DecodeTuning(128, 1, 5, 4, chained=True),
            products={
                (1536, 4096): _one_each(64, 4, 512),  # a quarter of qkv, out, gate and up, down
                (4096, 1024): _one_each(64, 2, 512),
                (7168, 4096): _one_each(64, 1, 512, gated=True),
                (4096, 3584): _one_each(64, 2, 128),
                (3072, 4096): _one_each(64, 2, 512),  # a half of them
                (4096, 2048): _one_each(64, 2, 512),
                (14336, 4096): _one_each(128, 1, 512, gated=True),
                (4096, 7168): _one_each(64, 2, 128),
            },
            chained=True,
        ),
        few_rows=256,
    )
)
_BY_NAME = {"NVIDIA H200": (_H200, _SHARED_H200)}


def device_tuning(name: str, ranks: int = 1) -> DeviceTuning:
    """The layouts for the device that calls itself `name`, one of so many that compute a model together."""
    if name not in _BY_NAME:
        return DeviceTuning()
    alone, shared = _BY_NAME[name]
    return alone if ranks == 1 else shared


def for_large_heads(tuning: DeviceTuning) -> DeviceTuning:
    """Of heads over 128 wide a tile in two bytes takes the room of one in float32: those tiles, then."""
    few, many = (replace(layouts, decode=WIDE.few.decode) for layouts in (tuning.few, tuning.many))
    return replace(tuning, few=few, many=many, prefill=WIDE.prefill)


def row_by_row(tuning: DeviceTuning) -> DeviceTuning:
    """Layouts in which a row's bits do not depend on the rest of its step, for the same device: products with
    fixed tiles for the library's, every decode attended as a chunk of one token, all KV through one loop."""
    plain = Layouts(decode=tuning.many.decode)
    prefill = replace(tuning.prefill, one_loop=True)
    return replace(tuning, few=plain, many=plain, prefill=prefill, by_row=True)
