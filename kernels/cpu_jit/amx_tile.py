"""Products of many rows with weights in blocks by AMX, which multiplies tiles of 16 rows by 64 bytes.

The numbers of a matrix and both bytes of those of `x` are bfloat16 here, which is exact. So are float32 sums
of their products below 2^24, as those of a block of 4 bits are, 32 * 15 * (2^15 - 129). With 8 bits the upper
and the lower bytes of `x` have sums of their own; both together are rounded once, as an integer is when it
becomes float32. So the bits are those of block_microkernel.py. Tiles of bytes would need two sums for 4 bits,
too, and the way of sums through memory takes as long as the products.

A panel is unpacked once. The products of 16 rows with some blocks of it go to the first cache, and from there
to their sums, in registers: one step after the other, since a tile of the panel needs all vector registers.
"""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import product
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

import kernels.cpu_jit
from kernels.cpu_jit.block_microkernel import (
    BLOCK,
    FACTS,
    FLOATS,
    FMA,
    LANES,
    PANEL,
    PARTS,
    SCALE,
    SHIFT,
    WORDS,
    Format,
    broadcast,
    constant,
    load,
    matrix_words,
    scales,
    store,
)
from kernels.cpu_jit.vectors import call, loop

ROWS = 16  # of `x` in a tile
UNPACKED_BYTES = 2 * BLOCK * PANEL  # of a block of a panel
CHUNK = 6  # of columns that share a scale: their sums stay in the first cache
_TILE_BYTES = 64 * ROWS
SUMS_BYTES = _TILE_BYTES * PARTS
PRODUCTS_BYTES = CHUNK * 2 * SUMS_BYTES
_A, _B, _C = (0, 1), (2, 3), ((4, 5), (6, 7))  # tile registers: by term, by part, by part and term
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # Linux: the state of AMX is given to those that ask

_I8, _I64, _F32 = ir.IntType(8), ir.IntType(64), ir.FloatType()
_VOID = ir.VoidType()


EXISTS = kernels.cpu_jit.has("amx-bf16", "avx512vnni")  # machine code on disk depends on this alone


@cache
def allowed() -> bool:
    """Whether this CPU has AMX and Linux lets this process use it, whose threads then have 8 KiB of
    registers more to save."""
    if not EXISTS:
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


def unpack(format_: Format) -> Any:
    """See the function in it."""

    @intrinsic
    def widen(typing: Any, blocks: Any, panel: Any, wide: Any) -> Any:
        """Store the numbers of `blocks` blocks of a panel as bfloat16 at `wide`: of columns with a scale the
        rows of a part, in pairs of columns."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            blocks, panel, wide = args

            def one(block: Any, sums: list[Any]) -> list[Any]:
                chunk = builder.gep(panel, [builder.mul(block, constant(format_.bytes))])
                to = builder.gep(wide, [builder.mul(block, constant(UNPACKED_BYTES))])
                for column, part, pair in product(range(0, BLOCK, 4), range(PARTS), range(2)):
                    words = matrix_words(builder, format_, chunk, column, part)
                    found = _pair(builder, words, 16 * pair, format_.offset)
                    group, rest = divmod(column, format_.columns)
                    place = (group * PARTS + part) * format_.columns + rest + 2 * pair
                    at = builder.gep(to, [constant(place * 2 * LANES)])
                    builder.store(found, builder.bitcast(at, WORDS.as_pointer()), align=1)
                return sums

            loop(builder, blocks, [], one)
            return context.get_dummy_value()

        return types.void(blocks, panel, wide), generate

    return widen


def _pair(builder: ir.IRBuilder, words: Any, shift: int, offset: int) -> Any:
    """Two bytes of each word, less the offset, as bfloat16 in a word."""
    found = []
    for place in (shift, shift + 8):
        number = builder.and_(builder.lshr(words, _words(place)), _words(255))
        number = builder.sitofp(builder.sub(number, _words(offset)), FLOATS)
        found.append(builder.bitcast(number, WORDS))  # the lower half is zero
    return builder.or_(builder.lshr(found[0], _words(16)), found[1])


def _words(number: int) -> Any:
    return ir.Constant(WORDS, [number] * LANES)


def configure(format_: Format) -> Any:
    """See the function in it."""
    widths, rows = bytearray(32), bytearray(16)
    for number in range(8):
        widths[2 * number] = 2 * format_.columns if number in _A else 64
        rows[number] = format_.columns // 2 if number in _B else ROWS
    given = bytearray([1, *bytes(15), *widths, *rows])

    @intrinsic
    def start(typing: Any) -> Any:
        """Set the shapes of the tile registers of this thread, which then can be used, until `release`."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            name, data = f"tiles.{format_.columns}", ir.Constant(ir.ArrayType(_I8, len(given)), given)
            there = builder.module.globals.get(name)
            if there is None:
                there = ir.GlobalVariable(builder.module, data.type, name)
                there.initializer, there.global_constant, there.linkage = data, True, "internal"
            call(builder, "llvm.x86.ldtilecfg", _VOID, builder.bitcast(there, _I8.as_pointer()))
            return context.get_dummy_value()

        return types.void(), generate

    return start


