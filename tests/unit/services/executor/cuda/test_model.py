"""The order of operations on a GPU, with torch in place of each kernel: the logits of transformers.

What kernels compute is tested with them; that they agree with each other, on a GPU (tests/contract)."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.executor import partitions
from support.executor.int4_folders import gptq, save_int4
from support.executor.references import fp8_product, write_rows
from support.executor.tiny_models import random_tokens, reference_logprobs, save_tiny

import kernels.quantised as fp8_rows
import kernels.quantised as int4_groups
from kernels.attention import attend_prefill, write_kv
from kernels.elementwise import apply_rope, rms_norm, swiglu
from kernels.moe import combine, dispatch, experts_mlp, permute, route
from kernels.moe import gpu as moe
from kernels.quantised.gpu import Int4Weight
from services.executor.checkpoint.loader import TorchOptions, load
from services.executor.checkpoint.stored import Dense
from services.executor.cuda import model as cuda_model
from services.executor.model.description import ExpertShapes, Gate, Norm, Part, Weight, describe
from services.executor.quantised import dtypes
from services.executor.quantised import int4 as checkpoint_int4
from shared.errors import SetupError

TOKENS = 40
BLOCKS = torch.arange(4)


class Launches:
    """Torch's operations with the arguments of the GPU's kernels, and the names of those that ran."""

    def __init__(self) -> None:
        self.names: list[str] = []
        at = torch.arange(TOKENS)
        self.blocks, self.offsets = at // 16, at % 16

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *, whole: bool = False) -> Any:
        self.names.append("product")
        return F.linear(x, weight, bias)

    def gated(self, product: Any, layouts: Any, x: torch.Tensor, gate_up: torch.Tensor, **_: Any) -> Any:
        self.names.append("gated")
        return swiglu(F.linear(x, gate_up))

    def add_rms_norm_(self, x: Any, residual: Any, weight: Any, eps: float, out: Any, **_: Any) -> Any:
        self.names.append("add_rms_norm")
        return rms_norm(residual.add_(x), weight, eps)

    def rope_write(self, qkv: Any, inputs: Any, norms: Any, kv: Any, layer: int, heads: int) -> Any:
        self.names.append("rope_write")
        each = qkv.view(len(qkv), -1, kv.shape[-1])
        query, key, value = each.split([heads, kv.shape[-2], kv.shape[-2]], 1)
        if norms.query is not None:
            query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
        rotation = inputs.rotations[inputs.positions.long()]
        rows = write_rows(kv, self.blocks, self.offsets)[layer]
        write_kv(kv, rows, apply_rope(key, rotation), value)
        return apply_rope(query, rotation)

    def attend_prefill(self, query: Any, kv: Any, layer: int, tiles: Any, tuning: Any, out: Any) -> None:
        self.names.append("attend")
        out.copy_(attend_prefill(query, kv, layer, BLOCKS[: -(-TOKENS // 16)], None))


def in_fp8(product: Any, layouts: Any, x: Any, gate_up: Any, *, chained: bool, fp8: bool) -> Any:
    assert fp8
    return fp8_rows.quantise_rows(swiglu(product(x, gate_up)))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_weights_in_fp8_read_fp8_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their logits are near those of the plain weights, and every product but the head's is of fp8 rows."""
    options = TorchOptions(
        model_path=save_tiny(kind, tmp_path), model_name="m", dtype="fp8", device="cpu", blocks=4, slots=1
    )
    monkeypatch.setattr(dtypes, "FP8", replace(dtypes.FP8, why_not=lambda *_: ""))
    torch_for = Launches()

    def product(x: Any, weight: Any, bias: Any = None, *, whole: bool = False) -> Any:
        if isinstance(weight, torch.Tensor):
            torch_for.names.append("plain")
            return F.linear(x, weight, bias)
        torch_for.names.append("fp8" if isinstance(x, fp8_rows.Fp8Rows) else "quantised")
        rows = x if isinstance(x, fp8_rows.Fp8Rows) else fp8_rows.quantise_rows(x)
        return fp8_product(rows, weight, bias).bfloat16()

    def normed(x: Any, weight: Any, eps: float, residual: Any = None, *, chained: bool) -> Any:
        if residual is None:
            return fp8_rows.quantise_rows(rms_norm(x, weight, eps))
        return fp8_rows.quantise_rows(torch_for.add_rms_norm_(x, residual, weight, eps, None))

    for name in ("add_rms_norm_", "rope_write", "attend_prefill"):
        monkeypatch.setattr(cuda_model, name, getattr(torch_for, name))
    monkeypatch.setattr(cuda_model, "products_of", lambda *_: product)
    monkeypatch.setattr(cuda_model, "rms_norm_fp8", normed)
    monkeypatch.setattr(cuda_model, "gated", in_fp8)
    tokens = random_tokens(TOKENS, 3)
    tuning: Any = SimpleNamespace(
        layouts_of=lambda rows: SimpleNamespace(chained=False, decode=None), prefill=None
    )
    resolved: Any = SimpleNamespace(ids=torch.tensor(tokens), slot_mapping=None)
    tiles: Any = object()
    step = cuda_model.ForwardStep(resolved, torch.arange(TOKENS, dtype=torch.int32), None, tiles)
    with torch.inference_mode():
        model = cuda_model.CudaModel(load(options), {}, tuning, TOKENS)
        found = model.logits(model.hidden(step), torch.arange(TOKENS)).double().log_softmax(-1)
    wanted = reference_logprobs(kind, tokens)
    kl = (wanted.exp() * (wanted - found)).sum(-1).mean().item()
    assert kl < 0.15
    products = [name for name in torch_for.names if name in ("plain", "fp8", "quantised")]
    assert products == ["fp8", "quantised", "fp8", "fp8"] * 3 + ["plain"]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe-mixed"])
