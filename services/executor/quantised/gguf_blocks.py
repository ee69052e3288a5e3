"""`InBlocks`: matrices of a GGUF file that stay in the file's blocks; products multiply with them as they are
(kernels/cpu_jit/block_weights.py).

`blocks_of` only moves bits: numbers stay as they are in the file. So do scales, but for K-quants, whose scale
of 32 or 16 columns is the product of two numbers, rounded to float16. Layouts: ggml-common.h of llama.cpp.
The gguf library's NumPy code is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu_jit.block_microkernel import Format
from kernels.cpu_jit.block_weights import FORMATS, Blocks
from kernels.quantised import Int4Groups, pack
from services.executor.checkpoint.stored import Cut, Dense, Stored
from services.executor.model.description import Part
from services.executor.quantised.gguf_values import FAST, FileMatrix, RowsInFile, dequantize
from services.executor.quantised.int4 import ScaledInt4, can_multiply
from shared.errors import SetupError

_CPU = torch.device("cpu")
_NIBBLES, _NIBBLES_MINIMUM, _BYTES, _BYTES_MINIMUM, _BYTES_16, _ = FORMATS

# Raw blocks [n, bytes] to numbers [n, columns], scales and minima [n, of a block].
_Read = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]


def _halves(raw: Tensor, start: int, count: int = 1) -> Tensor:
    return raw[:, start : start + 2 * count].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Bytes `[..., n]` to `[..., 2 * n]`: the lower halves, then the upper ones."""
    packed = packed.contiguous()  # with gaps between blocks the operations below take four times as long
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """32 bits in four bytes, as 16 or 0."""
    places = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw[..., None] >> places & 1) << 4).flatten(1)


