"""Deterministic mode on a CPU. On a GPU: tests/contract/test_deterministic.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.default_model import default_engine
from support.executor.plan_maker import PlanMaker
from support.executor.row_by_row import assert_rows_do_not_see_each_other
from support.executor.tiny_models import save_tiny

from services.executor.cpu.engine import TorchOptions, build

BATCHES = (1, 2, 3, 5, 8, 16, 17)


def tiny_engine(folder: Path, kind: str, dtype: str, threads: int) -> PlanMaker:
    options = TorchOptions(
        model_path=save_tiny(kind, folder),
        model_name=kind,
        dtype=dtype,
        device="cpu",
        blocks=200,
        slots=20,
        threads=threads,
        deterministic=True,
    )
    return PlanMaker(build(options))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama-9-3-tied", "f32"),
        ("qwen2", "bf16"),
        ("qwen3", "f32"),
        ("qwen3-moe", "f32"),
        ("qwen3-moe", "bf16"),
    ],
)
def test_tiny_models_give_the_same_bits_in_any_batch(kind: str, dtype: str, tmp_path: Path) -> None:
    """With one thread, other dtypes and larger batches: tests/contract/test_deterministic.py."""
    assert_rows_do_not_see_each_other(tiny_engine(tmp_path, kind, dtype, 2), BATCHES, 19, 40)


def test_default_model_gives_the_same_bits_in_any_batch() -> None:
    assert_rows_do_not_see_each_other(PlanMaker(default_engine(deterministic=True)), (1, 5, 17), 6, 13)
