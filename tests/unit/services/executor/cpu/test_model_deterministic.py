"""Deterministic mode on a CPU. On a GPU: tests/contract/test_deterministic.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.default_model import default_engine
from support.executor.plan_maker import PlanMaker
from support.executor.row_by_row import assert_chunks_do_not_show, assert_rows_do_not_see_each_other
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


def test_how_a_prompt_is_cut(tmp_path: Path) -> None:
    assert_chunks_do_not_show(tiny_engine(tmp_path, "llama-9-3-tied", "f32", 1), 29)


@pytest.mark.parametrize("kind", ["llama-9-3-tied", "qwen2", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize(("dtype", "threads"), [("f32", 1), ("f32", 2), ("bf16", 2)])
def test_tiny_models(kind: str, dtype: str, threads: int, tmp_path: Path) -> None:
    maker = tiny_engine(tmp_path, kind, dtype, threads)
    assert_rows_do_not_see_each_other(maker, BATCHES, 19, 40)


def test_the_default_model() -> None:
    assert_rows_do_not_see_each_other(PlanMaker(default_engine(deterministic=True)), BATCHES, 6, 13)
