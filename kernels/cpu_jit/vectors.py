"""Softmax and transposition in vector registers, and what kernels in LLVM's instructions share.

Written so, the order of a sum does not change with a compiler's choices. Vectors have 16 lanes of float32;
LLVM uses two or four shorter vectors on other machines.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import float32, int64, types

from kernels.cpu_jit.llvm_intrinsics import emitted, to_float16

LANES = 16
AHEAD = 1 << 13  # bytes
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_HALVES, _WORDS = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(_I32, LANES)
_FAST = ("fast",)
_FMA = "llvm.fma.v16f32"


class BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


NARROW = ir.VectorType(BFloat(), LANES)


@emitted(lambda scores, tokens, before: types.float32(scores, types.int64, types.float32))
def highest(builder: ir.IRBuilder, scores: Any, tokens: Any, before: Any) -> Any:
    """The largest of `before` and of the first `tokens` scores; no NaN."""

    def larger(found: Any, at: Any, which: Any) -> Any:
        score = _lanes_at(builder, scores, at)
        more = builder.fcmp_ordered(">", score, found)
        return builder.select(more if which is None else builder.and_(more, which), score, found)

    most = _by_lanes(builder, tokens, broadcast(builder, before), larger)
    return call(builder, "llvm.vector.reduce.fmax.v16f32", ir.FloatType(), most)


@emitted(lambda scores, tokens, most, scale, out: float32(scores, int64, float32, float32, out))
def weigh(builder: ir.IRBuilder, scores: Any, tokens: Any, most: Any, scale: Any, out: Any) -> Any:
    """Store 2^((score - most) * scale) of the first `tokens` scores to `out`, float32 or bfloat16, and zeros
    up to a multiple of LANES; returns their sum. No score is above `most`. NaN stays NaN."""
    most, scale, zeros = broadcast(builder, most), broadcast(builder, scale), _all(0.0)
    factors = _FACTORS_F32 if out.type.pointee == ir.FloatType() else _FACTORS_BF16

    def add(total: Any, at: Any, which: Any) -> Any:
        power = builder.fmul(builder.fsub(_lanes_at(builder, scores, at), most), scale)
        weight = _power_of_two(builder, power, factors)
        if which is not None:
            weight = builder.select(which, weight, zeros)
        _store_lanes(builder, weight, builder.gep(out, [at]))
        return builder.fadd(total, weight)

    sums = _by_lanes(builder, tokens, zeros, add)
    zero = ir.Constant(ir.FloatType(), 0.0)
    return call(builder, "llvm.vector.reduce.fadd.v16f32", zero.type, zero, sums)


def _by_lanes(builder: ir.IRBuilder, count: Any, before: Any, body: Any) -> Any:
    """Run `found = body(found, first lane, None)` for each LANES of `count`, and for the rest with which of
    the lanes count."""
    whole = builder.sdiv(count, _index(LANES))
    (found,) = loop(
        builder, whole, [before], lambda i, own: [body(own[0], builder.mul(i, _index(LANES)), None)]
    )
    at = builder.mul(whole, _index(LANES))
    left = broadcast(builder, builder.trunc(builder.sub(count, at), _I32))
    which = builder.icmp_signed("<", ir.Constant(_WORDS, list(range(LANES))), left)
    rest = builder.select(builder.icmp_signed("<", at, count), _index(1), _index(0))
    (found,) = loop(builder, rest, [found], lambda i, own: [body(own[0], at, which)])
    return found


@emitted(lambda x, half, cos, sin, out: types.void(x, types.int64, cos, sin, out))
def rotate_lanes(builder: ir.IRBuilder, x: Any, half: Any, cos: Any, sin: Any, out: Any) -> None:
    """Rotate LANES pairs of numbers, those of `x` and those `half` after them, to `out`, which may be `x`."""
    low, high = read_lanes(builder, x, 0), read_lanes(builder, builder.gep(x, [half]), 0)
    cos, sin = _lanes_at(builder, cos, _index(0)), _lanes_at(builder, sin, _index(0))
    minus = builder.fneg(builder.fmul(high, sin))
    turned = call(builder, _FMA, _FLOATS, low, cos, minus)
    _store_lanes(builder, turned, out, any_cpu=True)
    plus = builder.fmul(low, sin)
    turned = call(builder, _FMA, _FLOATS, high, cos, plus)
    _store_lanes(builder, turned, builder.gep(out, [half]), any_cpu=True)


@emitted(lambda pointer: types.void(pointer))
def prefetch(builder: ir.IRBuilder, pointer: Any) -> None:
    """Start to read the cache line at `pointer`."""
    at = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), at, read, keep, data)


def read_ahead(builder: ir.IRBuilder, pointer: Any, size: int) -> None:
    """Start to read `size` bytes, AHEAD bytes after `pointer`, into the second cache. A CPU does it by itself
    only to the end of a page, and a panel of weights is longer."""
    first = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    read, second, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
    for line in range(0, size, 64):
        at = builder.gep(first, [_index(AHEAD + line)])
        call(builder, "llvm.prefetch.p0i8", ir.VoidType(), at, read, second, data)


@emitted(lambda source, out: types.void(source, out))
def copy_lanes(builder: ir.IRBuilder, source: Any, out: Any) -> None:
    """Store LANES float32 numbers of `source` to `out`, float32 or rounded to bfloat16."""
    _store_lanes(builder, _lanes_at(builder, source, _index(0)), out)


@emitted(lambda source, offsets, out, line: types.void(source, offsets, out, types.int64))
def transpose(builder: ir.IRBuilder, source: Any, offsets: Any, out: Any, line: Any) -> None:
    """Store LANES rows of `source`, `offsets` apart from it, as the columns of `out`, whose rows are `line`
    apart. Elements are float32, into which bfloat16 and float16 are widened, or pairs of bfloat16 if `out` is
    bfloat16."""
    pairs = out.type.pointee != ir.FloatType()
    starts = [
        builder.gep(source, [builder.load(builder.gep(offsets, [_index(row)]))]) for row in range(LANES)
    ]
    if not pairs and source.type.pointee != ir.FloatType():
        for column, lanes in enumerate(_narrow_columns(builder, starts)):
            _store_lanes(builder, lanes, builder.gep(out, [builder.mul(line, _index(column))]))
        return
    to = builder.bitcast(out, _I32.as_pointer()) if pairs else out
    for first in range(0, LANES, _PART):
        parts = [_columns(builder, starts[row::_PART], first, pairs) for row in range(_PART)]
        low, high = (
            [builder.shuffle_vector(*parts[at : at + 2], order) for at in (0, 2)]
            for order in (_LOW_WORDS, _HIGH_WORDS)
        )
        found = [
            builder.shuffle_vector(*both, order)
            for both in (low, high)
            for order in (_LOW_DOUBLES, _HIGH_DOUBLES)
        ]
        for column, lanes in enumerate(found, first):
            target = builder.gep(to, [builder.mul(line, _index(column))])
            builder.store(lanes, builder.bitcast(target, lanes.type.as_pointer()), align=4)


_PART = 4  # lanes that shuffles do not leave


def _order(of_a_part: tuple[int, ...]) -> Any:
    """A shuffle of two vectors within each part: 0 to 3 from the first, 4 to 7 from the second."""
    places = [
        first + place % _PART + LANES * (place // _PART)
        for first in range(0, LANES, _PART)
        for place in of_a_part
    ]
    return ir.Constant(_WORDS, places)


_LOW_WORDS, _HIGH_WORDS = _order((0, 4, 1, 5)), _order((2, 6, 3, 7))
_LOW_DOUBLES, _HIGH_DOUBLES = _order((0, 1, 4, 5)), _order((2, 3, 6, 7))


def _columns(builder: ir.IRBuilder, rows: list[Any], first: int, pairs: bool) -> Any:
    """_PART columns, from `first` on, of every fourth row."""
    kind = ir.VectorType(_I32 if pairs else ir.FloatType(), _PART)
    at = [builder.gep(row, [_index(first * (2 if pairs else 1))]) for row in rows]
    return _joined(builder, [builder.load(builder.bitcast(each, kind.as_pointer()), align=4) for each in at])


def _joined(builder: ir.IRBuilder, parts: list[Any]) -> Any:
    """Four vectors, one after the other."""
    for _ in range(2):
        size = 2 * parts[0].type.count
        places = ir.Constant(ir.VectorType(_I32, size), list(range(size)))
        parts = [builder.shuffle_vector(*parts[i : i + 2], places) for i in range(0, len(parts), 2)]
    return parts[0]


def _narrow_columns(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """The columns of LANES rows of LANES float16 or bfloat16 numbers, widened. Vector i has the first halves
    of rows i and i + 8, then their second halves. Three perfect shuffles of each eight numbers leave column i
    and column i + 8 there."""
    eight = ir.VectorType(rows[0].type.pointee, 8)

    def half(row: Any, first: int) -> Any:
        return builder.load(builder.bitcast(builder.gep(row, [_index(first)]), eight.as_pointer()), align=2)

    found = [
        _joined(builder, [half(rows[row], first) for first in (0, 8) for row in (i, i + 8)]) for i in range(8)
    ]
    for _ in range(3):
        found = [
            builder.shuffle_vector(found[i], found[i + 4], order) for i in range(4) for order in _SHUFFLED
        ]
    halves = [ir.Constant(_WORDS, list(range(first, first + LANES))) for first in (0, LANES)]
    return [_widened(builder, builder.shuffle_vector(both, both, half)) for half in halves for both in found]


def _in_turn(first: int) -> Any:
    """Takes four of each eight numbers of two vectors, from the `first` on, one by one in turn."""
    places = [
        eight + first + i + other
        for eight in range(0, 2 * LANES, 8)
        for i in range(4)
        for other in (0, 2 * LANES)
    ]
    return ir.Constant(ir.VectorType(_I32, 2 * LANES), places)


_SHUFFLED = _in_turn(0), _in_turn(4)


_MAGIC = 1.5 * 2**23  # a float32 of this size has no room for a fraction
_LEAST = -126.0  # of an exponent


# Factors of the powers of x, from the first on, in 2^x from -0.5 to 0.5: to 9e-8 and 3e-6 of the value, by
# least squares that are weighted until the largest error is the least.
_FACTORS_F32 = (
    0.693146977598857,
    0.2402224208517324,
    0.05550733743691089,
    0.009671512648911874,
    0.001326472706528418,
)
_FACTORS_BF16 = (0.6931241933916188, 0.24024098612932865, 0.05590642474189882, 0.009582852993823113)


def _power_of_two(builder: ir.IRBuilder, x: Any, factors: tuple[float, ...]) -> Any:
    """2^x of lanes up to 0; 2^-126 below. NaN stays NaN."""
    low = builder.fcmp_ordered("<", x, _all(_LEAST))
    x = builder.select(low, _all(_LEAST), x)
    shifted = builder.fadd(x, _all(_MAGIC + 127))
    rest = builder.fsub(x, builder.fsub(shifted, _all(_MAGIC + 127)))
    found = _all(factors[-1])
    for factor in (*reversed(factors[:-1]), 1.0):
        found = call(builder, _FMA, _FLOATS, found, rest, _all(factor))
    exponent = builder.shl(builder.bitcast(shifted, _WORDS), ir.Constant(_WORDS, [23] * LANES))
    return builder.fmul(found, builder.bitcast(exponent, _FLOATS))


def _all(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


def _index(value: int) -> Any:
    return ir.Constant(_I64, value)


def _lanes_at(builder: ir.IRBuilder, pointer: Any, offset: Any) -> Any:
    at = builder.gep(pointer, [offset])
    return builder.load(builder.bitcast(at, _FLOATS.as_pointer()), align=4)


def _store_lanes(builder: ir.IRBuilder, lanes: Any, out: Any, *, any_cpu: bool = False) -> None:
    """Store LANES float32 numbers, as they are or rounded to float16 or bfloat16: to the latter by the
    instruction of AVX512-BF16, or on any CPU, where LLVM would call a function that is not there."""
    if out.type.pointee == ir.FloatType():
        builder.store(lanes, builder.bitcast(out, _FLOATS.as_pointer()), align=4)
    elif out.type.pointee == ir.HalfType():
        halves = to_float16(builder, lanes)
        builder.store(halves, builder.bitcast(out, halves.type.as_pointer()), align=2)
    elif any_cpu:
        halves = _rounded(builder, builder.bitcast(lanes, _WORDS))
        builder.store(halves, builder.bitcast(out, _HALVES.as_pointer()), align=2)
    else:
        builder.store(builder.fptrunc(lanes, NARROW), builder.bitcast(out, NARROW.as_pointer()), align=2)


def _rounded(builder: ir.IRBuilder, bits: Any) -> Any:
    """The bits of float32 as those of bfloat16, as llvm_intrinsics.narrow."""

    def words(value: int) -> Any:
        return ir.Constant(_WORDS, [value] * LANES)

    odd = builder.and_(builder.lshr(bits, words(16)), words(1))
    rounded = builder.add(bits, builder.add(odd, words(0x7FFF)))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, words(0x7FFFFFFF)), words(0x7F800000))
    upper = builder.lshr(builder.select(is_nan, words(0x7FC00000), rounded), words(16))
    return builder.trunc(upper, _HALVES)


def read_lanes(builder: ir.IRBuilder, pointer: Any, offset: int) -> Any:
    """LANES float32 numbers from a pointer to float32, float16 or the bits of bfloat16."""
    at, kind = builder.gep(pointer, [ir.Constant(_I64, offset)]), ir.VectorType(pointer.type.pointee, LANES)
    wide = kind == _FLOATS
    found = builder.load(builder.bitcast(at, kind.as_pointer()), align=4 if wide else 2)
    return found if wide else _widened(builder, found)


def _widened(builder: ir.IRBuilder, halves: Any) -> Any:
    if halves.type.element == ir.HalfType():
        return builder.fpext(halves, _FLOATS)
    words = builder.shl(builder.zext(halves, _WORDS), ir.Constant(_WORDS, [16] * LANES))
    return builder.bitcast(words, _FLOATS)


def broadcast(builder: ir.IRBuilder, number: Any) -> Any:
    """A vector with `number` in all lanes."""
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    one = builder.insert_element(undefined, number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_WORDS, [0] * LANES))


def call(builder: ir.IRBuilder, name: str, result: Any, *arguments: Any) -> Any:
    """Call an LLVM intrinsic by its name. A reduction may be reordered."""
    kind = ir.FunctionType(result, [each.type for each in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments, fastmath=_FAST if "reduce.f" in name else ())


def loop(builder: ir.IRBuilder, count: Any, before: list[Any], body: Any) -> list[Any]:
    """Run `sums = body(i, sums)` for each i below `count`, in registers, from `before` on; the last sums."""
    entry, inside, behind = (
        builder.block,
        builder.append_basic_block("loop"),
        builder.append_basic_block("behind"),
    )
    zero = ir.Constant(_I64, 0)
    builder.cbranch(builder.icmp_signed(">", count, zero), inside, behind)
    builder.position_at_end(inside)
    index = builder.phi(_I64)
    sums = [builder.phi(each.type) for each in before]
    found = body(index, sums)
    end = builder.block  # another block if the body has a loop
    following = builder.add(index, ir.Constant(_I64, 1))
    builder.cbranch(builder.icmp_signed("<", following, count), inside, behind)
    index.add_incoming(zero, entry)
    index.add_incoming(following, end)
    for each, start, after in zip(sums, before, found, strict=True):
        each.add_incoming(start, entry)
        each.add_incoming(after, end)
    builder.position_at_end(behind)
    last = [builder.phi(each.type) for each in before]
    for each, start, after in zip(last, before, found, strict=True):
        each.add_incoming(start, entry)
        each.add_incoming(after, end)
    return last
