"""What the engine compiles while it starts, as the library that compiles reports it itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import save_tiny
from torch.backends.mkldnn import VERBOSE_ON_CREATION, verbose

import kernels.cpu_jit
from services.executor.checkpoint.stored import Dense
from services.executor.cpu.engine import TorchOptions, build
from services.executor.cpu.linear import ROW_TILE, Products, kernel_rows
from services.executor.engine import WARM_ROWS

PRODUCT = re.compile(r"create:cache_\w+,cpu,inner_product,.*,mb(\d+)ic(\d+)oc(\d+),")

Shapes = set[tuple[int, int, int]]  # rows, in, out


def made(capfd: pytest.CaptureFixture[str]) -> Shapes:
    """The products that were made since the last call."""
    return {(int(m[1]), int(m[2]), int(m[3])) for m in PRODUCT.finditer(capfd.readouterr().out)}


@pytest.fixture(autouse=True)
def _only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.cpu_jit, "available", lambda: False)


def test_no_product_of_a_short_step_is_new_after_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = TorchOptions(
        model_path=save_tiny("llama", tmp_path),
        model_name="tiny",
        dtype="f32",
        device="cpu",
        blocks=64,
        slots=4,
        threads=1,
    )
    backend = build(options)
    maker = PlanMaker(backend)
    with verbose(VERBOSE_ON_CREATION):
        backend.warm_up()
        at_start = made(capfd)
        for slot, tokens in enumerate((1, 2, 21, 53)):
            maker.open(slot, [3] * tokens)
            maker.run([Row(slot, 0, tokens, feeds=(slot,))])
        short = made(capfd)
        maker.open(0, [3] * 100)
        maker.run([Row(0, 0, 100, feeds=(0,))])
        long = made(capfd)
    assert {rows for rows, _, _ in short} == {1, 2, 21, 56}
    assert len(short) == 4 * 4 + 1  # four products of a layer, and the head of one row
    assert short <= at_start
    assert {rows for rows, _, _ in long - at_start} == {104}
    assert WARM_ROWS < 100


def sizes(dtype: torch.dtype, *, deterministic: bool) -> list[int]:
    products = Products(dtype, torch.device("cpu"), deterministic=deterministic)
    assert products.kernel_sizes(40) == [], "none was made yet"
    products.linear(Dense.of(torch.zeros(8, 8, dtype=dtype)))
    return products.kernel_sizes(40)


def test_warm_up_sizes_are_the_sizes_with_kernels_of_their_own() -> None:
    exact = sizes(torch.float32, deterministic=False)
    assert exact == [*range(1, 33), 36, 40] == sorted({kernel_rows(rows) for rows in range(1, 41)})
    assert sizes(torch.float32, deterministic=True) == [ROW_TILE]
    narrow = sizes(torch.bfloat16, deterministic=False)
    assert narrow == (exact if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])
