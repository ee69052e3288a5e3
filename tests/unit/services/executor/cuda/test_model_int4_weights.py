"""On a GPU with the extra int4: a checkpoint in 4 bits, and a GGUF file, computes what a CPU computes of its
dequantised weights, also after sleep."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from support.executor.gguf_raw import SCALES, random_blocks
from support.executor.int4_folders import WIDE, save_wide, wide_model
from support.executor.plan_maker import PlanMaker, Row
from support.executor.row_by_row import logits
from support.executor.tiny_gguf import tiny_vocabulary, write_model
from support.executor.tiny_models import random_tokens

from kernels.quantised import Int4Groups, dequantise, gpu, quantise_groups
from services.executor.checkpoint.loader import TorchOptions
from services.executor.model.description import WIDTH, Part
from services.executor.quantised.gguf_blocks import InBlocks, part_in_groups
from services.executor.quantised.int4 import ScaledInt4

if not torch.cuda.is_available() or importlib.util.find_spec("humming") is None:
    pytest.skip("humming-kernels multiplies in 4 bits on a GPU only", allow_module_level=True)


FILES: dict[str, dict[str, GgmlType]] = {  # the type of a tensor by the end of its name
    **{name: {"weight": GgmlType[name]} for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")},
    "mixed": {"attn_v.weight": GgmlType.Q8_0, "ffn_down.weight": GgmlType.Q5_1,
              "ffn_up.weight": GgmlType.Q4_1, "weight": GgmlType.Q4_0},
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_gguf_file_is_computed_in_its_bits(kind: str, tmp_path: Path) -> None:
    plain = dict.fromkeys(("norm.weight", "token_embd.weight", "output.weight"), GgmlType.F32)
    path = write_model(wide_model(), tmp_path / "a.gguf", tiny_vocabulary, types={**plain, **FILES[kind]})
    computed_as_on_a_cpu(kind, path)


@pytest.mark.parametrize("kind", WIDE)
def test_a_checkpoint_in_4_bits_is_computed_in_4_bits(kind: str, tmp_path: Path) -> None:
    computed_as_on_a_cpu(kind, save_wide(kind, tmp_path))


@pytest.mark.parametrize(("kind", "family"), [("awq", "qwen3_moe"), ("mxfp4", "mixtral")])
def test_experts_in_4_bits_are_computed_in_4_bits(kind: str, family: str, tmp_path: Path) -> None:
    """In bf16 a token whose experts are nearly equally probable may get another one."""
    computed_as_on_a_cpu(f"{kind} {family}", save_wide(kind, tmp_path, family), most=0.01)


def computed_as_on_a_cpu(kind: str, path: Path, most: float = 1e-3) -> None:
    from services.executor.cpu.engine import build as build_cpu
    from services.executor.cuda.engine import build

    common: dict[str, Any] = {
        "model_path": path, "model_name": "m", "blocks": 40, "slots": 4,
        "max_step_tokens": 64,
    }  # fmt: skip
    on_gpu = build(TorchOptions(**common, device="cuda"))
    on_cpu = build_cpu(TorchOptions(**common, device="cpu", dtype="f32", threads=1))
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
    assert kl < most
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


@pytest.mark.parametrize("kind", ["plain", "zeros", "e2m1"])
def test_experts_multiply_their_own_rows(kind: str) -> None:
    """Some of no rows, and rows of experts of other ranks after them."""
    generator = torch.Generator("cuda").manual_seed(3)
    experts, width, inner = 6, 384, 256
    matrix = quantise_groups(
        torch.randn(experts * width, inner, device="cuda", generator=generator).bfloat16(), 32
    )
    if kind == "zeros":
        given = torch.randint(0, 16, matrix.scales.shape, device="cuda", generator=generator)
        matrix = Int4Groups(matrix.numbers, matrix.scales, given.to(torch.uint8))
    if kind == "e2m1":
        exponents = torch.randint(-9, -3, matrix.scales.shape, device="cuda", generator=generator)
        matrix = Int4Groups(matrix.numbers, 2.0**exponents, e2m1=True)
    weight = gpu.prepare(matrix, experts)
    plain = dequantise(matrix).double().view(experts, width, inner)
    assert len(weight) == experts
    for counts in ([1], [0, 3, 0, 1, 0, 2], [40, 0, 7, 700, 1, 0], [0] * 6):
        bounds = torch.tensor([0, *counts, *[0] * (experts - len(counts))], device="cuda").cumsum(0).int()
        x = torch.randn(int(bounds[-1]) + 5, inner, device="cuda", generator=generator).bfloat16()
        found = gpu.product(x, weight, bounds=bounds).double()
        for expert, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
            wanted = x[begin:end].double() @ plain[expert].T
            if end > begin:
                assert (found[begin:end] - wanted).norm() / wanted.norm() < 0.01, (counts, expert)


@pytest.mark.parametrize("kind", [*SCALES, None], ids=lambda kind: kind.name if kind else "MXFP4")
def test_a_product_with_other_numbers_is_that_of_the_dequantised_matrix(kind: GgmlType | None) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    if kind is None:
        numbers = torch.randint(-(2**31), 2**31, (384, 64), device="cuda", generator=generator)
        exponents = torch.randint(-9, -3, (384, 16), device="cuda", generator=generator)
        matrix = Int4Groups(numbers.int(), 2.0**exponents, e2m1=True)
    else:
        stored = InBlocks.of(random_blocks(kind, 384, 512), kind, 384)
        found = part_in_groups(Part("gate", (384, 512), WIDTH), stored, torch.float32, torch.device("cuda"))
        assert isinstance(found, ScaledInt4)
        matrix = found.matrix
    weight, plain = gpu.prepare(matrix), dequantise(matrix).double()
    for rows in (1, 3, 33, 200, 1000):
        x = torch.randn(rows, 512, device="cuda", generator=generator).bfloat16()
        wanted = x.double() @ plain.T
        error = (gpu.product(x, weight).double() - wanted).norm() / wanted.norm()
        print("error", kind, rows, error.item())
        assert error < 0.01