def test_weights_in_4_bits_have_their_own_product(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are those of the dequantised weights, and the canonical matrices are dropped."""
    folder, _ = save_int4(gptq(group_size=8), kind, tmp_path)
    common: dict[str, Any] = {"model_name": "m", "device": "cpu", "blocks": 4, "slots": 1}
    monkeypatch.setattr(dtypes, "INT4", replace(dtypes.INT4, why_not=lambda *_: ""))
    monkeypatch.setattr(checkpoint_int4, "GROUPS", (8,))
    monkeypatch.setattr(checkpoint_int4, "_MULTIPLE", 8)
    torch_for = Launches()
    for name in ("add_rms_norm_", "rope_write", "attend_prefill"):
        monkeypatch.setattr(cuda_model, name, getattr(torch_for, name))
    for each in (combine, dispatch, permute, route):
        monkeypatch.setattr(cuda_model, each.__name__, each)
    monkeypatch.setattr(moe, "_gate", lambda wide, _: swiglu(wide))
    monkeypatch.setattr(cuda_model, "rms_norm", lambda x, weight, eps, **_: rms_norm(x, weight, eps))
    monkeypatch.setattr(cuda_model, "swiglu", lambda wide, *_, **__: swiglu(wide))

    def prepare(matrix: int4_groups.Int4Groups, experts: int) -> Int4Weight:
        none = torch.zeros(0)
        return Int4Weight(matrix.numbers, matrix.scales, matrix.zeros, none, none, matrix.shape, experts)

    def product(
        x: torch.Tensor, weight: Int4Weight, bias: Any = None, *, bounds: torch.Tensor | None = None
    ) -> torch.Tensor:
        torch_for.names.append("int4")
        matrix = int4_groups.Int4Groups(weight.numbers, weight.scales, weight.zeros)
        plain = int4_groups.dequantise(matrix).to(x.dtype)
        if bounds is None:
            return F.linear(x, plain, bias)
        return torch._grouped_mm(x, plain.view(len(weight), -1, x.shape[1]).mT, offs=bounds[1:])

    monkeypatch.setattr(cuda_model.int4, "prepare", prepare)
    monkeypatch.setattr(cuda_model.int4, "product", product)
    layouts = SimpleNamespace(chained=False, decode=None, product=lambda *_, **__: None)
    tuning: Any = SimpleNamespace(layouts_of=lambda rows: layouts, prefill=None, by_row=False)
    resolved: Any = SimpleNamespace(ids=torch.tensor(random_tokens(TOKENS, 3)), slot_mapping=None)
    tiles: Any = object()
    step = cuda_model.ForwardStep(resolved, torch.arange(TOKENS, dtype=torch.int32), None, tiles)
    found = []
    with torch.inference_mode():
        for dtype in ("int4", "bf16"):
            loaded = load(TorchOptions(model_path=folder, dtype=dtype, **common))
            model = cuda_model.CudaModel(loaded, {}, tuning, TOKENS)
            assert loaded.weights.layers == []
            found.append(model.logits(model.hidden(step), torch.arange(TOKENS)))
            plain = 3 if kind == "qwen2" else 4  # norms and a bias; norms of heads
            of_layers = 3 * (plain + 4 * (4 if dtype == "int4" else 1)) + 2 * (kind != "qwen2")  # routers
            assert len([*model.tensors()]) == 3 + of_layers
    assert found[0].equal(found[1])
    assert torch_for.names.count("int4") == 4 * 3


def test_kernels_of_all_shapes_in_4_bits_are_built_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that waited for another one would break the barrier. Both share 16 cores."""
    at_once, built = threading.Barrier(2), list[tuple[int, ...]]()
    workers = "HUMMING_MAX_PARALLEL_BUILD_WORKERS"
    monkeypatch.delenv(workers, raising=False)
    monkeypatch.setattr(cuda_model, "usable_cores", lambda: 16.0)

    def prepare(matrix: int4_groups.Int4Groups, experts: int) -> None:
        at_once.wait(60)
        assert os.environ[workers] == "8"
        built.append(tuple(matrix.shape))

    monkeypatch.setattr(cuda_model.int4, "prepare", prepare)

    def stored(rows: int) -> checkpoint_int4.ScaledInt4:
        matrix = int4_groups.quantise_groups(torch.randn(rows, 32), 32)
        return checkpoint_int4.ScaledInt4(matrix, torch.bfloat16)

    norm = Dense.of(torch.ones(32))
    cuda_model.build_kernels([{"norm": norm, "out": stored(8), "down": stored(16)} for _ in range(3)])
    assert sorted(built) == [(8, 32), (16, 32)]
    assert workers not in os.environ


def test_unsupported_shape_of_the_4_bit_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: object) -> None:
        raise RuntimeError("no suitable CUDA 13 environment found")

    monkeypatch.setattr(cuda_model.int4, "prepare", prepare)
    matrix = int4_groups.quantise_groups(torch.randn(8, 32), 32)
    with pytest.raises(SetupError, match=r"RuntimeError: no suitable CUDA 13 .*headrace\[int4\]"):
        cuda_model.operand_of(checkpoint_int4.ScaledInt4(matrix, torch.bfloat16))


