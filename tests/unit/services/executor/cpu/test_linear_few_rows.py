"""Which products of bf16 weights read the plain matrix, and the error of a CPU without int8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.default_model import model_path
from support.executor.tiny_gguf import write_gguf
from torch import Tensor

import kernels.cpu_jit
from kernels.cpu_jit.gemm_few_rows import by_rows
from services.executor.checkpoint.loader import TorchOptions, _dtype_name, best_dtype
from shared.errors import SetupError


@pytest.mark.parametrize(("features", "most"), [((), 24), (("avx512bf16",), 2)])
def test_library_takes_the_rows_from_where_it_is_faster(
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


def chosen(dtype: str, device: torch.device, file: Path) -> str:
    return _dtype_name(TorchOptions(model_path=file, model_name="m", dtype=dtype), device)


@pytest.mark.parametrize("dtype", ["int8", "packed", "packed8"])
def test_machine_without_the_instructions_gets_an_error_that_names_the_alternative(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    file = Path("model.gguf")
    with pytest.raises(SetupError, match="use bf16"):
        chosen(dtype, torch.device("cuda"), file)
    monkeypatch.setattr(kernels.cpu_jit, "has", lambda *wanted: False)
    with pytest.raises(SetupError, match="needs a CPU with AVX2 and F16C, and Numba; use bf16"):
        chosen(dtype, torch.device("cpu"), file)


def test_only_a_gguf_file_has_blocks() -> None:
    for dtype in ("packed", "packed8"):
        with pytest.raises(
            SetupError, match=f"{dtype} is for GGUF files and checkpoints in 4 bits; use int8"
        ):
            chosen(dtype, torch.device("cpu"), Path("folder"))


def test_a_server_without_a_dtype_computes_with_the_blocks_of_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = "packed" if kernels.cpu_jit.has(*kernels.cpu_jit.BYTES) else "f32"
    assert best_dtype(model_path(), "cpu", 1)[0] == wanted
    assert best_dtype(tmp_path, "cpu", 1)[0] == "f32"
    monkeypatch.setattr(kernels.cpu_jit, "has", lambda *wanted: True)
    assert best_dtype(model_path(), "cpu", 2) == (
        "f32",
        "several ranks share the layers, and cuts may fall within a block",
    )
    for name, wanted in (("dtype", "bf16"), ("torch_dtype", "bf16"), ("other", "f32")):
        (tmp_path / "config.json").write_text(json.dumps({name: "bfloat16"}))
        monkeypatch.setattr(kernels.cpu_jit, "has_amx", lambda: True)
        assert best_dtype(tmp_path, "cpu", 2)[0] == wanted
        monkeypatch.setattr(kernels.cpu_jit, "has_amx", lambda: False)
        assert best_dtype(tmp_path, "cpu", 2)[0] == "f32"
    plain = write_gguf("llama", tmp_path / "plain.gguf")
    assert best_dtype(plain, "cpu", 1) == ("f32", "few weights of the file are in blocks of 4 to 8 bits")
    monkeypatch.setattr(kernels.cpu_jit, "has", lambda *wanted: False)
    assert "no AVX2" in best_dtype(model_path(), "cpu", 1)[1]
