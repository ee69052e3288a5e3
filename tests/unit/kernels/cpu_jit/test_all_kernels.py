"""Kernels compiled for the CPU against torch's operators, which are their meaning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.executor.references import write_rows
from torch import Tensor

import kernels.cpu_jit
from kernels.attention import ref as attention_ref
from kernels.attention import write_kv
from kernels.cpu_jit import attention, block_weights, packed_weights, rowwise, thread_team
from kernels.cpu_jit import gemm_few_rows as matmul
from kernels.elementwise import ref as gate_ref
from kernels.elementwise import ref as norm_ref
from kernels.elementwise import ref as rope_ref

DTYPES = [torch.float32, torch.bfloat16]
KV_DTYPES = (*DTYPES, torch.float16)


def beside(kv: torch.dtype) -> torch.dtype:
    """What is computed in over KV of that dtype."""
    return torch.float32 if kv == torch.float16 else kv


ROWS = [1, 3, 32, 70]


def far(found: Tensor, wanted: Tensor) -> float:
    """The largest difference in units of the last place of the dtype, at the size of what is wanted."""
    last = torch.finfo(found.dtype).eps * wanted.double().abs().clamp(min=1.0)
    return float(((found.double() - wanted.double()).abs() / last).max())


@pytest.fixture(autouse=True)
def _drawn() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_norm_after_a_sum_equals_the_reference(rows: int, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(2 * rows + 1, 72).to(dtype).split([rows, rows, 1])
    wanted = norm_ref.add_rms_norm(x, residual, weight[0], 1e-5)
    found = rowwise.add_rms_norm(x, residual.clone(), weight[0], 1e-5)
    assert far(found[0], wanted[0]) <= 4
    assert found[1].equal(wanted[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_equals_the_reference(rows: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(rows, 2 * 77).to(dtype) * 8
    assert far(rowwise.swiglu(gate_up), gate_ref.swiglu(gate_up.float()).to(dtype)) <= 8


def test_the_gate_of_extreme_numbers() -> None:
    gates = torch.tensor([-1e30, -200.0, -88.5, -87.0, 0.0, 87.0, 1e30])
    found = rowwise.swiglu(torch.cat((gates, torch.ones(7)))[None])[0]
    assert found.allclose(torch.nn.functional.silu(gates), rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_products_of_few_rows_equal_the_reference(rows: int) -> None:
    x, weight = torch.randn(rows, 100).bfloat16(), torch.randn(131, 100).bfloat16()
    wanted = x.double() @ weight.double().t()
    assert far(matmul.few_rows(x, weight), wanted) <= 1


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rotation_and_the_way_into_the_cache(rows: int, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, layers, block_tokens = 6, 2, 16, 3, 4
    kv = torch.randn(rows + 1, layers, 2, block_tokens, kv_heads, dim).to(dtype)
    wanted_kv, x = kv.clone(), torch.randn(rows, heads + 2 * kv_heads, dim).to(beside(dtype))
    table = rope_ref.rope_table(torch.rand(dim // 2, dtype=torch.float64), 500)
    rotation = table[torch.randint(0, 500, (rows,))]
    to = write_rows(kv, torch.randperm(rows + 1)[:rows], torch.randint(0, block_tokens, (rows,)))[1]
    rotated = rope_ref.apply_rope(x[:, : heads + kv_heads], rotation)
    write_kv(wanted_kv, to, rotated[:, heads:], x[:, heads + kv_heads :])
    found = rowwise.rotate_and_write(x.clone(), rotation, kv, to, heads)
    assert far(found, rotated[:, :heads]) <= 1
    assert far(kv, wanted_kv) <= 1


def rows_of(tables: Tensor, *rows: tuple[int, int]) -> attention.Sequences:
    """Rows `(before, count)` of a sequence each."""
    starts, counts = np.array(rows).T
    firsts = np.cumsum(counts) - counts
    return attention.Sequences(np.ascontiguousarray(tables.numpy()), firsts, starts, counts)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 128), (5, 1, 96)])
def test_attention_over_rows_of_any_length(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    rows, layers, block_tokens, blocks = 7, 2, 4, 6
    kv = torch.randn(rows * blocks, layers, 2, block_tokens, kv_heads, dim).to(dtype)
    tables = torch.randperm(rows * blocks).view(rows, blocks)
    lengths = torch.tensor([1, 3, 4, 5, 17, 23, 24])
    of_all = torch.randn(rows, heads + 2 * kv_heads, dim).to(beside(dtype))
    query = of_all[:, :heads]  # as it comes: a view of the product
    mask = torch.zeros(rows, 24).masked_fill(torch.arange(24) >= lengths[:, None], -torch.inf)
    wanted = attention_ref.attend_decode(
        query.double().contiguous(), kv.double(), 1, tables, mask[:, None, None].double()
    )
    befores = [(n - 1, 1) for n in lengths.tolist()]
    found = attention.attend(query, kv, 1, rows_of(tables, *befores))
    assert far(found, wanted) <= (1 if dtype == torch.bfloat16 else 16)
    for row, before in enumerate(befores):  # many sequences take all KV heads of one at once
        alone = attention.attend(query[row : row + 1], kv, 1, rows_of(tables[row : row + 1], before))
        assert alone.equal(found[row : row + 1])


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_tokens"), [(9, 3, 64, 16), (2, 2, 48, 20)])
def test_a_token_has_the_same_attention_in_any_chunk(
    heads: int, kv_heads: int, dim: int, block_tokens: int, dtype: torch.dtype
) -> None:
    """Alone, in chunks of any size, and beside other sequences; over several panels."""
    tokens = 300
    blocks = -(-tokens // block_tokens)
    kv = torch.randn(2 * blocks, 1, 2, block_tokens, kv_heads, dim).to(dtype)
    query = torch.randn(tokens, heads, dim).to(beside(dtype))
    own, other = torch.randperm(2 * blocks).view(2, blocks)
    whole = attention.attend(query, kv, 0, rows_of(own[None], (0, tokens)))
    keys, values = (kv[own][:, 0, i].flatten(0, 1)[:tokens].double() for i in (0, 1))
    scores = torch.einsum("tgsd,cgd->gstc", query.double().view(tokens, kv_heads, -1, dim), keys) / dim**0.5
    scores += torch.full((tokens, tokens), -torch.inf).triu(1)
    wanted = torch.einsum("gstc,cgd->tgsd", scores.softmax(-1), values).reshape(query.shape)
    assert far(whole, wanted) <= (2 if dtype == torch.bfloat16 else 32)
    parts = [(0, 1), (1, 5), (6, 122), (128, 1), (129, 170), (299, 1)]
    for before, count in parts:
        rows = query[before : before + count]
        alone = attention.attend(rows, kv, 0, rows_of(own[None], (before, count)))
        assert alone.equal(whole[before : before + count])
        both = torch.cat((query[:77], rows))
        found = attention.attend(both, kv, 0, rows_of(torch.stack((other, own)), (200, 77), (before, count)))
        assert found[77:].equal(alone)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_attention_of_broken_numbers_is_no_number(dtype: torch.dtype) -> None:
    kv, query = torch.randn(2, 1, 2, 16, 1, 64).to(dtype), torch.randn(4, 3, 64).to(beside(dtype))
    kv[0, 0, 0, 2], query[0, 0, 0] = torch.nan, torch.nan
    found = attention.attend(query, kv, 0, rows_of(torch.tensor([[0]]), (0, 4)))
    assert found.isnan().all(-1).equal(torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]).bool())


def test_the_softmax_of_scores_far_apart() -> None:
    """The largest score may come in any panel; the others vanish without an overflow."""
    kv, query = torch.zeros(20, 1, 2, 16, 1, 16), torch.ones(1, 1, 16)
    kv[:, 0, 1] = torch.arange(320.0).view(20, 16, 1, 1)
    for token, score in ((5, 300.0), (140, 1e4), (250, 1e30)):
        kv[token // 16, 0, 0, token % 16] = score
        found = attention.attend(query, kv, 0, rows_of(torch.arange(20)[None], (319, 1)))
        assert found.unique().tolist() == [token]


@pytest.mark.parametrize("more", ["", "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"])
def test_kernels_of_cpus_without_bfloat16(more: str) -> None:
    """A kernel must not use an instruction, or a function of LLVM's, that is not there: that ends the
    process."""
    needs = [each.lstrip("+") for each in more.split(",") if each]
    if not kernels.cpu_jit.has("avx2", *needs):
        pytest.skip(f"this CPU lacks {more or 'AVX2'}")
    env = {
        **os.environ,
        "NUMBA_CPU_FEATURES": f"+sse4.2,+avx,+avx2,+fma,+f16c,{more}".rstrip(","),
    }
    chosen = "rotation or any_length and 9-3-64 or norm_after or test_gate_equals_the_reference"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-k",
        chosen,
        __file__,
    ]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


def test_attention_has_kernels_for_supported_dtypes_and_sizes() -> None:
    def kv(dim: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(1, 1, 2, 4, 1, dim, dtype=dtype)

    assert attention.can_attend(kv(64, torch.float32), torch.float32)
    assert attention.can_attend(kv(64, torch.float16), torch.float32)
    assert not attention.can_attend(kv(64, torch.float16), torch.bfloat16)
    assert not attention.can_attend(kv(20, torch.float32), torch.float32)
    assert not attention.can_attend(kv(64, torch.float8_e4m3fn), torch.float32)


def test_float16_is_rounded_as_torch_does_and_saturated() -> None:
    """As the rotation stores values."""
    numbers = torch.cat(
        (torch.randn(60) * 10 ** torch.randint(-9, 5, (60,)), torch.tensor([1e5, -1e30, 65519.0, torch.inf]))
    )
    x = torch.cat((torch.zeros(1, 2, 64), numbers.view(1, 1, 64)), 1)
    kv, rotation = torch.zeros(1, 1, 2, 1, 1, 64, dtype=torch.float16), torch.ones(1, 2, 64)
    rowwise.rotate_and_write(x, rotation, kv, torch.tensor([[0], [1]]), 1)
    assert kv[0, 0, 1, 0, 0].equal(numbers.clamp(-65504, 65504).half())


def test_a_kernel_is_the_same_on_one_thread_and_without_torchs_team(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 64).bfloat16(), torch.randn(5_000, 64).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = matmul.few_rows(x, weight)
        torch.set_num_threads(1)
        alone = matmul.few_rows(x, weight)
        torch.set_num_threads(2)
        monkeypatch.setattr(thread_team, "openmp", lambda: None)
        without = matmul.few_rows(x, weight)
    finally:
        torch.set_num_threads(threads)
    assert together.equal(alone)
    assert together.equal(without)


@pytest.mark.parametrize("rows", [1, 4, 5, 21])
@pytest.mark.parametrize("height", [48, 96, 131])
def test_products_in_panels_equal_the_reference(rows: int, height: int) -> None:
    x, weight = torch.randn(rows, 100), torch.randn(height, 100)
    if kernels.cpu_jit.has("avx512f"):
        found = packed_weights.multiply(x, packed_weights.pack(weight))
        assert far(found, x.double() @ weight.double().t()) <= 64
    x, weight = x.bfloat16(), weight.bfloat16()
    if kernels.cpu_jit.has("avx512bf16"):
        found = packed_weights.multiply(x, packed_weights.pack(weight))
        assert far(found, x.double() @ weight.double().t()) <= 1
        wide = packed_weights.multiply(x, packed_weights.pack(weight), torch.float32)
        assert far(wide, x.double() @ weight.double().t()) <= 64
        assert wide.bfloat16().equal(found)


@pytest.mark.parametrize("rows", [1, 15, 16, 31, 70])
@pytest.mark.parametrize(("height", "width"), [(48, 32), (131, 96), (160, 576)])
def test_products_in_tiles_equal_the_reference(rows: int, height: int, width: int) -> None:
    """Widths that AMX's tiles divide: with AMX the same rows by other instructions."""
    if not kernels.cpu_jit.has("avx512bf16"):
        return
    x, weight = torch.randn(rows, width).bfloat16(), torch.randn(height, width).bfloat16()
    x[-1, 3] = torch.nan
    packed = packed_weights.pack(weight)
    found = packed_weights.multiply(x, packed, torch.float32)
    assert found[-1].isnan().all()
    if rows > 1:
        assert far(found[:-1], x[:-1].double() @ weight.double().t()) <= width  # sums of so many that cancel
    narrow = packed_weights.multiply(x, packed)
    assert narrow[:-1].equal(found[:-1].bfloat16())
    assert narrow[:-1].equal(torch.cat([packed_weights.multiply(row[None], packed) for row in x])[:-1])


