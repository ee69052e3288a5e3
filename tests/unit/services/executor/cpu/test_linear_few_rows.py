"""Which products of bf16 weights read the plain matrix, and what a CPU without int8 is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels.cpu_jit
from kernels.cpu_jit.gemm_few_rows import by_rows
from services.executor.checkpoint.loader import _dtype
from shared.errors import SetupError


@pytest.mark.parametrize(("features", "most"), [((), 24), (("avx512bf16",), 2)])
def test_the_library_begins_where_it_is_quicker(
    features: tuple[str, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.cpu_jit, "has", lambda *wanted: set(wanted) <= set(features))
    weight = torch.randn(40, 32).bfloat16()
    by_library: list[int] = []

    def library(x: Tensor) -> Tensor:
        by_library.append(len(x))
        return x @ weight.T

    product = by_rows(weight, library)
    for rows in (1, 2, 3, 4, 23, 24, 25, 64):
        x = torch.randn(rows, 32).bfloat16()
        assert torch.allclose(product(x).float(), x.float() @ weight.float().T, atol=0.2)
    assert by_library == [rows for rows in (1, 2, 3, 4, 23, 24, 25, 64) if rows > most]


def test_a_cpu_without_int8_is_told_what_is_best_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.cpu_jit, "has", lambda *wanted: False)
    with pytest.raises(SetupError, match="bf16 is the fastest for up to 12 requests at once, and f32"):
        _dtype("int8", torch.device("cpu"))
    with pytest.raises(SetupError, match="use bf16"):
        _dtype("int8", torch.device("cuda"))
