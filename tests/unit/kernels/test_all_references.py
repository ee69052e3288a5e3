"""Kernel references against plain loops in float64, and the products' shortcuts against F.linear."""

from __future__ import annotations

import weakref

import pytest
import torch
from support.executor.references import write_rows

import kernels.cpu_jit
from kernels.attention import attend_decode, attend_prefill, copy_blocks, gather_kv, write_kv
from kernels.elementwise import add_rms_norm, apply_rope, rope_table, swiglu, swiglu_by_row
from services.executor.checkpoint.stored import Dense
from services.executor.cpu.linear import ROW_TILE, Products, kernel_rows

BLOCKS, LAYERS, TOKENS, KV_HEADS, DIM, HEADS = 12, 2, 4, 2, 8, 6


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention_by_loops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One query `[heads, dim]` over `[tokens, kv_heads, dim]`, float64."""
    out = torch.empty(HEADS, DIM, dtype=torch.float64)
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = key[:, shared].double() @ query[head].double() / DIM**0.5
        out[head] = scores.softmax(0) @ value[:, shared].double()
    return out


def in_order(kv: torch.Tensor, layer: int, which: int, table: list[int], tokens: int) -> torch.Tensor:
    return torch.cat([kv[block, layer, which] for block in table])[:tokens]


def test_written_rows_are_where_the_layout_puts_them() -> None:
    kv = torch.zeros(BLOCKS, LAYERS, 2, TOKENS, KV_HEADS, DIM)
    blocks, offsets = torch.tensor([7, 3, 7]), torch.tensor([0, 2, 3])
    rows = write_rows(kv, blocks, offsets)
    key, value = normal(3, KV_HEADS, DIM), normal(3, KV_HEADS, DIM, seed=1)
    write_kv(kv, rows[1], key, value)
    for i, (block, offset) in enumerate([(7, 0), (3, 2), (7, 3)]):
        assert torch.equal(kv[block, 1, 0, offset], key[i])
        assert torch.equal(kv[block, 1, 1, offset], value[i])
    assert kv.count_nonzero() == key.numel() + value.numel()


def test_gather_reads_blocks_in_table_order_and_copies_move_all_layers() -> None:
    kv = normal(BLOCKS, LAYERS, 2, TOKENS, KV_HEADS, DIM)
    key, value = gather_kv(kv, 1, torch.tensor([[5, 2], [9, 0]]))
    assert torch.equal(key[1].transpose(0, 1), in_order(kv, 1, 0, [9, 0], 8))
    assert torch.equal(value[0].transpose(0, 1), in_order(kv, 1, 1, [5, 2], 8))
    before = kv.clone()
    copy_blocks(kv, torch.tensor([5, 1]), torch.tensor([1, 8]))  # reads come before writes
    assert torch.equal(kv[1], before[5])
    assert torch.equal(kv[8], before[1])


def test_decode_attention_equals_loops_for_rows_of_unequal_length() -> None:
    kv = normal(BLOCKS, LAYERS, 2, TOKENS, KV_HEADS, DIM)
    tables, lengths = [[3, 8, 1], [10, 2, 11]], [10, 5]
    query = normal(2, HEADS, DIM, seed=4)
    mask = torch.where(torch.arange(10) < torch.tensor(lengths)[:, None], 0.0, -torch.inf)[:, None, None]
    found = attend_decode(query, kv, 1, torch.tensor(tables), mask)
    for row, length in enumerate(lengths):
        key, value = (in_order(kv, 1, which, tables[row], length) for which in (0, 1))
        torch.testing.assert_close(
            found[row].double(), attention_by_loops(query[row], key, value), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("start", [0, 5])
def test_prefill_attention_equals_loops(start: int) -> None:
    kv = normal(BLOCKS, LAYERS, 2, TOKENS, KV_HEADS, DIM)
    table, chunk = [6, 0, 9], 6
    query = normal(chunk, HEADS, DIM, seed=5)
    end = start + chunk
    allowed = torch.arange(end) <= torch.arange(start, end)[:, None]
    mask = torch.where(allowed, 0.0, -torch.inf) if start else None
    found = attend_prefill(query, kv, 0, torch.tensor(table), mask)
    for i in range(chunk):
        key, value = (in_order(kv, 0, which, table, start + i + 1) for which in (0, 1))
        torch.testing.assert_close(
            found[i].double(), attention_by_loops(query[i], key, value), atol=1e-6, rtol=0
        )


def test_rope_rotates_pairs_of_halves_as_complex_numbers() -> None:
    frequencies = torch.tensor([1.0, 0.3, 0.02, 0.001], dtype=torch.float64)
    x = normal(5, 3, DIM)
    positions = torch.tensor([0, 1, 17, 300, 2])
    found = apply_rope(x, rope_table(frequencies, 301)[positions])
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    turned = pairs * torch.exp(1j * torch.outer(positions.double(), frequencies))[:, None]
    torch.testing.assert_close(found.double(), torch.cat((turned.real, turned.imag), -1), atol=1e-5, rtol=0)


def test_norm_and_gate_are_their_formulas() -> None:
    x, residual, weight = normal(4, 24), normal(4, 24, seed=1), normal(24, seed=2)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    wide = total.double()
    wanted = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), wanted, atol=1e-5, rtol=0)
    gate, up = x[:, :12].double(), x[:, 12:].double()
    torch.testing.assert_close(swiglu(x).double(), gate / (1 + torch.exp(-gate)) * up, atol=1e-6, rtol=0)
    torch.testing.assert_close(swiglu_by_row(x), swiglu(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 21, 80])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_equal_the_reference(
    dtype: torch.dtype, rows: int, deterministic: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.cpu_jit, "available", lambda: compiled)
    weight, bias = normal(1500, 800).to(dtype), normal(1500, seed=1).to(dtype)  # more than one slice to widen
    padded = -(-rows // ROW_TILE) * ROW_TILE if deterministic else rows
    x = normal(padded, 800, seed=2).to(dtype)
    found = Products(dtype, x.device, deterministic=deterministic).linear(Dense.of(weight), bias)(x)
    assert found.is_contiguous()
    wanted = x.double() @ weight.double().t() + bias.double()
    limit = 1e-3 if dtype == torch.float32 else 1.0  # bf16 rounds sums of about 100 to 0.5
    torch.testing.assert_close(found.double(), wanted, atol=limit, rtol=0)


def test_a_packed_product_lets_go_of_the_plain_weight() -> None:
    weight, x = normal(40, 24), normal(21, 24, seed=1)
    wanted, plain = x.double() @ weight.double().t(), weakref.ref(weight)
    product = Products(torch.float32, x.device, deterministic=False).linear(Dense.of(weight))
    del weight
    assert plain() is None
    torch.testing.assert_close(product(x).double(), wanted, atol=1e-4, rtol=0)


def test_a_packed_product_has_few_kernels_and_little_padding() -> None:
    sizes = [kernel_rows(rows) for rows in range(1, 257)]
    assert sizes[:32] == list(range(1, 33))
    assert [kernel_rows(rows) for rows in (33, 64, 65, 100, 129, 256)] == [36, 64, 72, 104, 144, 256]
    assert len(set(sizes)) == 56
    assert all(rows <= size < rows * 9 / 8 for rows, size in enumerate(sizes, 1))
