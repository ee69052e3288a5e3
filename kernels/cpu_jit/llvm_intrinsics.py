"""LLVM intrinsics for kernels that Numba lacks: addresses, bfloat16, work shared between threads.

bfloat16 is the upper half of a float32: a shift widens it, which costs next to nothing compared with the
read. Each function below is a few instructions, which are inlined into the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from time import CLOCK_MONOTONIC
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

import kernels.cpu_jit

if _kind := kernels.cpu_jit.cpu_kind():  # before the first `njit`, which chooses what Numba compiles for
    config.CPU_NAME, config.CPU_FEATURES = _kind.llvm_cpu, _kind.llvm_features

# Vectors need both: sums may be reordered, and a division by zero does not raise. No quotient or root is
# estimated (`arcp`, `afn`): the estimates of two makers of CPUs have other bits. Inlined by LLVM: else the
# process that compiles a kernel calls the function's own code, and one that reads the kernel from the cache
# calls the copy there, which LLVM has optimised with the kernel. Their sums differ in the last bits.
fast = njit(fastmath={"nnan", "ninf", "nsz", "contract", "reassoc"}, error_model="numpy", forceinline=True)
# Without reordering, and NaN stays NaN.
strict = njit(fastmath={"contract", "nsz"}, error_model="numpy", forceinline=True)


def emitted(signature: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Makes an intrinsic of a function that emits its instructions: of the builder and the arguments, to a
    value or None. `signature`: from the arguments' types."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(typing: Any, *arguments: types.Type) -> Any:
            def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Any) -> Any:
                found = emit(builder, *values)
                return context.get_dummy_value() if found is None else found

            return signature(*arguments), generate

        emits: Any = update_wrapper(typed, emit)
        emits.__signature__ = inspect.signature(emit)  # as many parameters: the builder's stands for `typing`
        return intrinsic(emits)

    return decorate


_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_F16_MAX = 65504.0  # the largest float16


class _Float16(types.Type):  # type: ignore[misc]  # numba has no types
    """Numba has float16 on GPUs only."""


@register_model(_Float16)
class _Float16Model(models.PrimitiveModel):  # type: ignore[misc]  # the same
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.HalfType())


float16 = _Float16("float16")


def _pointer(element: types.Type, code: ir.Type) -> Any:
    @emitted(lambda address: types.CPointer(element)(types.int64))
    def typed(builder: ir.IRBuilder, address: Any) -> Any:
        return builder.inttoptr(address, code.as_pointer())

    return typed


bf16_at = _pointer(types.uint16, _I16)  # address -> pointer
f16_at = _pointer(float16, ir.HalfType())
i8_at = _pointer(types.int8, ir.IntType(8))
i32_at = _pointer(types.int32, _I32)
f32_at = _pointer(types.float32, _F32)
i64_at = _pointer(types.int64, _I64)


@emitted(lambda pointer, count: pointer(pointer, types.int64))
def offset_by(builder: ir.IRBuilder, pointer: Any, count: Any) -> Any:
    """The pointer to the element `count` after `pointer`."""
    return builder.gep(pointer, [count])


def _cast(element: types.Type, code: ir.Type) -> Any:
    @emitted(types.CPointer(element))
    def cast(builder: ir.IRBuilder, pointer: Any) -> Any:
        return builder.bitcast(pointer, code.as_pointer())

    return cast


# The same pointer, to these elements.
as_f32, as_i32, as_i64 = _cast(types.float32, _F32), _cast(types.int32, _I32), _cast(types.int64, _I64)


def on_stack(size: int) -> Any:
    """A function that returns a pointer to `size` bytes, which live until its caller returns."""

    @emitted(types.CPointer(types.int8))
    def memory(builder: ir.IRBuilder) -> Any:
        with builder.goto_entry_block():  # not by cgutils, which would store zeros
            found = builder.alloca(ir.IntType(8), ir.Constant(_I64, size))
            found.align = 64  # a cache line
            return found

    return memory


@emitted(lambda address, pointer: types.void(types.int64, pointer))
def call_at(builder: ir.IRBuilder, address: Any, pointer: Any) -> None:
    """Call the function at `address` with `pointer`."""
    kind = ir.FunctionType(ir.VoidType(), [pointer.type])
    builder.call(builder.inttoptr(address, kind.as_pointer()), [pointer])


@emitted(lambda address, pointer, second: types.void(types.int64, pointer, second))
def call_with(builder: ir.IRBuilder, address: Any, pointer: Any, second: Any) -> None:
    """Call the function at `address` with two pointers."""
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, second.type])
    builder.call(builder.inttoptr(address, kind.as_pointer()), [pointer, second])


@emitted(lambda address: types.int64(types.int64))
def clock_ns(builder: ir.IRBuilder, address: Any) -> Any:
    """The monotonic clock in ns, by the `clock_gettime` at `address`."""
    spec = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))  # seconds, nanoseconds
    kind = ir.FunctionType(_I32, [_I32, spec.type])
    builder.call(builder.inttoptr(address, kind.as_pointer()), [ir.Constant(_I32, CLOCK_MONOTONIC), spec])
    seconds, rest = (builder.extract_value(builder.load(spec), place) for place in (0, 1))
    return builder.add(builder.mul(seconds, ir.Constant(_I64, 10**9)), rest)


@emitted(lambda pointer: types.int64(types.CPointer(types.int64)))
def fetch_add(builder: ir.IRBuilder, pointer: Any) -> Any:
    """The number at `pointer`, which is incremented atomically: every thread gets another number."""
    return builder.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "acq_rel")


@emitted(lambda pointer, number: types.void(pointer, types.int64))
def publish(builder: ir.IRBuilder, pointer: Any, number: Any) -> None:
    """Store a number that other threads look at, after all that this thread has written, and before its next
    `fetch_add`."""
    builder.store_atomic(number, pointer, "release", 8)


@emitted(lambda pointer, number, most: types.boolean(pointer, types.int64, types.int64))
def look_past(builder: ir.IRBuilder, pointer: Any, number: Any, most: Any) -> Any:
    """Look at the number at `pointer`, which another thread publishes, until it is another than `number`,
    `most` times at most. Returns whether it was."""
    entry, look, pause, end = builder.block, *map(builder.append_basic_block, ("look", "pause", "end"))
    builder.branch(look)
    builder.position_at_end(look)
    looks = builder.phi(_I64)
    passed = builder.icmp_signed("!=", builder.load_atomic(pointer, "acquire", 8), number)
    last = builder.icmp_signed(">=", looks, most)
    builder.cbranch(builder.or_(passed, last), end, pause)
    builder.position_at_end(pause)
    nothing = ir.FunctionType(ir.VoidType(), [])
    builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), nothing), [])
    looks.add_incoming(ir.Constant(_I64, 1), entry)
    looks.add_incoming(builder.add(looks, ir.Constant(_I64, 1)), pause)
    builder.branch(look)
    builder.position_at_end(end)
    return passed


@emitted(lambda shifted: types.float32(types.float32))
def power_of_two(builder: ir.IRBuilder, shifted: Any) -> Any:
    """2^n for the float32 1.5 * 2^23 + n, with n in its last bits; n from -126 to 127."""
    bits = builder.bitcast(shifted, _I32)
    exponent = builder.shl(builder.add(bits, ir.Constant(_I32, 127)), ir.Constant(_I32, 23))
    return builder.bitcast(exponent, _F32)


@emitted(lambda bits: types.float32(types.int32))
def float_of(builder: ir.IRBuilder, bits: Any) -> Any:
    """The float32 with these bits."""
    return builder.bitcast(bits, _F32)


@emitted(types.float32)
def widen(builder: ir.IRBuilder, value: Any) -> Any:
    """A stored bfloat16 (its bits as uint16), float16 or float32, as float32."""
    if value.type == _F32:
        return value
    if value.type == ir.HalfType():
        return builder.fpext(value, _F32)
    return builder.bitcast(builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16)), _F32)


@emitted(lambda value, like: like(like if value == like else types.float32, like))
def narrow(builder: ir.IRBuilder, value: Any, like: Any) -> Any:
    """A float32 in the stored type of `like`: rounded to nearest, ties to even; NaN stays NaN. A number of
    that type stays as it is."""
    if value.type == like.type:
        return value
    if like.type == ir.HalfType():
        return to_float16(builder, value)
    number = [ir.Constant(_I32, n) for n in (16, 1, 0x7FFF, 0x7FFFFFFF, 0x7F800000, 0x7FC00000)]
    sixteen, one, half, positive, infinite, nan = number
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    rounded = builder.add(bits, builder.add(odd, half))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, positive), infinite)
    return builder.trunc(builder.lshr(builder.select(is_nan, nan, rounded), sixteen), _I16)


def to_float16(builder: ir.IRBuilder, value: Any) -> Any:
    """A float32 or a vector of them, saturated: what is stored is finite, or NaN."""
    lanes = getattr(value.type, "count", 0)

    def like(number: Any, kind: ir.Type) -> Any:
        return (
            ir.Constant(ir.VectorType(kind, lanes), [number] * lanes) if lanes else ir.Constant(kind, number)
        )

    most, least = like(_F16_MAX, _F32), like(-_F16_MAX, _F32)
    value = builder.select(builder.fcmp_ordered(">", value, most), most, value)
    value = builder.select(builder.fcmp_ordered("<", value, least), least, value)
    half = ir.HalfType()
    return builder.fptrunc(value, ir.VectorType(half, lanes) if lanes else half)


_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_LEAST, _MOST, _ONE = np.float32(-87.0), np.float32(88.0), np.float32(1.0)
_TO_INTEGER = np.float32(1.5 * 2**23)  # a float32 of this size has no room for a fraction


@strict
def exp(x: Any) -> Any:
    """e^x of a float32, to 2 units in the last place between -87 and 88; outside x is clamped. A polynomial,
    which LLVM vectorises in loops, unlike the library's function (Moshier, Cephes)."""
    x = min(max(x, _LEAST), _MOST)
    shifted = x * _LOG2E + _TO_INTEGER
    power = shifted - _TO_INTEGER
    rest = x - power * _LN2_HIGH - power * _LN2_LOW
    tail = (((((_P0 * rest + _P1) * rest) + _P2) * rest + _P3) * rest + _P4) * rest + _P5
    return (tail * rest * rest + rest + _ONE) * power_of_two(shifted)
