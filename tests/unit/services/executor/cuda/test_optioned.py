"""Models with options on a GPU: with torch in place of each kernel, and on a GPU where there is one, against
transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.references import write_rows
from support.executor.tiny_models import (
    OPTIONED,
    VOCAB,
    full_logprobs,
    random_tokens,
    reference_logprobs,
    save_tiny,
)

from kernels import moe
from kernels.attention import Scoring, attend_prefill, write_kv
from kernels.elementwise import apply_rope, rms_norm, swiglu
from kernels.gemm.gpu import MatmulTuning
from services.executor.checkpoint.loader import TorchOptions, load
from services.executor.cuda import engine as cuda_engine
from services.executor.cuda import model as cuda_model
from services.executor.cuda import optioned
from shared.errors import SetupError

EXPERTS = ("gpt-oss", "glm4-moe")
TOKENS = 40
BLOCKS = torch.arange(3)


def rope_write(qkv: Any, inputs: Any, norms: Any, kv: Any, layer: int, heads: int) -> Any:
    at = torch.arange(TOKENS)
    query, key, value = qkv.view(TOKENS, -1, kv.shape[-1]).split([heads, kv.shape[-2], kv.shape[-2]], 1)
    if norms.query is not None:
        query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
    rotation = inputs.rotations[inputs.positions.long()]
    write_kv(kv, write_rows(kv, at // 16, at % 16)[layer], apply_rope(key, rotation), value)
    return apply_rope(query, rotation)


def attend(query: Any, kv: Any, layer: int, tiles: Any, tuning: Any, out: Any, by: Scoring) -> None:
    out.copy_(attend_prefill(query, kv, layer, BLOCKS, None, by))


def add_rms_norm_(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    return rms_norm(residual.add_(x), weight, eps)


def grouped(x: torch.Tensor, weight: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    found = x.new_zeros(len(x), weight.shape[1])
    for expert in range(len(weight)):
        rows = slice(int(bounds[expert]), int(bounds[expert + 1]))
        found[rows] = F.linear(x[rows], weight[expert])
    return found


@pytest.mark.parametrize("kind", OPTIONED)
def test_operations_compute_what_transformers_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TorchOptions(
        model_path=save_tiny(kind, tmp_path), model_name="m", dtype="f32", device="cpu", blocks=4, slots=1
    )
    for each in (rope_write, add_rms_norm_, grouped):
        monkeypatch.setattr(optioned, each.__name__, each)
    for name in ("combine", "dispatch", "experts_mlp", "permute", "route"):
        monkeypatch.setattr(optioned, name, getattr(moe, name))
    monkeypatch.setattr(optioned, "attend_prefill", attend)
    monkeypatch.setattr(optioned, "rms_norm", rms_norm)
    monkeypatch.setattr(optioned, "swiglu", swiglu)
    product = lambda x, weight, bias=None, **_: F.linear(x, weight, bias)  # noqa: E731 - with any options
    monkeypatch.setattr(cuda_model, "products_of", lambda *_: product)
    tokens = random_tokens(TOKENS, 3)
    tuning: Any = SimpleNamespace(layouts_of=lambda rows: SimpleNamespace(decode=0), prefill=None)
    work: Any = SimpleNamespace(ends=torch.zeros(1), spans=torch.zeros(1), first_rows=torch.zeros(1))
    monkeypatch.setattr(optioned, "replace", lambda each, **_: each)
    monkeypatch.setattr(optioned, "windowed", lambda each: each)
    resolved: Any = SimpleNamespace(ids=torch.tensor(tokens), slot_mapping=None)
    tiles: Any = object()
    step = cuda_model.ForwardStep(resolved, torch.arange(TOKENS, dtype=torch.int32), None, tiles)
    with torch.inference_mode():
        model = cuda_model.CudaModel(load(options), {0: work}, tuning, TOKENS)
        found = model.logits(model.hidden(step), torch.arange(TOKENS)).double().log_softmax(-1)
    wanted = reference_logprobs(kind, tokens)
    assert (wanted.exp() * (wanted - found)).sum(-1).max() < 1e-6


def test_a_model_without_options_keeps_its_own_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_model, "products_of", lambda *_: None)
    for kind, window in (("llama", 0), ("qwen3", 0), ("mistral", 256)):
        folder = save_tiny(kind, tmp_path / kind)
        loaded = load(TorchOptions(model_path=folder, model_name="m", device="cpu", blocks=16, slots=1))
        assert loaded.shapes.sliding_window == window
        tuning: Any = None
        assert cuda_model.CudaModel(loaded, {}, tuning, 1)._optioned is None


def test_a_product_is_whole_where_its_layout_is_for_a_gate() -> None:
    layouts = SimpleNamespace(chained=False, product=lambda *_, **__: MatmulTuning(64, 256, 1, 4, gated=True))
    tuning: Any = SimpleNamespace(layouts_of=lambda rows: layouts)
    x, weight = torch.randn(2, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    assert cuda_model._tuned(tuning)(x, weight, whole=True).equal(F.linear(x, weight))


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_that_no_gpu_computes_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_engine, "check_compiler", lambda: None)
    options = TorchOptions(
        model_path=save_tiny(kind, tmp_path), model_name=kind, dtype="bf16", device="cpu", blocks=4, slots=1
    )
    with pytest.raises(SetupError, match=f"the experts of {kind}.*use device cpu"):
        cuda_engine.build(options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [("f32", 1e-5), ("bf16", 1e-2)])
@pytest.mark.parametrize("kind", [kind for kind in OPTIONED if kind not in EXPERTS])
def test_a_gpu_computes_what_transformers_does(
    kind: str, dtype: str, limit: float, deterministic: bool, tmp_path: Path
) -> None:
    options = TorchOptions(
        model_path=save_tiny(kind, tmp_path), model_name=kind, dtype=dtype, device="cuda", blocks=64, slots=4,
        deterministic=deterministic,
    )  # fmt: skip
    maker, tokens = PlanMaker(cuda_engine.build(options)), random_tokens(61, 1)
    maker.open(0, tokens, GREEDY, logprobs=VOCAB + 1)
    reference = reference_logprobs(kind, tokens)
    for start, count in ((0, 37), (37, 18), *((at, 1) for at in range(55, 61))):
        found = full_logprobs(maker.run([Row(0, start, count, feeds=(0,))]))
        wanted = reference[start + count - 1]
        assert float((wanted.exp() * (wanted - found[0])).sum()) < limit