def test_tiles_are_used_where_the_cpu_has_them_and_the_isa_limit_allows_them() -> None:
    has = kernels.cpu_jit.has("amx-tile", "amx-bf16", "avx512bf16")
    program = "from kernels.cpu_jit import amx; print(amx.usable())"
    for most, wanted in (("DEFAULT", has), ("AVX512_CORE_AMX", has), ("avx512_core_bf16", False)):
        env = {**os.environ, "ONEDNN_MAX_CPU_ISA": most}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        assert ran.stdout.strip() == str(wanted)


@pytest.mark.parametrize("rows", [1, 2, 7, 21])
@pytest.mark.parametrize("height", [48, 131])
def test_products_of_bytes_equal_the_reference(rows: int, height: int) -> None:
    if not kernels.cpu_jit.has(*kernels.cpu_jit.BYTES):
        return  # nothing calls them then: see test_bytes_are_for_shapes_of_whole_blocks
    x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(height, 96).bfloat16()
    x[0, :32] = 0  # a block without a largest number
    x[-1, 40] = 1_000  # alone in its block
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    matrix = (weight.float() / scales).round().double() * scales
    blocks = x.float().view(rows, 3, 32)
    of_x = blocks.abs().amax(2, keepdim=True) / 127
    rounded = (blocks / of_x.clamp(min=1e-30)).round().double() * of_x
    stored = [block_weights.in_int8(weight)]
    packed = block_weights.pack(stored, torch.bfloat16)
    found = packed_weights.multiply(x, packed)
    assert far(found, rounded.view(rows, 96) @ matrix.t()) <= 1
    assert found.equal(torch.cat([packed_weights.multiply(row[None], packed) for row in x]))
    wide = packed_weights.multiply(x, block_weights.pack(stored, torch.float32), torch.float32)
    assert wide.dtype == torch.float32
    assert wide.bfloat16().equal(found)


