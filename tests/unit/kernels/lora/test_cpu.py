"""The adapters' part of a product on a CPU, beside its definition and beside float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernels.cpu_jit
from kernels.lora import Adapted, adapt

if kernels.cpu_jit.available():
    from kernels.lora.cpu import COLUMNS, adapt_call, line_of

BOUNDS, WIDTH, LAYERS = [0, 100, 132, 164], 96, 2


def made(seed: int, rank: int, dtype: torch.dtype, scale: float) -> Adapted:
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(LAYERS, 3 * rank, WIDTH, generator=random).to(dtype)
    return Adapted(a, torch.randn(LAYERS, rank, BOUNDS[-1], generator=random).to(dtype), scale)


def run(x: torch.Tensor, out: torch.Tensor, adapters: list[Adapted | None], layer: int) -> torch.Tensor:
    lines = [[0] * COLUMNS if each is None else line_of(each) for each in adapters]
    found = out.clone()
    table, bounds = np.array(lines, np.int64), np.array(BOUNDS, np.int64)
    adapt_call(x, found, table, bounds, layer).run()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_get_what_their_adapters_add_and_rows_without_one_stay(dtype: torch.dtype) -> None:
    if not kernels.cpu_jit.available():
        return
    random = torch.Generator().manual_seed(3)
    x = torch.randn(5, WIDTH, generator=random).to(dtype)
    out = torch.randn(5, BOUNDS[-1], generator=random).to(dtype)
    one, other = made(1, 4, torch.bfloat16, 2.0), made(2, 7, dtype, 0.3)
    adapters = [one, None, other, one, None]
    found = run(x, out, adapters, layer=1)

    exact = out.double()
    for row, adapter in enumerate(adapters):
        for segment in range(3 if adapter is not None else 0):
            assert adapter is not None
            a = adapter.a[1, segment * adapter.rank : (segment + 1) * adapter.rank].double()
            outputs = slice(BOUNDS[segment], BOUNDS[segment + 1])
            exact[row, outputs] += adapter.scale * (a @ x[row].double()) @ adapter.b[1, :, outputs].double()
    error = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), exact, rtol=error, atol=20 * error)
    assert found[1].equal(out[1])
    assert found[4].equal(out[4])

    defined = out.clone()
    of_layer = [each and Adapted(each.a[1], each.b[1], each.scale) for each in adapters]
    adapt(x, defined, BOUNDS, of_layer)
    torch.testing.assert_close(defined.double(), exact, rtol=error, atol=20 * error)


def test_the_bits_of_a_row_do_not_depend_on_the_others() -> None:
    if not kernels.cpu_jit.available():
        return
    random = torch.Generator().manual_seed(4)
    x, out = torch.randn(9, WIDTH, generator=random), torch.randn(9, BOUNDS[-1], generator=random)
    adapters: list[Adapted | None] = [made(i, 1 + i, torch.float32, 0.5) if i % 4 else None for i in range(9)]
    together = run(x, out, adapters, layer=0)
    for row in range(9):
        alone = run(x[row : row + 1], out[row : row + 1], adapters[row : row + 1], layer=0)
        assert alone[0].equal(together[row])
