"""Checkpoints in fp8: what they dequantise to, as transformers computes it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.executor.fp8_folders import BLOCK, KINDS, TOKEN, compressed, save_fp8
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.quantised import quantise_rows
from services.executor.checkpoint.stored import Cut, Dense
from services.executor.checkpoint.weights import Weights, load_hf, partition
from services.executor.model.description import WIDTH, Part
from services.executor.quantised.schemes import (
    InBlocksOfFp8,
    InFp8,
    ScaledFp8,
    part_in_fp8,
    scheme_of,
    with_scales,
)
from shared.errors import SetupError

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def parts(weights: Weights, layer: int) -> dict[str, torch.Tensor]:
    """The matrices of a layer, by the end of their names in the file."""
    found = {name: stored.values for name, stored in weights.layers[layer].items()}
    q, k, v = found["qkv"].split([64, 32, 32])
    gate, up = found["gate_up"].chunk(2)
    return {"q": q, "k": k, "v": v, "o": found["out"], "gate": gate, "up": up, "down": found["down"]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_what_its_numbers_and_scales_are(kind: str, tmp_path: Path) -> None:
    folder, wanted = save_fp8(kind, "qwen2", tmp_path)
    _, weights = load_hf(folder, torch.float32, CPU)
    _, kept = load_hf(folder, torch.bfloat16, CPU, load_part=part_in_fp8)
    for layer in range(3):
        assert all(
            isinstance(kept.layers[layer][name], ScaledFp8) for name in ("qkv", "out", "gate_up", "down")
        )
        both = zip(parts(weights, layer).items(), parts(kept, layer).values(), strict=True)
        for (name, values), again in both:
            want = next(
                each for key, each in wanted.items() if f"layers.{layer}." in key and f".{name}_proj" in key
            )
            assert values.equal(want)
            error = (again.float() - want).norm() / want.norm()
            # As it is, rounded to bf16; blocks are rounded to e4m3 once more.
            assert error < (0.05 if "block" in kind else 0.003)
    assert isinstance(kept.head, Dense)
    assert isinstance(kept.layers[0]["qkv_bias"], Dense)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_the_scales_of_their_parts(kind: str, tmp_path: Path) -> None:
    folder, _ = save_fp8(kind, "qwen2", tmp_path)
    _, whole = load_hf(folder, torch.float32, CPU)
    ranks = [
        load_hf(folder, torch.float32, CPU, lambda s, r=rank: partition(s, r, 2))[1] for rank in range(2)
    ]
    for name, dim in (("qkv", 0), ("out", 1), ("gate_up", 0), ("down", 1)):
        own = [rank.layers[1][name].values for rank in ranks]
        joined = torch.cat(own, dim)
        assert sorted(joined.sum(1 - dim).tolist()) == pytest.approx(
            sorted(whole.layers[1][name].values.sum(1 - dim).tolist()), abs=1e-4
        )


def test_experts_are_dequantised(tmp_path: Path) -> None:
    folder, wanted = save_fp8("blocks", "qwen3-moe", tmp_path)
    _, weights = load_hf(folder, torch.float32, CPU)
    down = weights.layers[1]["down"].values
    assert down[5].equal(wanted["model.layers.1.mlp.experts.5.down_proj.weight"])


def set_weights(**keys: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(keys)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.update(quant_method="bitnet"), "quant_method = 'bitnet'"),
        (lambda c: c.update(format="int-quantized"), "format = 'int-quantized'"),
        (lambda c: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (lambda c: c.update(transform_config={"R1": {}}), "transform_config"),
        (lambda c: c.update(config_groups={}), "config_groups"),
        (lambda c: c.update(surprise=1), "surprise = 1"),
        (set_weights(num_bits=4), "weights.num_bits = 4"),
        (set_weights(type="int"), "weights.type = 'int'"),
        (set_weights(strategy="group"), "weights.strategy = 'group'"),
        (set_weights(dynamic=True), "weights.dynamic = True"),
        (set_weights(strategy="block", block_structure="wide"), "the size of blocks = 'wide'"),
        (
            lambda c: c["config_groups"]["group_0"].update(input_activations={**TOKEN, "dynamic": False}),
            "input_activations.dynamic = False",
        ),
        (lambda c: c["config_groups"]["group_0"].update(input_activations=None), "input_activations"),
        (lambda c: c["config_groups"]["group_0"].update(weights="e4m3"), "group_0.weights = 'e4m3'"),
        (lambda c: c.update(sparsity_config="dense"), "sparsity_config = 'dense'"),
        (set_weights(strategy="block", block_structure=[128, 1e400]), "the size of blocks = [128, inf]"),
    ],
)
def test_unsupported_quantisation_is_refused(change: Callable[[dict[str, Any]], object], reason: str) -> None:
    config = json.loads(json.dumps(compressed("channel")))
    assert scheme_of({"quantization_config": config}) == InBlocksOfFp8(None)
    change(config)
    with pytest.raises(SetupError) as caught:
        scheme_of({"quantization_config": config})
    assert reason in caught.value.message
    assert "in quantization_config of config.json is not supported; supported are fp8" in caught.value.message


@pytest.mark.parametrize(
    "keys", [{"activation_scheme": "static"}, {"fmt": "e5m2"}, {"weight_block_size": [128]}, {"bits": 8}]
)
def test_plain_fp8_of_another_kind_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match="is not supported; supported are fp8 and compressed-tensors"):
        scheme_of({"quantization_config": {"quant_method": "fp8", **keys}})


def test_scales_that_do_not_fit_are_refused() -> None:
    numbers = Dense.of(torch.ones(64, 48).to(FP8))
    assert with_scales("w", numbers, torch.ones(2, 3), BLOCK).values.equal(torch.ones(64, 48))
    for shape in ((2, 4), (48,), (64, 2), (3, 2)):
        with pytest.raises(
            SetupError, match=r"the scales of tensor 'w' \[64, 48\] are .*nor \[2, 3\] of blocks"
        ):
            with_scales("w", numbers, torch.ones(shape), BLOCK)
    for value in (torch.nan, torch.inf, -1.0):
        with pytest.raises(SetupError, match="not finite and positive"):
            with_scales("w", numbers, torch.full((64, 1), value), None)
    with pytest.raises(SetupError, match="only matrices"):
        with_scales("w", Dense.of(torch.ones(3).to(FP8)), torch.ones(1), None)


def test_blocks_with_far_scales_are_refused_and_a_rank_may_have_near_ones() -> None:
    numbers, scales = (
        Dense.of(torch.ones(4, 32).to(FP8)),
        torch.tensor([[1.0, 15.0], [0.0, 16.0], [1.0, 16.0]]),
    )
    ok = InFp8("w", numbers.cut(Cut(0, 0, 2)), scales, (1, 16)).in_fp8(torch.float32, CPU)
    wanted = torch.tensor([[1.0] * 16 + [15.0] * 16, [0.0] * 16 + [16.0] * 16])
    torch.testing.assert_close(ok.values, wanted, rtol=2**-4, atol=0.0)  # rounded to e4m3 once more
    far = InFp8("w", numbers.cut(Cut(0, 2, 3)), scales, (1, 16))
    with pytest.raises(SetupError, match=r"tensor 'w' has blocks of 1 x 16 .* factor of 16 .*use dtype bf16"):
        far.in_fp8(torch.float32, CPU)
    assert far.cut(Cut(1, 20, 28)).in_fp8(torch.float32, CPU).values.equal(torch.full((1, 8), 16.0))
    assert far.loaded(torch.float32, CPU).values[0, 31] == 16.0


def test_memory_has_rows_columns_and_joined_matrices_right() -> None:
    values = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    whole = ScaledFp8(quantise_rows(values), torch.float32)
    assert whole.rows(torch.tensor([4, 1])).values.equal(whole.values[[4, 1]])
    assert whole.cut(Cut(0, 2, 5)).values.equal(whole.values[2:5])
    assert whole.cut(Cut(1, 16, 32)).values.equal(whole.values[:, 16:])
    assert whole.cut(Cut(0, 0, 2)).join([whole.cut(Cut(0, 2, 6))]).values.equal(whole.values)
    plain = whole.join([Dense.of(values)])
    assert isinstance(plain, Dense)
    assert plain.values.equal(torch.cat((whole.values, values)))
    powers = torch.tensor([0.5, 2.0] * 16)
    assert whole.scaled(torch.full((6, 1), 4.0)).values.equal(whole.values * 4)
    shrunk = whole.scaled(powers).values - whole.values * powers
    assert shrunk.abs().max() <= whole.matrix.scales.max() * 2 * 2.0**-10  # half of a subnormal step


def test_sizes_that_the_product_cannot_take_stay_plain() -> None:
    for shape in ((16, 24), (24, 16)):
        stored = Dense.of(torch.randn(shape))
        assert isinstance(part_in_fp8(Part("gate", shape, WIDTH), stored, torch.float32, CPU), Dense)
    found = part_in_fp8(Part("gate", (16, 32), WIDTH), Dense.of(torch.zeros(16, 32)), torch.float32, CPU)
    assert isinstance(found, ScaledFp8)
    assert found.values.equal(torch.zeros(16, 32))


def test_experts_of_gpt_oss_in_mxfp4_equal_transformers(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=3, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(4)
    model = transformers.GptOssForCausalLM(config).float()
    state, plain = dict(model.state_dict()), tmp_path / "plain"
    for name, rows, groups in (("gate_up_proj", 192, 2), ("down_proj", 64, 3)):
        at = f"model.layers.0.mlp.experts.{name}"
        blocks = torch.randint(0, 256, (3, rows, groups, 16), dtype=torch.uint8)
        scales = torch.randint(100, 130, (3, rows, groups), dtype=torch.uint8)
        widened = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
        model.load_state_dict({at: widened}, strict=False)
        del state[at]
        state |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    model.save_pretrained(plain)
    packed = tmp_path / "packed"
    packed.mkdir()
    save_file(state, packed / "model.safetensors")
    given = json.loads((plain / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps({**given, "quantization_config": method}))
    found, wanted = (
        load_hf(folder, torch.float32, torch.device("cpu"))[1].layers[0] for folder in (packed, plain)
    )
    assert found.keys() == wanted.keys()
    assert all(found[name].values.equal(wanted[name].values) for name in found)
    del state["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(state, packed / "model.safetensors")
    with pytest.raises(SetupError, match=r"experts\.down_proj_scales' is missing"):
        load_hf(packed, torch.float32, torch.device("cpu"))
