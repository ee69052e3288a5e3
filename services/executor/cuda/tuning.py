"""How kernels are laid out on each device: measured once, checked in, never searched for while serving.

A device that is not listed gets the defaults and the library's matrix products. How they were found:
docs/benchmarks/gpu.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernels.matmul.gpu import MatmulTuning
from kernels.paged_attention.decode import Tuning as DecodeTuning
from kernels.paged_attention.prefill import PrefillTuning

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

    def of(self, tokens: int) -> Layouts:
        """The layouts of a step of so many tokens."""
        return self.few if tokens <= self.few_rows else self.many


_NARROW = Layouts(decode=DecodeTuning(32, 2, 3, 4))
WIDE = DeviceTuning(_NARROW, _NARROW, prefill=PrefillTuning(32, 32, 2, 4))  # float32: room for half the tile

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
)
_BY_NAME = {"NVIDIA H200": _H200}


def device_tuning(name: str) -> DeviceTuning:
    """The layouts for the device that calls itself `name`."""
    return _BY_NAME.get(name, DeviceTuning())