@pytest.mark.parametrize(
    "kind",
    ["llama-9-3-tied", "llama-bias", "qwen2", "qwen3", "phi3", "phi3-longrope", "mixtral", "qwen3-moe-mixed"],
)
def test_operations_run_in_this_order(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TorchOptions(
        model_path=save_tiny(kind, tmp_path), model_name="m", dtype="f32", device="cpu", blocks=4, slots=1
    )
    torch_for = Launches()
    for name in ("gated", "add_rms_norm_", "rope_write", "attend_prefill"):
        monkeypatch.setattr(cuda_model, name, getattr(torch_for, name))
    monkeypatch.setattr(cuda_model, "products_of", lambda *_: torch_for.product)
    monkeypatch.setattr(cuda_model, "rms_norm", lambda x, weight, eps, **_: rms_norm(x, weight, eps))
    for each in (combine, dispatch, experts_mlp, permute, route):
        monkeypatch.setattr(cuda_model, each.__name__, each)
    tuning: Any = SimpleNamespace(
        layouts_of=lambda rows: SimpleNamespace(chained=False, decode=None), prefill=None
    )
    tokens = random_tokens(TOKENS, 3)
    resolved: Any = SimpleNamespace(ids=torch.tensor(tokens), slot_mapping=None)
    tiles: Any = object()
    step = cuda_model.ForwardStep(resolved, torch.arange(TOKENS, dtype=torch.int32), None, tiles)
    with torch.inference_mode():
        model = cuda_model.CudaModel(load(options), {}, tuning, TOKENS)
        found = model.logits(model.hidden(step), torch.arange(TOKENS))
    wanted = reference_logprobs(kind, tokens)
    torch.testing.assert_close(found.double().log_softmax(-1), wanted, rtol=1e-4, atol=1e-4)
    if kind in ("qwen2", "qwen3", "phi3"):
        layer = [
            "product",
            "rope_write",
            "attend",
            "product",
            "add_rms_norm",
            "gated",
            "product",
            "add_rms_norm",
        ]
        assert torch_for.names == layer * 3 + ["product"]


def test_a_layer_that_is_not_computed_is_refused_by_name() -> None:
    """Each family's layers are computed; another operation, order or weight is not left out in silence."""
    shapes = partitions.shapes(heads=4, kv_heads=2)
    experts = ExpertShapes(count=4, per_token=2, width=32, renormalise=True)
    for each in (shapes, replace(shapes, qk_norm=True, qkv_bias=True), replace(shapes, experts=experts)):
        cuda_model.check_layers(describe(each).layers)
    norm, *rest = describe(shapes).layers[0]
    after = Norm(Weight("after_norm", (Part("after_norm", (64,)),)), 1e-5)
    for layer in ((norm, Gate(), *rest), (norm, *reversed(rest)), (after, *rest)):
        with pytest.raises(SetupError, match=r"does not compute a layer of .*device=cpu"):
            cuda_model.check_layers([layer])
