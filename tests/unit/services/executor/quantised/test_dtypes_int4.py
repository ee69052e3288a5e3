"""Which engines keep weights in 4 bits, the others' errors, and 4 bits with KV in fp8."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.fp8_folders import changed
from support.executor.int4_folders import GROUP, KINDS, compressed, gptq, packed, save_int4
from support.executor.plan_maker import PlanMaker, Row
from support.executor.row_by_row import logits
from support.executor.tiny_models import random_tokens, save_tiny

import kernels.cpu_jit
from services.executor.checkpoint import loader
from services.executor.checkpoint.kv_cache import size_bytes
from services.executor.checkpoint.loader import Loaded, TorchOptions, best_dtype, load, model_digest
from services.executor.checkpoint.stored import Dense
from services.executor.cpu.engine import build
from services.executor.model.description import WIDTH, Part
from services.executor.quantised import dtypes, int4
from services.executor.quantised.int4 import ScaledInt4
from services.executor.quantised.schemes import scheme_of
from shared.errors import SetupError

CUDA = torch.device("cuda")
MATRICES = ("qkv", "out", "gate_up", "down")


def options(path: Path, **more: Any) -> TorchOptions:
    return TorchOptions(model_path=path, model_name="m", **{"device": "cpu", "blocks": 8, "slots": 2, **more})


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loader asks for a GPU, and the extra."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())


def loaded_in_int4(path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Loaded:
    """As on a GPU with a product for tiny models, in the memory of a CPU."""
    monkeypatch.setattr(dtypes, "INT4", replace(dtypes.INT4, why_not=lambda *_: ""))
    for name, value in (("GROUPS", (GROUP,)), ("_MULTIPLE", GROUP), ("DUMMY_GROUP", GROUP)):
        monkeypatch.setattr(int4, name, value)
    return load(options(path, dtype="int4", **more))


@pytest.mark.parametrize("kind", ["awq", "gptq act-order", "compressed zeros"])
def test_a_cpu_computes_the_dequantised_weights(kind: str, tmp_path: Path) -> None:
    folder, wanted = save_int4(kind, "qwen2", tmp_path / "int4")
    plain = save_tiny("qwen2", tmp_path / "plain")
    save_file({**load_file(plain / "model.safetensors"), **wanted}, plain / "model.safetensors")
    tokens = random_tokens(12, 3)

    def of(path: Path) -> torch.Tensor:
        maker = PlanMaker(build(options(path, threads=1)))
        maker.open(0, tokens, logprobs=1)
        return logits(maker, [Row(0, 0, 12, feeds=(0,))])

    assert of(folder).equal(of(plain))


@pytest.mark.skipif(not kernels.cpu_jit.has(*kernels.cpu_jit.BYTES), reason="no AVX2")
@pytest.mark.parametrize("kind", ["compressed rows", "zeros", "gptq act-order"])
def test_a_cpu_keeps_what_lies_in_whole_blocks(kind: str, tmp_path: Path) -> None:
    """`down` has 112 columns, which are no whole blocks; columns in the order of activations have none."""
    config = gptq(group_size=-1) if kind == "zeros" else KINDS[kind]
    folder, _ = save_int4(config, "llama", tmp_path)
    kept = load(options(folder, dtype="packed")).weights.layers[1]
    assert [isinstance(kept[name], ScaledInt4) for name in MATRICES] == (
        [False] * 4 if kind == "gptq act-order" else [True, True, True, False]
    )
    found = {}
    for dtype in ("packed", "f32"):
        maker = PlanMaker(build(options(folder, dtype=dtype, threads=1)))
        maker.open(0, random_tokens(13, 3), logprobs=1)
        chunk = logits(maker, [Row(0, 0, 12, feeds=(0,))])
        found[dtype] = torch.cat((chunk, logits(maker, [Row(0, 12, 1, feeds=(0,))]))).double().log_softmax(-1)
    kl = (found["f32"].exp() * (found["f32"] - found["packed"])).sum(-1)
    assert kl.max() < 3e-5


def test_scales_that_float16_does_not_hold_are_dequantised() -> None:
    part = Part("gate", (32, 64), WIDTH)
    tensors, wanted = packed(compressed(group_size=32), torch.randn(32, 64))
    tensors["weight_scale"] = (tensors["weight_scale"].float() * 2.0**-20).bfloat16()
    scheme = scheme_of({"quantization_config": compressed(group_size=32)})
    assert isinstance(scheme, int4.Int4Format)
    lazily = {f"w.{end}": tensor for end, tensor in tensors.items()}
    stored = scheme.stored("w.weight", lazily, lambda key: Dense.of(lazily[key]))
    found = int4.part_in_blocks(part, stored, torch.float32, torch.device("cpu"))
    assert isinstance(found, Dense)
    torch.testing.assert_close(found.values, wanted * 2.0**-20, rtol=2**-7, atol=0.0)


def test_error_on_another_device_names_the_alternative(tmp_path: Path) -> None:
    folder, _ = save_int4("awq", "llama", tmp_path)
    with pytest.raises(SetupError, match="dtype int4 is for GPUs; on a CPU use packed, or f32, bf16 or int8"):
        load(options(folder, dtype="int4"))
    in_blocks = kernels.cpu_jit.has(*kernels.cpu_jit.BYTES)
    assert best_dtype(folder, "cpu", 1)[0] == ("packed" if in_blocks else "f32")
    assert best_dtype(folder, "cpu", 2)[0] == "f32"
    assert loader._dtype_name(options(folder), torch.device("cpu")) == "f32"


@pytest.mark.usefixtures("a_gpu")
def test_error_on_an_unsupported_gpu_names_the_reason_also_for_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, _ = save_int4("awq", "llama", tmp_path / "dense")
    experts, _ = save_int4("gptq", "qwen3-moe-mixed", tmp_path / "experts")
    plain = save_tiny("llama", tmp_path / "plain")
    assert loader._dtype_name(options(dense), CUDA) == "int4"
    assert loader._dtype_name(options(dense, dtype="bf16"), CUDA) == "bf16"
    assert loader._dtype_name(options(dense, dtype="fp8"), CUDA) == "fp8"
    assert loader._dtype_name(options(plain, dtype="int4", dummy=True), CUDA) == "int4"
    with pytest.raises(SetupError, match=r"int4 is for checkpoints in 4 bits \(awq, gptq, .*use fp8 or bf16"):
        loader._dtype_name(options(plain, dtype="int4"), CUDA)

    def refused(path: Path, why: str, **more: Any) -> None:
        for dtype in ("auto", "int4"):
            with pytest.raises(SetupError, match=f"{why}.*use dtype fp8 or bf16, which dequantise"):
                loader._dtype_name(options(path, dtype=dtype, **more), CUDA)

    refused(dense, "dtype int4 is not deterministic", deterministic=True)
    with pytest.raises(SetupError, match=r"no products of experts of 64 by 40 columns, .*use dtype bf16"):
        loader._dtype_name(options(experts), CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    refused(dense, r"dtype int4 needs compute capability 8\.0, which a GPU has not")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    refused(dense, r"need humming-kernels: pip install 'headrace\[int4\]'")


def test_the_matrices_of_layers_stay_in_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = save_int4("gptq", "llama", tmp_path)
    plain, found = load(options(folder, dtype="bf16")), loaded_in_int4(folder, monkeypatch)
    for name, stored in found.weights.layers[1].items():
        assert isinstance(stored, ScaledInt4) == (name in MATRICES)
        assert stored.values.equal(plain.weights.layers[1][name].values)
    assert isinstance(found.weights.head, Dense)
    assert found.kept_in == "int4"
    assert size_bytes(found.weights) < 0.65 * size_bytes(plain.weights)
    assert found.fingerprint != plain.fingerprint
    before = model_digest(options(folder), "int4", "bf16")
    assert before != model_digest(options(folder), "bf16", "bf16")
    changed(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False,
                                         "checkpoint_format": "gptq_v2"})  # fmt: skip
    assert model_digest(options(folder), "int4", "bf16") != before  # other zero points from the same bytes


def test_random_weights_are_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path)
    plain = load(options(folder, dtype="bf16", dummy=True))
    found = loaded_in_int4(folder, monkeypatch, dummy=True)
    for name in MATRICES:
        stored, own = found.weights.layers[1][name], plain.weights.layers[1][name].values.float()
        assert isinstance(stored, ScaledInt4)
        assert (stored.values.float() - own).norm() / own.norm() < 0.15


def test_kv_in_fp8_leaves_the_weights_in_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of K and V are powers of two for each head, of 16 columns: scales of groups take them."""
    folder, _ = save_int4("awq", "llama", tmp_path)
    plain = loaded_in_int4(folder, monkeypatch)
    found = loaded_in_int4(folder, monkeypatch, kv_dtype="fp8")
    assert found.fingerprint != plain.fingerprint
    for own, other in zip(plain.weights.layers, found.weights.layers, strict=True):
        assert all(isinstance(other[name], ScaledInt4) for name in MATRICES)
        rows = (other["qkv"].values.float() / own["qkv"].values.float()).nan_to_num(0).amax(1)
        assert rows.log2().equal(rows.log2().round())
        wanted = own["out"].values.float() / rows[128:]  # what the scales of V took from its rows comes back
        assert other["out"].values.float().equal(wanted)
