"""Weights in 4 bits: from checkpoints of AWQ, GPTQ and compressed-tensors (`pack-quantized`, and MXFP4 as
`mxfp4-pack-quantized`); those of a GGUF file (gguf_blocks.py) are in memory so, too, also in 8 bits.

    in a file    `InInt4`: numbers, scales and zero points in the layout of its authors
    in memory    `ScaledInt4`: kernels.quantised.Int4Groups, which products take on a GPU (`--dtype int4`),
                 and in blocks of 32 columns on a CPU (`--dtype packed`)

The projections of attention, of MLPs and of experts are in 4 bits; embedding, norms, biases, router and head
stay plain.
With any other dtype the matrices are dequantised at load. Layouts, as their libraries write them:

    awq                 qweight [in, out / 8]   scales [in / group, out]   qzeros [in / group, out / 8]
    gptq                qweight [in / 8, out]   the same                   the same, and g_idx [in]
    compressed-tensors  weight_packed [out, in / 8]   weight_scale [out, in / group]
                        weight_zero_point [out / 8, in / group]   weight_shape [2]
    mxfp4               weight_packed [out, in / 2]   weight_scale [out, in / 32], of bytes

Eight numbers lie in an int32, the first in the lowest bits; AWQ has them in the order 0 2 4 6 1 3 5 7. GPTQ
stores a zero point less one, in `checkpoint_format` gptq; compressed-tensors adds 8 to numbers and zero
points. Those of MXFP4 are floating point numbers (e2m1), the first of two in the lower half of a byte; its
scale is the exponent of a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.quantised import Int4Groups, dequantise, pack, quantise_groups, unpack, widen_e2m1
from kernels.quantised.ref import IN_WORD, MIDDLE
from services.executor.checkpoint.stored import Cut, Dense, Scheme, Stored, in_memory
from services.executor.model.description import EXPERTS, HEADS, KV_HEADS, WIDTH, Part
from shared.errors import SetupError

if TYPE_CHECKING:
    from kernels.cpu_jit.block_weights import Blocks

LEAST_CAPABILITY = (8, 0)  # matrix instructions in bf16
GROUPS = (32, 64, 128)  # columns, of products; or a whole row
DUMMY_GROUP = 128  # of random weights; what most checkpoints have
_MULTIPLE = 128  # of both sizes of a weight, for the tiles of the product
_BLOCK = 32  # columns with a scale, in the products of a CPU
_MXFP4_GROUP = 32
_LESS_ONE = 0x11111111  # added to a word, it adds one to each of its numbers
_ALL_MIDDLE = 0x88888888 - (1 << 32)  # a word with MIDDLE in each of its numbers

# Where number i lies in a word.
_IN_ORDER = tuple(range(IN_WORD))
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Packed:
    """Numbers of 4 bits `[rows, columns]` in a tensor of int32 in a file: eight along `dim` of that tensor,
    which is `[columns, rows]` if `turned`. `added` goes to each word first."""

    words: Dense
    dim: int
    turned: bool = False
    order: tuple[int, ...] = _IN_ORDER
    added: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = [*self.words.shape]
        sizes[self.dim] *= IN_WORD
        return tuple(reversed(sizes) if self.turned else sizes)

    def read(self, rows: range, columns: range, device: torch.device) -> Tensor:
        """A part, uint8."""
        along = (columns, rows) if self.turned else (rows, columns)
        words: Stored = self.words
        for dim, part in enumerate(along):
            size = IN_WORD if dim == self.dim else 1
            words = words.cut(Cut(dim, part.start // size, -(-part.stop // size)))
        found = unpack(words.values.to(device).transpose(self.dim, 1) + self.added)
        if self.order != _IN_ORDER:
            found = found.reshape(len(found), -1, IN_WORD)[..., list(self.order)].flatten(1)
        skipped = along[self.dim].start % IN_WORD
        found = found[:, skipped : skipped + len(along[self.dim])].transpose(self.dim, 1)
        return found.T if self.turned else found


@dataclass(frozen=True, slots=True)
class InInt4(Stored):
    """See Stored. A matrix in a file. `scales` is `[groups, rows]` if the numbers are turned, else `[rows,
    groups]`; `zeros` None: 8; `of_columns`: the group of each column, if they are not in order; `symmetric`:
    zeros must be 8; `e2m1`: see Int4Groups. `name` is for errors."""

    name: str
    numbers: Packed
    scales: Dense
    zeros: Packed | None
    group: int
    ranges: tuple[range, range]
    of_columns: Tensor | None = None
    symmetric: bool = False
    e2m1: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))

    @property
    def values(self) -> Tensor:
        return self._values(torch.device("cpu"))

    @property
    def data(self) -> tuple[Tensor, ...]:
        zeros = () if self.zeros is None else (self.zeros.words.values,)
        return (self.numbers.words.values, self.scales.values, *zeros)

    def cut(self, cut: Cut) -> InInt4:
        ranges = [*self.ranges]
        ranges[cut.dim] = ranges[cut.dim][cut.begin : cut.end]
        return replace(self, ranges=(ranges[0], ranges[1]))

    def loaded(self, dtype: torch.dtype, device: torch.device) -> Dense:
        return Dense.of(self._values(device).to(dtype))

    def unfit(self) -> str:
        """Why products cannot read it in groups; empty if they can."""
        columns, whole = self.ranges[1], self.group == self.numbers.shape[1]
        if self.of_columns is not None:
            return "has its columns in the order of activations (desc_act, g_idx)"
        if self.group not in GROUPS and not whole:
            sizes = ", ".join(map(str, GROUPS))
            return f"has groups of {self.group} columns, where products take {sizes} or a row"
        if not whole and (columns.start % self.group or columns.stop % self.group):
            return (
                f"would be cut within a group of {self.group} columns, at {columns.start} and "
                f"{columns.stop}, by so many ranks"
            )
        return ""

    def in_int4(self, dtype: torch.dtype, device: torch.device) -> ScaledInt4:
        """For products. Raises SetupError for an unfit matrix."""
        if why := self.unfit():
            raise SetupError(
                f"tensor {self.name!r} {why}: dtype int4 cannot compute this; use dtype fp8 or bf16, which "
                "dequantise it at load"
            )
        rows, columns = self.ranges
        whole = self.group == self.numbers.shape[1]
        groups = range(1) if whole else range(columns.start // self.group, columns.stop // self.group)
        scales, zeros = self._of_groups(rows, groups, device)
        numbers = pack(self.numbers.read(rows, columns, device))
        if zeros is not None:
            zeros = zeros.contiguous()
        return ScaledInt4(Int4Groups(numbers, scales.contiguous(), zeros, e2m1=self.e2m1), dtype)

    def _of_groups(self, rows: range, groups: range, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points `[rows, groups]`; None: all are 8. Raises SetupError for scales that are not
        finite."""
        along = (groups, rows) if self.numbers.turned else (rows, groups)
        part: Stored = self.scales
        for dim, each in enumerate(along):
            part = part.cut(Cut(dim, each.start, each.stop))
        scales = in_memory(part.values, device)
        if not scales.isfinite().all():
            raise SetupError(f"the scales of tensor {self.name!r} are not finite: damaged; fetch it again")
        zeros = None if self.zeros is None else self.zeros.read(rows, groups, device)
        if zeros is not None and (zeros == MIDDLE).all():
            zeros = None
        elif zeros is not None and self.symmetric:
            raise SetupError(
                f"tensor {self.name!r} has zero points other than 8, but quantization_config sets sym: sym "
                "or checkpoint_format in config.json is not this checkpoint's; fetch the model again"
            )
        return scales.T if self.numbers.turned else scales, zeros

    def _values(self, device: torch.device) -> Tensor:
        rows, columns = self.ranges
        if self.of_columns is not None:
            of_columns = self.of_columns[columns.start : columns.stop].to(device)
        else:
            of_columns = torch.arange(columns.start, columns.stop, device=device) // self.group
        if not len(of_columns):
            return torch.empty(self.shape, device=device)
        first, last = int(of_columns.min()), int(of_columns.max())
        scales, zeros = self._of_groups(rows, range(first, last + 1), device)
        of_columns = of_columns - first
        numbers = self.numbers.read(rows, columns, device)
        centred = widen_e2m1(numbers) if self.e2m1 else numbers.float()
        if not self.e2m1:
            centred -= MIDDLE if zeros is None else zeros[:, of_columns].float()
        return centred.mul_(scales.float()[:, of_columns])


