"""On a GPU with the extra int4: a checkpoint in 4 bits computes what a CPU computes of its dequantised
weights, also after sleep."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.fp8_folders import changed
from support.executor.int4_folders import AWQ, compressed, gptq, packed
from support.executor.plan_maker import PlanMaker, Row
from support.executor.row_by_row import logits
from support.executor.tiny_models import VOCAB, random_tokens

from kernels.int4 import dequantise, gpu, quantise_groups
from services.executor.checkpoint.loader import TorchOptions

if not torch.cuda.is_available() or importlib.util.find_spec("humming") is None:
    pytest.skip("humming-kernels multiplies in 4 bits on a GPU only", allow_module_level=True)

KINDS = {
    "awq": {**AWQ, "group_size": 64},
    "gptq": gptq(group_size=128, sym=True),
    "compressed": compressed(group_size=32),
}


def save(kind: str, folder: Path) -> Path:
    """A model of sizes that the product takes."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        found, _ = packed(KINDS[kind], tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in found.items()}
    save_file(tensors, folder / "model.safetensors")
    return changed(folder, quantization_config=KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_in_4_bits_is_computed_in_4_bits(kind: str, tmp_path: Path) -> None:
    from services.executor.cpu.engine import build as build_cpu
    from services.executor.cuda.engine import build

    common: dict[str, Any] = {
        "model_path": save(kind, tmp_path), "model_name": "m", "blocks": 40, "slots": 4, "max_step_tokens": 64
    }  # fmt: skip
    on_gpu = build(TorchOptions(**common, device="cuda"))
    on_cpu = build_cpu(TorchOptions(**common, device="cpu", threads=1))
    assert on_gpu.info.dtype == "int4/bf16"
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
    print("KL", kind, kl)
    assert kl < 1e-3
    on_gpu.sleep()
    on_gpu.wake()
    on_gpu.reset()
    assert (of(on_gpu) - found).abs().max() < 0.1


@pytest.mark.parametrize("group", [64, 512])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_product_is_that_of_the_dequantised_matrix(group: int, zeros: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    matrix = quantise_groups(torch.randn(384, 512, device="cuda", generator=generator).bfloat16(), group)
    if zeros:
        given = torch.randint(0, 16, matrix.scales.shape, device="cuda", generator=generator)
        matrix = type(matrix)(matrix.numbers, matrix.scales, given.to(torch.uint8))
    weight, plain = gpu.prepare(matrix), dequantise(matrix)
    bias = torch.randn(384, device="cuda", generator=generator).bfloat16()
    for rows in (1, 3, 33, 200, 1000):
        x = torch.randn(rows, 512, device="cuda", generator=generator).bfloat16()
        wanted = x.double() @ plain.double().T + bias.double()
        error = (gpu.product(x, weight, bias).double() - wanted).norm() / wanted.norm()
        assert error < 0.01