@intrinsic
def release(typing: Any) -> Any:
    """The tile registers are free: the kernel saves them no more."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilerelease", _VOID)
        return context.get_dummy_value()

    return types.void(), generate


def _amx(builder: ir.IRBuilder, name: str, *arguments: Any) -> None:
    """An instruction; an int is a tile register."""
    given = (ir.Constant(_I8, each) if isinstance(each, int) else each for each in arguments)
    call(builder, f"llvm.x86.{name}", _VOID, *given)


def _apart(kind: Format) -> bool:
    """Whether the upper and the lower bytes of `x` have sums of their own."""
    return kind.terms == 2 and kind.bits == 8


def multiply(format_: Format) -> Any:
    """See the function in it."""
    kind, groups, size = format_, BLOCK // format_.columns, 2 * format_.terms * BLOCK

    @intrinsic
    def tiles(typing: Any, x: Any, blocks: Any, wide: Any, first: Any, count: Any, products: Any) -> Any:
        """Store the products of ROWS rows of `blocks` blocks at `x` with an unpacked panel to `products`: of
        `count` times the columns with a scale, from the `first` on, tiles by part and term."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            x, blocks, wide, first, count, products = args
            stride = builder.mul(blocks, constant(size))

            def one(index: Any, sums: list[Any]) -> list[Any]:
                number = builder.add(first, index)
                block, group = builder.sdiv(number, constant(groups)), builder.srem(number, constant(groups))
                at = builder.mul(block, constant(size))
                at = builder.gep(x, [builder.add(at, builder.mul(group, constant(2 * kind.columns)))])
                for term in range(kind.terms):
                    own = builder.gep(at, [constant(2 * term * BLOCK)])
                    _amx(builder, "tileloadd64", _A[term], own, stride)
                own = builder.gep(wide, [builder.mul(number, constant(UNPACKED_BYTES // groups))])
                to = builder.gep(products, [builder.mul(index, constant(2 * SUMS_BYTES))])
                for part in range(PARTS):
                    there = builder.gep(own, [constant(part * UNPACKED_BYTES // groups // PARTS)])
                    _amx(builder, "tileloadd64", _B[part], there, constant(64))
                    for term in range(kind.terms):
                        sums_of = _C[part][term if _apart(kind) else 0]
                        if _apart(kind) or not term:
                            _amx(builder, "tilezero", sums_of)
                        _amx(builder, "tdpbf16ps", sums_of, _A[term], _B[part])
                for part, term in product(range(PARTS), range(2 if _apart(kind) else 1)):
                    there = builder.gep(to, [constant((2 * part + term) * _TILE_BYTES)])
                    _amx(builder, "tilestored64", _C[part][term], there, constant(64))
                return sums

            loop(builder, count, [], one)
            return context.get_dummy_value()

        return types.void(x, blocks, wide, first, count, products), generate

    return tiles


def add_up(format_: Format) -> Any:
    """See the function in it."""
    kind, groups = format_, BLOCK // format_.columns

    @intrinsic
    def scaled(
        typing: Any,
        facts: Any,
        blocks: Any,
        panel: Any,
        first: Any,
        count: Any,
        part: Any,
        products: Any,
        to: Any,
    ) -> Any:
        """Add to the sums of a part at `to` the products that `multiply` has stored, with the scales of `x`
        and of the packed panel, in the order of block_microkernel.py."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            facts, blocks, panel, first, count, part, products, to = args
            line, half = builder.mul(blocks, constant(FACTS)), builder.mul(part, constant(2 * LANES))
            products = builder.gep(products, [builder.mul(part, constant(2 * _TILE_BYTES))])
            to = builder.gep(to, [builder.mul(part, constant(_TILE_BYTES))])

            def add(index: Any, sums: list[Any]) -> list[Any]:
                number = builder.add(first, index)
                block, group = builder.sdiv(number, constant(groups)), builder.srem(number, constant(groups))
                chunk = builder.add(builder.mul(block, constant(kind.bytes)), half)
                chunk = builder.add(chunk, builder.mul(group, constant(2 * PANEL)))
                at, chunk = BLOCK * PANEL * kind.bits // 8, builder.gep(panel, [chunk])
                factors = None if kind.by_row else scales(builder, chunk, at)[0]
                minima = scales(builder, chunk, at + 2 * PANEL)[0] if kind.minimum else None
                of_x = builder.gep(facts, [builder.mul(block, constant(FACTS))])
                there = builder.gep(products, [builder.mul(index, constant(2 * SUMS_BYTES))])
                found = []
                for row, old in enumerate(sums):
                    own = builder.gep(of_x, [builder.mul(line, constant(row))])
                    whole = load(builder, there, 64 * row, FLOATS)
                    if _apart(kind):
                        whole = builder.fadd(whole, load(builder, there, _TILE_BYTES + 64 * row, FLOATS))
                    scale = broadcast(builder, load(builder, own, SCALE, _F32))
                    pair = (whole, scale) if factors is None else (builder.fmul(whole, scale), factors)
                    new = call(builder, FMA, FLOATS, *pair, old)
                    if minima is not None:
                        shift = broadcast(builder, load(builder, own, SHIFT, _F32))
                        new = call(builder, FMA, FLOATS, minima, shift, new)
                    found.append(new)
                return found

            before = [load(builder, to, 64 * row, FLOATS) for row in range(ROWS)]
            for row, end in enumerate(loop(builder, count, before, add)):
                at = builder.gep(to, [constant(64 * row)])
                builder.store(end, builder.bitcast(at, FLOATS.as_pointer()), align=64)
            return context.get_dummy_value()

        return types.void(facts, blocks, panel, first, count, part, products, to), generate

    return scaled


def finish(format_: Format) -> Any:
    """See the function in it."""

    @intrinsic
    def stored(typing: Any, sums: Any, blocks: Any, panel: Any, out: Any, height: Any) -> Any:
        """Store the sums to `out`, float32 or bfloat16, with rows `height` apart, and set them to zero."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            sums, blocks, panel, out, height = args
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            for part, row in product(range(PARTS), range(ROWS)):
                place = part * _TILE_BYTES + 64 * row
                end = load(builder, sums, place, FLOATS)
                at = builder.gep(sums, [constant(place)])
                builder.store(zero, builder.bitcast(at, FLOATS.as_pointer()), align=64)
                if format_.by_row:
                    at = builder.add(builder.mul(blocks, constant(format_.bytes)), constant(4 * part * LANES))
                    end = builder.fmul(end, load(builder, panel, at, FLOATS))
                target = builder.add(builder.mul(height, constant(row)), constant(part * LANES))
                store(builder, end, builder.gep(out, [target]), signature.args[3].dtype)
            return context.get_dummy_value()

        return types.void(sums, blocks, panel, out, height), generate

    return stored