def test_bytes_are_for_shapes_of_whole_blocks() -> None:
    assert block_weights.can_pack(48, 64) == kernels.cpu_jit.has(*kernels.cpu_jit.BYTES)
    assert not block_weights.can_pack(7, 64)
    assert not block_weights.can_pack(48, 48)


def test_panels_are_for_shapes_and_dtypes_that_they_fit() -> None:
    assert not packed_weights.can_multiply(torch.empty(47, 100))
    assert not packed_weights.can_multiply(torch.empty(48, 101))
    assert not packed_weights.can_multiply(torch.empty(48, 100, dtype=torch.float16))
    assert packed_weights.can_multiply(torch.empty(48, 100)) == kernels.cpu_jit.has("avx512f")


def test_torchs_own_team_is_found() -> None:
    assert thread_team.openmp() is not None, "torch of PyPI brings an OpenMP library with this entry point"


def test_the_first_process_computes_the_same_bits_as_later_ones(tmp_path: Path) -> None:
    """The first one compiles the kernels, the second one reads them from the cache. The package has none of
    these."""
    compute = """
import hashlib, numpy as np, torch
from kernels.cpu_jit import attention, prebuilt, rowwise
prebuilt.load = lambda name: None
torch.set_num_threads(1)
torch.manual_seed(0)
kv, query = torch.randn(64, 1, 2, 16, 3, 64).bfloat16(), torch.randn(40, 9, 64).bfloat16()
tables, one, before = torch.randperm(64)[:8].repeat(2, 1).numpy(), np.array([0, 1]), np.array([50, 7])
sequences = attention.Sequences(tables, one, before, np.array([1, 39]))
found = attention.attend(query, kv, 0, sequences), rowwise.swiglu(torch.randn(37, 3072).bfloat16())
print([hashlib.sha256(each.float().numpy().tobytes()).hexdigest() for each in found])
"""
    env = {**os.environ, "HOME": str(tmp_path)}
    bits = [
        subprocess.run([sys.executable, "-c", compute], env=env, capture_output=True, check=True).stdout
        for _ in range(2)
    ]
    assert [*tmp_path.rglob("*.nbc")]
    assert bits[0] == bits[1] != b""