@dataclass(frozen=True, slots=True)
class ScaledInt4(Stored):
    """See Stored. A matrix in the memory of a device, or those of so many `experts` below each other, which
    are not cut any more."""

    matrix: Int4Groups
    dtype: torch.dtype  # of `values`
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.matrix.shape
        return (self.experts, rows // self.experts, columns) if self.experts else (rows, columns)

    @property
    def values(self) -> Tensor:
        return dequantise(self.matrix).to(self.dtype).view(self.shape)

    @property
    def data(self) -> tuple[Tensor, ...]:
        zeros = () if self.matrix.zeros is None else (self.matrix.zeros,)
        return (self.matrix.numbers, self.matrix.scales, *zeros)

    @property
    def operand(self) -> Int4Groups:
        return self.matrix

    def rows(self, order: Tensor) -> ScaledInt4:
        return self._each(lambda tensor, _: tensor[order])

    def cut(self, cut: Cut) -> ScaledInt4:
        """See Stored. Columns are cut between groups: InInt4.in_int4 has refused others."""

        def part(tensor: Tensor, size: int) -> Tensor:
            if cut.dim == 0:
                return tensor[cut.begin : cut.end]
            return tensor[:, cut.begin // size : cut.end // size].contiguous()

        return self._each(part)

    def join(self, below: Sequence[Stored]) -> Stored:
        """See Stored. In 8 bits if one of them is. Plain numbers if one of them is plain, or has other groups
        of 4 bits."""
        found = [self.matrix]
        for each in below:
            if not isinstance(each, ScaledInt4) or each.matrix.e2m1 != self.matrix.e2m1:
                return Dense.of(self.values).join(below)
            found.append(each.matrix)
        if not below:
            return self
        if any(each.bits == 8 for each in found):
            group = min(each.group for each in found)
            found = [each.in_bytes(group) for each in found]
        if len({each.group for each in found}) > 1:
            return Dense.of(self.values).join(below)
        zeros = None
        if any(each.zeros is not None for each in found):
            zeros = torch.cat([each.all_zeros() for each in found])
        numbers, scales = (torch.cat([getattr(m, name) for m in found]) for name in ("numbers", "scales"))
        return replace(self, matrix=replace(found[0], numbers=numbers, scales=scales, zeros=zeros))

    def scaled(self, factors: Tensor) -> Stored:
        """See Stored. Plain numbers if columns of a group have different factors, or if a scale would lose
        bits."""
        if factors.dim() == 1:
            of_groups = factors.view(-1, self.matrix.group)
            if not of_groups.eq(of_groups[:, :1]).all():
                return Dense.of(self.values * factors)
            factors = of_groups[None, :, 0]
        scales = self.matrix.scales * factors.to(self.matrix.scales.dtype)
        if not (scales.float() == self.matrix.scales.float() * factors.float()).all():
            scales = self.matrix.scales.float() * factors.float()  # float16 has no such exponent
        return replace(self, matrix=replace(self.matrix, scales=scales))

    def blocks(self) -> list[Blocks]:
        """For the products of a CPU, of a matrix that `part_in_blocks` has let pass."""
        from kernels.cpu_jit.block_weights import FORMATS, NIBBLES, NIBBLES_MINIMUM, Blocks

        numbers, zeros = unpack(self.matrix.numbers), self.matrix.zeros
        scales = self.matrix.scales.half()
        if self.matrix.e2m1:  # twice a number is a whole one
            twice = (widen_e2m1(numbers) * 2 + FORMATS[2].offset).to(torch.uint8)
            return [Blocks(FORMATS[2], twice, scales / 2)]
        minima = None if zeros is None else (zeros.float() * -scales.float()).half()
        each = self.matrix.group // _BLOCK
        scales = scales.repeat_interleave(each, 1)
        if minima is None:
            return [Blocks(NIBBLES, numbers, scales)]
        return [Blocks(NIBBLES_MINIMUM, numbers, scales, minima.repeat_interleave(each, 1))]

    def loaded(self, dtype: torch.dtype, device: torch.device) -> ScaledInt4:
        return replace(self._each(lambda tensor, _: tensor.to(device)), dtype=dtype)

    def _each(self, of: Callable[[Tensor, int], Tensor]) -> ScaledInt4:
        """The tensors after `of`, which also gets how many columns an element stands for."""
        matrix = self.matrix
        zeros = None if matrix.zeros is None else of(matrix.zeros, matrix.group)
        numbers, scales = of(matrix.numbers, 32 // matrix.bits), of(matrix.scales, matrix.group)
        return replace(self, matrix=replace(matrix, numbers=numbers, scales=scales, zeros=zeros))


def part_in_int4(part: Part, stored: Stored, dtype: torch.dtype, device: torch.device) -> Stored:
    """A part of a weight in the memory of `device`, in 4 bits if the file has it so and the product can read
    its size. Raises SetupError as `InInt4.in_int4`."""
    if part.units == EXPERTS:
        return _experts_in_int4(stored, dtype, device)
    if can_multiply(part, stored) and isinstance(stored, InInt4):
        return stored.in_int4(dtype, device)
    return stored.loaded(dtype, device)


@runtime_checkable
class OfExperts(Protocol):
    """The source of a weight (Dense) that has the matrices of experts."""

    def matrices(self, experts: range) -> Iterator[Stored]:
        """Those of some experts as they are stored, not yet read, in the order of their rows."""


def _experts_in_int4(stored: Stored, dtype: torch.dtype, device: torch.device) -> Stored:
    """Plain, if one matrix is plain or has other groups than the rest."""
    if isinstance(stored, Dense) and isinstance(stored.source, OfExperts):
        matrices = [*stored.source.matrices(stored.ranges[0])]
        found = [each for each in matrices if isinstance(each, InInt4)]
        if len(found) == len(matrices) and len({each.group for each in found}) == 1:
            first, *more = (each.in_int4(dtype, device) for each in found)
            joined = first.join(more)
            assert isinstance(joined, ScaledInt4), "all are in groups of one size"
            return replace(joined, experts=stored.shape[0])
    return stored.loaded(dtype, device)


def can_multiply(part: Part, stored: Stored) -> bool:
    """Whether the product of a GPU can read a part of this size in 4 bits."""
    return part.units in (HEADS, KV_HEADS, WIDTH) and can_take(*stored.shape)


def part_in_blocks(part: Part, stored: Stored, dtype: torch.dtype, device: torch.device) -> Stored:
    """`part_in_int4` for the products of a CPU, which read blocks of 32 columns with scales in float16: what
    they cannot read is dequantised."""
    if part.units not in (HEADS, KV_HEADS, WIDTH) or not isinstance(stored, InInt4):
        return stored.loaded(dtype, device)
    if stored.shape[1] % _BLOCK or stored.unfit():
        return stored.loaded(dtype, device)
    found = stored.in_int4(dtype, device)
    scales = found.matrix.scales.float()
    exact = (scales.half().float() - scales).abs() <= scales.abs() * 2.0**-11
    return found if exact.all() else stored.loaded(dtype, device)


def dummy_in_int4(part: Part, stored: Stored, dtype: torch.dtype, device: torch.device) -> Stored:
    """`part_in_int4` of random weights: in groups of DUMMY_GROUP, rounded to nearest."""
    plain = stored.loaded(dtype, device)
    if part.units == EXPERTS:
        return ScaledInt4(quantise_groups(plain.values.flatten(0, 1), DUMMY_GROUP), dtype, plain.shape[0])
    if len(plain.shape) != 2 or not can_multiply(part, plain):
        return plain
    return ScaledInt4(quantise_groups(plain.values, DUMMY_GROUP), dtype)


def can_take(*sizes: int) -> bool:
    """Whether the product of a GPU takes matrices of these sizes."""
    return not any(size % _MULTIPLE for size in sizes)


@dataclass(frozen=True, slots=True)
class Int4Format(Scheme):
    """How a folder stores its matrices in 4 bits. `group`: columns; 0: a whole row."""

    kept_in: ClassVar[str] = "int4"
    is_larger_plain: ClassVar[bool] = True
    has_empty_biases: ClassVar[bool] = True  # of old writers

    method: str  # awq, gptq, compressed-tensors, mxfp4
    group: int
    symmetric: bool = False
    less_one: bool = False  # zero points are stored less one
    reordered: bool = False  # columns are in another order than their groups, which a tensor (g_idx) gives

    @property
    def fact(self) -> str:
        return repr(self)

    @property
    def _ends(self) -> tuple[str, ...]:
        """The ends of the names that take the place of `weight`: numbers, scales, zero points, others."""
        if self.method == "mxfp4":
            return "weight_packed", "weight_scale"
        if self.method == "compressed-tensors":
            return "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"
        return "qweight", "scales", "qzeros", *(("g_idx",) if self.method == "gptq" else ())

    def weight_of(self, name: str, names: Mapping[str, Any]) -> str | None:
        """See Scheme."""
        module, _, end = name.rpartition(".")
        packed = f"{module}.{self._ends[0]}"
        return f"{module}.weight" if end in self._ends and packed in names else None

    def stored(self, weight: str, names: Mapping[str, Any], read: Callable[[str], Dense]) -> Stored:
        """See Scheme. The order of its columns is read. Raises SetupError for tensors that are missing, or of
        a wrong shape or type."""
        if weight in names:
            return read(weight)
        module = weight.removesuffix("weight")
        if self.method == "mxfp4":
            return _in_mxfp4(module, names, read)
        numbers_end, scales_end, zeros_end, *_ = self._ends
        found = {end: read(module + end) for end in self._ends if module + end in names}
        turned = self.method != "compressed-tensors"
        needed = (numbers_end, scales_end, *((zeros_end,) if turned or not self.symmetric else ()))
        order_end = "weight_g_idx" if self.method == "compressed-tensors" else "g_idx"
        for end in (*needed, *((order_end,) if self.reordered else ())):
            if end not in found:
                raise SetupError(
                    f"tensor {module + end!r} is missing beside {module + numbers_end!r}; fetch it again"
                )
        if zeros_end in found and zeros_end not in needed:
            unused = found[zeros_end].values  # packed, or as int8
            if not (unused == (_ALL_MIDDLE if unused.dtype == torch.int32 else 0)).all():
                raise SetupError(
                    f"tensor {module + zeros_end!r} has zero points, but quantization_config sets symmetric; "
                    "fetch the model again"
                )
        order = _AWQ_ORDER if self.method == "awq" else _IN_ORDER
        in_words = 0 if self.method == "gptq" else 1  # the dimension with eight numbers in a word
        for end in {numbers_end, zeros_end} & {*needed}:
            _check_words(module + end, found[end])
        numbers = Packed(found[numbers_end], in_words, turned, order)
        rows, columns = numbers.shape
        if given := found.get("weight_shape"):  # the columns may be padded to a whole word
            shape = given.values.flatten().tolist()
            if (
                len(shape) != 2
                or shape[0] != rows
                or shape[1] not in range(columns - IN_WORD + 1, columns + 1)
            ):
                raise SetupError(
                    f"tensor {module + 'weight_shape'!r} is {shape}, where {module + numbers_end!r} has "
                    f"{[rows, columns]} numbers; fetch the model again"
                )
            columns = int(shape[1])
        group = self.group or columns
        if columns % group:
            raise SetupError(
                f"tensor {module + numbers_end!r} has {columns} columns, which groups of {group} do not "
                "divide; fetch the model again"
            )
        groups = columns // group
        zeros = None
        if zeros_end in needed:
            added = _LESS_ONE if self.less_one else 0
            zeros = Packed(found[zeros_end], 1 if turned else 0, turned, order, added)
            wanted = (rows, groups) if turned else (-(-rows // IN_WORD) * IN_WORD, groups)
            if zeros.shape != wanted:
                raise _wrong_shape(module + zeros_end, found[zeros_end], rows, groups)
        scales = found[scales_end]
        if scales.shape != ((groups, rows) if turned else (rows, groups)):
            raise _wrong_shape(module + scales_end, scales, rows, groups)
        if not scales.cut(Cut(0, 0, 1)).values.is_floating_point():
            raise SetupError(f"tensor {module + scales_end!r} has no floating point numbers; fetch it again")
        return InInt4(
            module + numbers_end, numbers, scales, zeros, group, (range(rows), range(columns)),
            _order(module, found.get(order_end), columns, group), self.symmetric,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A tensor of bytes in a file as `of` reads them, `each` columns as one."""

    source: Dense
    each: int
    of: Callable[[Tensor], Tensor]

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        rows, columns = at
        part = self.source.cut(Cut(0, rows.start, rows.stop))
        return self.of(part.cut(Cut(1, columns.start * self.each, columns.stop * self.each)).values)


def _in_mxfp4(module: str, names: Mapping[str, object], read: Callable[[str], Dense]) -> InInt4:
    name, of_scales = module + "weight_packed", module + "weight_scale"
    if of_scales not in names:
        raise SetupError(f"tensor {of_scales!r} is missing beside {name!r}; fetch it again")
    numbers, scales = read(name), read(of_scales)
    for each, found in ((name, numbers), (of_scales, scales)):
        if (
            len(found.shape) != 2
            or not all(found.shape)
            or found.cut(Cut(0, 0, 1)).values.dtype != torch.uint8
        ):
            raise SetupError(f"tensor {each!r} is no matrix of bytes, as mxfp4 has it; fetch the model again")
    rows, columns = numbers.shape[0], 2 * numbers.shape[1]
    if scales.shape != (rows, columns / _MXFP4_GROUP):
        raise _wrong_shape(of_scales, scales, rows, columns // _MXFP4_GROUP)
    words = _Bytes(numbers, 4, lambda found: found.contiguous().view(torch.int32))
    # An exponent in the place of bfloat16's: 255, NaN, becomes infinite; 0, which is 2^-127, becomes 0.
    exponents = _Bytes(scales, 1, lambda found: (found.to(torch.int16) << 7).view(torch.bfloat16))
    return InInt4(
        name, Packed(Dense.of(words, (rows, columns // IN_WORD)), 1), Dense.of(exponents, scales.shape), None,
        _MXFP4_GROUP, (range(rows), range(columns)), e2m1=True,
    )  # fmt: skip


def _check_words(name: str, words: Dense) -> None:
    if len(words.shape) != 2 or not all(words.shape):
        raise SetupError(f"tensor {name!r} is {list(words.shape)}: only matrices are supported")
    if words.cut(Cut(0, 0, 1)).values.dtype != torch.int32:
        raise SetupError(f"tensor {name!r} is not in int32, eight numbers in each; fetch the model again")


def _wrong_shape(name: str, found: Dense, rows: int, groups: int) -> SetupError:
    return SetupError(
        f"tensor {name!r} is {list(found.shape)}, which does not fit a matrix of {rows} rows and {groups} "
        "groups of columns; fetch the model again"
    )


def _order(module: str, given: Dense | None, columns: int, group: int) -> Tensor | None:
    """The group of each column; None: in order."""
    if given is None:
        return None
    found = given.values
    whole = found.dtype in (torch.int32, torch.int64)
    if found.shape != (columns,) or not whole or found.min() < 0 or found.max() >= columns // group:
        raise SetupError(
            f"the groups of columns of {module!r} (g_idx) are not {columns} of 0 to {columns // group - 1}; "
            "fetch the model again"
        )
    in_order = torch.arange(columns, dtype=found.dtype) // group
    return None if found.equal(in_order) else found.long()
