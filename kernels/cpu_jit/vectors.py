"""Loops for attention that keep their sums in vector registers.

A compiler keeps such sums in memory: it cannot prove that a loop does not read its own writes, or that a few
rows of 64 sums fit. Vectors have 16 lanes of float32; LLVM uses two or four shorter vectors on other
machines. `heads` and `dim` are constants of a compiled kernel. `dim` is a multiple of LANES.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

LANES = 16
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_HALVES, _WORDS = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(_I32, LANES)
_FAST = ("fast",)


@intrinsic(prefer_literal=True)
def dots(
    typing: Any, query: Any, keys: Any, stride: Any, tokens: Any, out: Any, apart: Any, heads: Any, dim: Any
) -> Any:
    """Store the dot products of `query[head * dim:]` and `keys[token * stride:]` over `dim` numbers to
    `out[head * apart + token]`, for each of `heads` and `tokens`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        query, keys, stride, tokens, out, apart = args[:6]
        parts = range(dim.literal_value // LANES)
        wanted = [
            [read_lanes(builder, query, head * dim.literal_value + part * LANES) for part in parts]
            for head in range(heads.literal_value)
        ]

        def body(token: Any, sums: list[Any]) -> list[Any]:
            key = builder.gep(keys, [builder.mul(token, stride)])
            read = [read_lanes(builder, key, part * LANES) for part in parts]
            for head, own in enumerate(wanted):
                products = [builder.fmul(q, k, flags=_FAST) for q, k in zip(own, read, strict=True)]
                lanes = products[0]
                for product in products[1:]:
                    lanes = builder.fadd(lanes, product, flags=_FAST)
                zero = ir.Constant(ir.FloatType(), 0.0)
                found = call(builder, "llvm.vector.reduce.fadd.v16f32", zero.type, zero, lanes)
                at = builder.add(builder.mul(apart, ir.Constant(_I64, head)), token)
                builder.store(found, builder.gep(out, [at]))
            return sums

        loop(builder, tokens, [], body)
        return context.get_dummy_value()

    return types.void(query, keys, stride, tokens, out, apart, heads, dim), generate


@intrinsic(prefer_literal=True)
def add_weighted(
    typing: Any,
    values: Any,
    stride: Any,
    tokens: Any,
    weights: Any,
    apart: Any,
    out: Any,
    heads: Any,
    dim: Any,
) -> Any:
    """Add `weights[head * apart + token]` times `values[token * stride:]`, `dim` numbers, to `out[head *
    dim:]`, for each of `heads` and `tokens`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        values, stride, tokens, weights, apart, out = args[:6]
        parts = range(dim.literal_value // LANES)
        places = [
            head * dim.literal_value + part * LANES for head in range(heads.literal_value) for part in parts
        ]
        before = [read_lanes(builder, out, place) for place in places]

        def body(token: Any, sums: list[Any]) -> list[Any]:
            value = builder.gep(values, [builder.mul(token, stride)])
            read = [read_lanes(builder, value, part * LANES) for part in parts]
            found: list[Any] = []
            for head in range(heads.literal_value):
                at = builder.add(builder.mul(apart, ir.Constant(_I64, head)), token)
                weight = broadcast(builder, builder.load(builder.gep(weights, [at])))
                for part in parts:
                    product = builder.fmul(weight, read[part], flags=_FAST)
                    found.append(builder.fadd(sums[len(found)], product, flags=_FAST))
            return found

        for place, sums in zip(places, loop(builder, tokens, before, body), strict=True):
            target = builder.bitcast(builder.gep(out, [ir.Constant(_I64, place)]), _FLOATS.as_pointer())
            builder.store(sums, target, align=4)
        return context.get_dummy_value()

    return types.void(values, stride, tokens, weights, apart, out, heads, dim), generate


def read_lanes(builder: ir.IRBuilder, pointer: Any, offset: int) -> Any:
    """LANES float32 numbers from a pointer to float32 or to the bits of bfloat16."""
    at = builder.gep(pointer, [ir.Constant(_I64, offset)])
    if pointer.type.pointee == ir.FloatType():
        return builder.load(builder.bitcast(at, _FLOATS.as_pointer()), align=4)
    halves = builder.load(builder.bitcast(at, _HALVES.as_pointer()), align=2)
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
