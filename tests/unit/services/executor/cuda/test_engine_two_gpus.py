"""On two GPUs: tensor-parallel ranks over NCCL and mapped memory, and stages, choose what one GPU chooses, in
every format of weights and KV."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from support.executor.int4_folders import save_wide
from support.executor.tiny_models import save_tiny
from support.executor.two_gpus import apart, divergence, lives, refusal, rows_by_themselves

PIPELINE = pytest.mark.parametrize("pipeline", [False, True], ids=["ranks", "stages"])
IN_4_BITS = pytest.mark.skipif(importlib.util.find_spec("humming") is None, reason="needs humming-kernels")
FORMATS: dict[str, tuple[dict[str, Any], str, float]] = {  # options, the engine's dtype, the most KL
    "f32": ({"dtype": "f32"}, "f32", 1e-6),
    "bf16": ({"dtype": "bf16"}, "bf16", 1e-3),
    "bf16, KV in fp8": ({"dtype": "bf16", "kv_dtype": "fp8"}, "bf16/fp8", 0.1),
    "fp8": ({"dtype": "fp8"}, "fp8/bf16", 0.15),
}


@PIPELINE
@pytest.mark.parametrize("deterministic", [False, True])
def test_two_gpus_choose_what_one_chooses(tmp_path: Path, pipeline: bool, deterministic: bool) -> None:
    several, alone = apart(lives, save_tiny("qwen2", tmp_path), pipeline, deterministic)
    assert several == alone


@PIPELINE
@pytest.mark.parametrize("name", FORMATS)
def test_two_gpus_compute_what_a_cpu_computes(tmp_path: Path, pipeline: bool, name: str) -> None:
    more, dtype, most = FORMATS[name]
    found, kl = apart(divergence, save_wide("compressed", tmp_path), {**more, "pipeline": pipeline})
    print("KL", name, pipeline, kl)
    assert found == dtype
    assert kl < most


@IN_4_BITS
@PIPELINE
@pytest.mark.parametrize(("family", "most"), [("qwen2", 1e-3), ("qwen3_moe", 0.01)])
def test_two_gpus_keep_weights_in_4_bits(tmp_path: Path, pipeline: bool, family: str, most: float) -> None:
    options = {"dtype": "int4", "pipeline": pipeline}
    found, kl = apart(divergence, save_wide("compressed", tmp_path, family), options)
    print("KL int4", family, pipeline, kl)
    assert found == "int4/bf16"
    assert kl < most


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_of_deterministic_ranks_do_not_see_each_other(tmp_path: Path, dtype: str) -> None:
    apart(rows_by_themselves, save_tiny("qwen2", tmp_path), dtype)


@pytest.mark.parametrize("dtype", ["fp8", pytest.param("int4", marks=IN_4_BITS)])
def test_formats_without_a_deterministic_mode_are_refused(tmp_path: Path, dtype: str) -> None:
    why = apart(refusal, save_wide("compressed", tmp_path), {"dtype": dtype, "deterministic": True})
    assert f"dtype {dtype} is not deterministic" in why
