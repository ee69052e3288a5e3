"""Which engines have weights in fp8, the others' errors, and fp8 weights with KV in fp8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.fp8_folders import save_fp8
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import save_tiny

from services.executor.checkpoint import loader
from services.executor.checkpoint.kv_cache import size_bytes
from services.executor.checkpoint.loader import Loaded, TorchOptions, load, model_digest
from services.executor.checkpoint.stored import Dense
from services.executor.quantised import dtypes
from services.executor.quantised.schemes import ScaledFp8
from shared.errors import SetupError

CUDA = torch.device("cuda")
MATRICES = ("qkv", "out", "gate_up", "down")


def options(path: Path, **more: Any) -> TorchOptions:
    return TorchOptions(model_path=path, model_name="m", **{"device": "cpu", "blocks": 8, "slots": 2, **more})


def loaded_in_fp8(path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Loaded:
    """As on a GPU, in the memory of a CPU."""
    monkeypatch.setattr(dtypes, "FP8", replace(dtypes.FP8, why_not=lambda *_: ""))
    return load(options(path, dtype="fp8", **more))


def test_error_on_a_cpu_names_the_alternative(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    with pytest.raises(SetupError, match=r"dtype fp8 is for GPUs; on a CPU use packed .*, int8, bf16 or f32"):
        load(options(folder, dtype="fp8"))


def test_error_on_an_unsupported_gpu_names_the_reason_and_auto_becomes_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, _ = save_fp8("channel", "llama", tmp_path / "dense")
    experts, _ = save_fp8("blocks", "qwen3-moe", tmp_path / "experts")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a small GPU")
    assert loader._dtype_name(options(dense), CUDA) == "fp8"
    assert loader._dtype_name(options(save_tiny("llama", tmp_path / "plain")), CUDA) == "bf16"
    assert loader._dtype_name(options(dense), torch.device("cpu")) == "f32"
    cases: list[tuple[TorchOptions, str]] = [
        (options(dense, deterministic=True), "dtype fp8 is not deterministic.*use bf16"),
        (options(experts), "dtype fp8 has no products of experts; use bf16"),
    ]
    for each, reason in cases:
        assert loader._dtype_name(each, CUDA) == "bf16"
        with pytest.raises(SetupError, match=reason):
            loader._dtype_name(options(each.model_path, dtype="fp8", deterministic=each.deterministic), CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert loader._dtype_name(options(dense), CUDA) == "bf16"
    with pytest.raises(SetupError, match=r"compute capability 9\.0, which a small GPU has not; use bf16"):
        loader._dtype_name(options(dense, dtype="fp8"), CUDA)
    with pytest.raises(SetupError, match="dtype packed is for CPUs; use bf16 or fp8"):
        loader._dtype_name(options(dense, dtype="packed"), CUDA)


@pytest.mark.parametrize("kind", ["folder", "gguf", "dummy"])
def test_plain_weights_are_quantised_at_load(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf("llama", tmp_path / "m.gguf") if kind == "gguf" else save_tiny("llama", tmp_path)
    more = {"dummy": kind == "dummy"}
    plain, found = load(options(path, dtype="bf16", **more)), loaded_in_fp8(path, monkeypatch, **more)
    for name, stored in found.weights.layers[1].items():
        own = plain.weights.layers[1][name]
        if name not in MATRICES:
            assert stored.values.equal(own.values)
            continue
        assert isinstance(stored, ScaledFp8)
        error = (stored.values.float() - own.values.float()).norm() / own.values.float().norm()
        assert error < 0.04
    assert isinstance(found.weights.head, Dense)
    assert found.kept_in == "fp8"
    assert size_bytes(found.weights) < 0.75 * size_bytes(plain.weights)
    assert found.fingerprint != plain.fingerprint
    assert model_digest(options(path, **more), "fp8", "bf16") != model_digest(options(path), "bf16", "bf16")


def test_kv_in_fp8_leaves_the_weights_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of K and V are powers of two: rows of qkv are divided, columns of out multiplied, exactly
    but for numbers that become subnormal."""
    folder = save_tiny("llama", tmp_path)
    plain = loaded_in_fp8(folder, monkeypatch)
    found = loaded_in_fp8(folder, monkeypatch, kv_dtype="fp8")
    assert found.fingerprint != plain.fingerprint
    for own, other in zip(plain.weights.layers, found.weights.layers, strict=True):
        assert all(isinstance(other[name], ScaledFp8) for name in MATRICES)
        rows = (other["qkv"].values.float() / own["qkv"].values.float()).nan_to_num(0).amax(1)
        assert rows.log2().equal(rows.log2().round())
        assert torch.allclose(other["qkv"].values, own["qkv"].values * rows[:, None].bfloat16(), rtol=2**-7)
        # out reads heads of V: what the scales of V took from its rows (the last 64 of qkv) comes back.
        columns = 1 / rows[128:]
        wanted = own["out"].values.float() * columns
        near = wanted.abs().max() * 2.0**-10
        assert (other["out"].values.float() - wanted).abs().max() < near