def _q4_0(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    return _nibbles(raw[:, 2:]), _halves(raw, 0), None


def _q4_1(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(raw[:, 4:]), _halves(raw, 0), _halves(raw, 2)


def _q5_0(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    numbers = _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])
    return numbers + (_BYTES.offset - 16), _halves(raw, 0), None


def _q5_1(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), _halves(raw, 0), _halves(raw, 2)


def _q8_0(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    numbers = (
        raw[:, 2:].clone(memory_format=torch.contiguous_format).bitwise_xor_(0x80)
    )  # a signed byte with 128 added
    return numbers, _halves(raw, 0), None


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the 8 parts of a block of 256: 6 bits each in 12 bytes, times a float16 each."""
    low, middle, high = torch.split(raw[:, 4:16], 4, 1)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), 1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), 1)
    both = _halves(raw, 0).float() * scales, _halves(raw, 2).float() * -minima.float()
    return both[0].half(), both[1].half()


def _q4_k(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (_nibbles(raw[:, 16:].reshape(-1, 4, 32)).flatten(1), *_k_scales(raw))


def _q5_k(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).flatten(1)
    places = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    high = (raw[:, None, 16:48] >> places & 1).flatten(1)
    return (low | high << 4, *_k_scales(raw))


def _q6_k(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).flatten(1)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    high = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> places & 3).flatten(1)
    scales = _halves(raw, 208).float() * raw[:, 192:208].view(torch.int8)
    return (low | high << 4) + (_BYTES_16.offset - 32), scales.half(), None


_KINDS: dict[GgmlType, tuple[Format, _Read]] = {
    GgmlType.Q4_0: (_NIBBLES, _q4_0),
    GgmlType.Q4_1: (_NIBBLES_MINIMUM, _q4_1),
    GgmlType.Q5_0: (_BYTES, _q5_0),
    GgmlType.Q5_1: (_BYTES_MINIMUM, _q5_1),
    GgmlType.Q8_0: (_BYTES, _q8_0),
    GgmlType.Q4_K: (_NIBBLES_MINIMUM, _q4_k),
    GgmlType.Q5_K: (_BYTES_MINIMUM, _q5_k),
    GgmlType.Q6_K: (_BYTES_16, _q6_k),
}


def can_stay_in_blocks(kind: GgmlType) -> bool:
    """Whether `blocks_of` can read a type."""
    return kind in _KINDS


def blocks_of(raw: NDArray[np.uint8], kind: GgmlType, device: torch.device = _CPU) -> Blocks:
    """A matrix `[rows, columns]` of a file from `[rows, bytes]`, in the memory of `device`. Raises KeyError
    for another type."""
    format_, read = _KINDS[kind]
    found = read(torch.from_numpy(raw.reshape(-1, GGML_QUANT_SIZES[kind][1]).copy()).to(device))
    numbers, scales, minima = (None if each is None else each.reshape(len(raw), -1) for each in found)
    assert numbers is not None and scales is not None  # noqa: PT018
    return Blocks(format_, numbers, scales, minima)


@dataclass(frozen=True, slots=True)
class InBlocks(Stored):
    """See services.executor.checkpoint.stored.Stored. Matrices in the blocks of a file, below each other,
    each as its bytes `[rows, bytes]` and its type; nothing is copied until a product packs them."""

    matrices: tuple[tuple[NDArray[np.uint8], GgmlType], ...]
    dtype: torch.dtype = torch.float32  # of `values`
    place: FileMatrix | None = None  # of a whole matrix, as it is in a file

    @classmethod
    def of(
        cls, raw: NDArray[np.uint8], kind: GgmlType, rows: int, place: FileMatrix | None = None
    ) -> InBlocks:
        return cls(((raw.reshape(rows, -1), kind),), place=place)

    @property
    def shape(self) -> tuple[int, ...]:
        raw, kind = self.matrices[0]
        columns, size = GGML_QUANT_SIZES[kind]
        return sum(len(each) for each, _ in self.matrices), raw.shape[1] // size * columns

    @property
    def values(self) -> Tensor:
        columns = self.shape[1]
        found = [
            dequantize(raw, kind, (len(raw), columns)) if kind in FAST else blocks_of(raw, kind).values()
            for raw, kind in self.matrices
        ]
        return (found[0] if len(found) == 1 else torch.cat(found)).to(self.dtype)

    @property
    def data(self) -> tuple[Tensor, ...]:
        return (torch.from_numpy(np.concatenate([raw.reshape(-1) for raw, _ in self.matrices])),)

    @property
    def size_bytes(self) -> int:
        return sum(raw.nbytes for raw, _ in self.matrices)

    def blocks(self) -> list[Blocks]:
        """The matrices."""
        return [blocks_of(raw, kind) for raw, kind in self.matrices]

    def rows(self, order: Tensor) -> InBlocks:
        """See Stored. There must be one matrix."""
        ((raw, kind),) = self.matrices
        return replace(self, matrices=((raw[order.numpy()], kind),), place=None)

    def cut(self, cut: Cut) -> InBlocks:
        """See Stored. There must be one matrix. Raises SetupError for columns within a block."""
        ((raw, kind),) = self.matrices
        if cut.dim == 0:
            return replace(self, matrices=((raw[cut.begin : cut.end], kind),), place=None)
        columns, size = GGML_QUANT_SIZES[kind]
        if cut.begin % columns or cut.end % columns:
            raise SetupError(
                f"ranks cannot share columns of {kind.name} at {cut.begin} and {cut.end}: its blocks have "
                f"{columns}; use a dtype other than packed and int4, fewer ranks, or stages (cpu/pp2)"
            )
        part = raw[:, cut.begin // columns * size : cut.end // columns * size]
        return replace(self, matrices=((part, kind),), place=None)

    def join(self, below: Sequence[Stored]) -> Stored:
        """See Stored. Plain numbers if one of them is plain."""
        found = list(self.matrices)
        for each in below:
            if not isinstance(each, InBlocks):
                return Dense.of(self.values).join(below)
            found += each.matrices
        return replace(self, matrices=tuple(found), place=None if below else self.place)

    def loaded(self, dtype: torch.dtype, device: torch.device) -> Stored:
        return replace(self, dtype=dtype)

    def for_rows(self) -> Stored:
        """See Stored."""
        if (place := self.place) is None:
            return self
        return RowsInFile.of(place, self.dtype, lambda raw: InBlocks(((raw, place.kind),)).values)


def part_in_groups(part: Part, stored: Stored, dtype: torch.dtype, device: torch.device) -> Stored:
    """`int4.part_in_int4` of a GGUF file: the numbers of its blocks, in 4 or 8 bits, for the products of a
    GPU. Raises SetupError for damaged scales."""
    if not isinstance(stored, InBlocks):
        return stored.loaded(dtype, device)
    if not can_multiply(part, stored):
        return Dense.of(stored.values).loaded(dtype, device)
    ((raw, kind),) = stored.matrices
    found = _groups_of(blocks_of(raw, kind, device))
    if not all(each.isfinite().all() for each in (found.scales, found.all_zeros())):
        raise SetupError(
            f"a matrix {part.name} of the model has scales that are not finite: fetch the model again"
        )
    return ScaledInt4(found, dtype)


def _groups_of(found: Blocks) -> Int4Groups:
    """The same elements: `scale * number + minimum` is `scale * (number - zero)` with a zero between two
    numbers. Where the scale is 0 they are all the minimum, 1 times it."""
    bits, scales = found.format.bits, found.scales
    if found.minima is None:
        return Int4Groups(pack(found.numbers, bits), scales, None, bits)
    scales, minima = scales.float(), found.minima.float()
    alike = scales == 0
    zeros = torch.where(alike, 0.0, -minima / scales)
    numbers = torch.where(alike.repeat_interleave(found.format.columns, 1), 1, found.numbers)
    return Int4Groups(pack(numbers, bits), torch.where(alike, minima, scales), zeros, bits)
