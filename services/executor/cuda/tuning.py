"""How kernels are laid out on each device: measured once, checked in, never searched for while serving.

A device that is not listed gets the defaults and the library's matrix products. How they were found:
docs/benchmarks/gpu.md.

`row_by_row` makes of a device's layouts those in which a row's bits do not depend on the rest of its step:
one order of adding up for every product and every query, whatever the number of rows and the prompt's cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kernels.matmul.fixed import FixedTuning
from kernels.matmul.gpu import MatmulTuning
from kernels.paged_attention.decode import Tuning as DecodeTuning
from kernels.paged_attention.prefill import PrefillTuning

# Of products in which no row sees the others, the largest tiles first: they fit in 99 KiB of shared memory.
_FIXED = (FixedTuning(128, 128, 32, 4, 8), FixedTuning(64, 64, 64, 4, 4), FixedTuning(64, 32, 64, 4, 4))

# Of a weight [width, inner]: up to so many rows this layout beats the library.
_Products = Mapping[tuple[int, int], tuple[tuple[int, MatmulTuning], ...]]


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
_BY_NAME = {"NVIDIA H200": _H200}


def device_tuning(name: str) -> DeviceTuning:
    """The layouts for the device that calls itself `name`."""
    return _BY_NAME.get(name, DeviceTuning())


def row_by_row(tuning: DeviceTuning) -> DeviceTuning:
    """Layouts in which a row's bits do not depend on the rest of its step, for the same device: products with
    fixed tiles for the library's, every decode attended as a chunk of one token, all KV through one loop."""
    plain = Layouts(decode=tuning.many.decode)
    prefill = replace(tuning.prefill, one_loop=True)
    return replace(tuning, few=plain, many=plain, prefill=prefill, by_row=True)
