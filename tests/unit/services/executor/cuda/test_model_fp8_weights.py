"""On a GPU: a checkpoint in fp8 computes what a CPU computes of its dequantised weights, also after sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.fp8_folders import save_fp8
from support.executor.plan_maker import PlanMaker, Row
from support.executor.row_by_row import logits
from support.executor.tiny_models import random_tokens

from services.executor.checkpoint.loader import TorchOptions

if not torch.cuda.is_available():
    pytest.skip("torch multiplies rows in fp8 on a GPU only", allow_module_level=True)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_checkpoint_in_fp8_is_computed_in_fp8(kv_dtype: str, tmp_path: Path) -> None:
    from services.executor.cpu.engine import build as build_cpu
    from services.executor.cuda.engine import build

    common: dict[str, Any] = {
        "model_path": save_fp8("channel", "qwen2", tmp_path)[0], "model_name": "m", "blocks": 40, "slots": 4,
        "max_step_tokens": 64,
    }  # fmt: skip
    on_gpu = build(TorchOptions(**common, device="cuda", kv_dtype=kv_dtype))
    on_cpu = build_cpu(TorchOptions(**common, device="cpu", threads=1))
    plain = build(TorchOptions(**common, device="cuda", dtype="bf16"))
    assert on_gpu.info.dtype == ("fp8/bf16" if kv_dtype == "auto" else "fp8/fp8")
    assert (on_cpu.info.dtype, plain.info.dtype) == ("f32", "bf16")
    assert len({each.info.fingerprint for each in (on_gpu, on_cpu, plain)}) == 3
    tokens = random_tokens(60, 3)

    def of(backend: Any) -> torch.Tensor:
        """Log probabilities after a chunk and after each of some decode steps."""
        maker = PlanMaker(backend)
        maker.open(0, tokens, logprobs=1)
        found = [logits(maker, [Row(0, 0, 40, feeds=(0,))])]
        found += [logits(maker, [Row(0, at, 1, feeds=(0,))]) for at in range(40, 59)]
        return torch.cat(found).double().log_softmax(-1)

    on_gpu.warm_up()
    wanted, found = of(on_cpu), of(on_gpu)
    kl = (wanted.exp() * (wanted - found)).sum(-1).mean().item()
    print("KL", kv_dtype, kl)
    assert kl < 0.15
    on_gpu.sleep()
    on_gpu.wake()
    on_gpu.reset()
    assert of(on_gpu).equal(found)
