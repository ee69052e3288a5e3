"""Products with weights in blocks: against float64, bit-equal by row, and as on an AVX2 machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from kernels.cpu_jit.block_microkernel import FACTS, PANEL, SCALE, VNNI, Format, x_bytes
from kernels.cpu_jit.block_weights import FORMATS, BlockMatrix, Blocks, can_pack, pack
from kernels.cpu_jit.packed_weights import multiply

AVX2 = {"NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma,+f16c"}
COLUMNS = 96
WAYS = [(kind, terms) for terms in (2, 1) for kind in FORMATS if terms == 1 or not kind.by_row]

pytestmark = pytest.mark.skipif(not can_pack(PANEL, 32), reason="no AVX2")


def largest(kind: Format) -> int:
    """The largest number that a file of this format stores."""
    if kind.bits == 4:
        return 15
    return 31 if kind.minimum else 255


def random_blocks(kind: Format, rows: int, columns: int = COLUMNS) -> Blocks:
    numbers = torch.randint(0, largest(kind) + 1, (rows, columns), dtype=torch.uint8)
    if kind.by_row:
        return Blocks(kind, numbers, torch.rand(rows, 1) * 0.02)
    scales = (torch.rand(rows, columns // kind.columns) * 0.02).half()
    minima = (-torch.rand(rows, columns // 32) * 0.1).half() if kind.minimum else None
    return Blocks(kind, numbers, scales, minima)


def in_int8(x: Tensor, matrix: BlockMatrix) -> Tensor:
    """`x` as the kernel quantises it, few rows at a time: float64."""
    return torch.cat([few_in_int8(rows, matrix) for rows in x.split(8)])


def few_in_int8(x: Tensor, matrix: BlockMatrix) -> Tensor:
    out = torch.empty(len(x), matrix.height)
    quantise, _ = matrix.calls(x, out, [matrix.table.data_ptr()])
    quantise.run()
    assert quantise.scratch is not None
    blocks = x.numel() // 32
    facts, numbers = quantise.scratch.split([4 * FACTS * blocks, x_bytes(matrix.terms) * blocks])
    scales = facts.view(torch.float32).view(blocks, FACTS)[:, SCALE].double()
    if not VNNI:  # even before odd ones
        shorts, rest = numbers.view(blocks, -1).split([64, 32 * (2 - matrix.terms)], 1)
        found = shorts.contiguous().view(torch.int16).view(blocks, 8, 2, 2).transpose(2, 3).double()
        if matrix.terms == 1:
            assert torch.equal(rest.contiguous().view(torch.int8).double(), found.reshape(blocks, 32))
    else:
        upper, *lower = numbers.view(torch.int8).view(blocks, matrix.terms, 32).double().unbind(1)
        found = 256 * upper + lower[0] if lower else upper
    found = (found.reshape(blocks, 32) * scales[:, None]).view(x.shape)
    assert ((found - x.double()).view(blocks, 32).abs() <= 0.51 * scales[:, None]).all()
    largest_number = 127 * 257 if matrix.terms == 2 else 127
    assert (scales <= 1.01 * x.double().view(blocks, 32).abs().amax(1) / largest_number).all()
    return found


@pytest.mark.parametrize(("kind", "terms"), WAYS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 25, 33, 300])  # with AMX in tiles: 25 in 4 bits, 33, 300
def test_a_product_is_that_of_float64(kind: Format, terms: int, rows: int) -> None:
    """Joined matrices of two formats, but for 25 rows, and a height that is no multiple of a panel."""
    torch.manual_seed(rows)
    second = kind if kind.by_row or rows == 25 else FORMATS[2]
    matrices = [random_blocks(kind, 100), random_blocks(second, 64)]
    packed = pack(matrices, torch.float32, terms)
    values = torch.cat([each.values() for each in matrices]).double()
    for dtype in (torch.float32, torch.bfloat16)[: 1 + kind.by_row]:
        x = torch.randn(rows, COLUMNS).to(dtype)
        found = multiply(x, packed, torch.float32)
        wanted = in_int8(x, packed) @ values.T
        assert (found.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        if kind.by_row:
            rounded = multiply(x, pack(matrices, torch.bfloat16), torch.bfloat16)
            assert torch.equal(rounded, found.bfloat16())
        each = [multiply(x[row : row + 1], packed, torch.float32) for row in range(rows)]
        assert torch.equal(torch.cat(each), found), "bits depend on the other rows"


@pytest.mark.parametrize(("kind", "terms"), WAYS, ids=str)
@pytest.mark.parametrize("number", [0, 1.0])
def test_the_largest_numbers_do_not_saturate(kind: Format, terms: int, number: float) -> None:
    numbers = torch.full((PANEL, COLUMNS), int(number * largest(kind)), dtype=torch.uint8)
    ones = torch.ones(PANEL, 1 if kind.by_row else COLUMNS // kind.columns)
    ones = ones if kind.by_row else ones.half()
    minima = torch.ones(PANEL, COLUMNS // 32).half() if kind.minimum else None
    matrix = Blocks(kind, numbers, ones, minima)
    packed = pack([matrix], torch.float32, terms)
    for x in (torch.ones(4, COLUMNS), -torch.ones(4, COLUMNS), -torch.ones(40, COLUMNS)):
        wanted = in_int8(x, packed) @ matrix.values().double().T
        found = multiply(x, packed).double()
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max() + 1e-9


def test_row_of_zeros_gives_zeros() -> None:
    packed = pack([random_blocks(FORMATS[1], PANEL)], torch.float32)
    assert not multiply(torch.zeros(2, COLUMNS), packed).any()


@pytest.mark.parametrize(("kind", "terms"), WAYS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_stays_visible(kind: Format, terms: int, bad: float) -> None:
    """In its own row, in every product: logits that are not finite fail the sequence."""
    packed = pack([random_blocks(kind, PANEL)], torch.float32, terms)
    for rows in (3, 41):
        x = torch.randn(rows, COLUMNS)
        x[1] = torch.where(torch.arange(COLUMNS) == 40, bad, x[1])
        found = multiply(x, packed, torch.float32)
        assert not found[1].isfinite().any()
        assert found[::2].isfinite().all()


@pytest.mark.skipif(not VNNI, reason="this machine's own kernels are those of AVX2")
def test_kernels_of_an_avx2_machine_give_the_same_result() -> None:
    """The kernels of an AVX2 machine, compiled and run here."""
    code = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", __file__]
    ran = subprocess.run(code, env={**os.environ, **AVX2}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "own kernels are those of AVX2" in ran.stdout  # this test is skipped there
