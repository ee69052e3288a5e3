"""Checkpoints in 4 bits: what they dequantise to, how ranks cut them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.int4_folders import AWQ, GROUP, KINDS, compressed, gptq, packed, save_int4, words

from services.executor.checkpoint.stored import Cut, Dense, scheme_in
from services.executor.checkpoint.weights import Weights, load_hf, partition
from services.executor.model.description import WIDTH, Part
from services.executor.quantised import int4
from services.executor.quantised.int4 import InInt4, Int4Format, ScaledInt4, dummy_in_int4, part_in_int4
from services.executor.quantised.schemes import scheme_of
from shared.errors import SetupError

CPU = torch.device("cpu")
MATRICES = ("qkv", "out", "gate_up", "down")
REORDERED = ("gptq act-order", "compressed group")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that takes the sizes of tiny models."""
    monkeypatch.setattr(int4, "GROUPS", (GROUP,))
    monkeypatch.setattr(int4, "_MULTIPLE", GROUP)


def parts(weights: Weights, layer: int) -> dict[str, torch.Tensor]:
    """The matrices of a layer, by the end of their names in the file."""
    found = {name: stored.values for name, stored in weights.layers[layer].items()}
    q, k, v = found["qkv"].split([64, 32, 32])
    gate, up = found["gate_up"].chunk(2)
    return {"q": q, "k": k, "v": v, "o": found["out"], "gate": gate, "up": up, "down": found["down"]}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_what_its_numbers_and_scales_are(kind: str, tmp_path: Path) -> None:
    folder, wanted = save_int4(kind, "qwen2", tmp_path)
    _, weights = load_hf(folder, torch.float32, CPU)
    kept = None
    if kind not in REORDERED:
        _, kept = load_hf(folder, torch.float32, CPU, load_part=part_in_int4)
        assert all(isinstance(kept.layers[0][name], ScaledInt4) for name in MATRICES)
    for layer in range(3):
        again = parts(kept or weights, layer)
        for name, values in parts(weights, layer).items():
            (want,) = (
                each for key, each in wanted.items() if f"layers.{layer}." in key and f".{name}_proj" in key
            )
            assert values.equal(want)
            assert again[name].equal(want)
    assert isinstance(weights.layers[0]["qkv_bias"], Dense)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_their_parts(kind: str, tmp_path: Path) -> None:
    """Heads of 16 columns, and MLPs of 112, of which each rank has whole groups."""
    folder, _ = save_int4(kind, "qwen2", tmp_path)
    _, whole = load_hf(folder, torch.float32, CPU)
    load_parts = [None] if kind in REORDERED else [None, part_in_int4]
    for load_part in load_parts:
        more = {} if load_part is None else {"load_part": load_part}
        ranks = [
            load_hf(folder, torch.float32, CPU, lambda s, r=rank: partition(s, r, 2), **more)[1]
            for rank in range(2)
        ]
        for name in ("out", "down"):
            joined = torch.cat([rank.layers[1][name].values for rank in ranks], 1)
            assert joined.equal(whole.layers[1][name].values)
        gates = [rank.layers[1]["gate_up"].values.chunk(2) for rank in ranks]
        joined = torch.cat([gate for gate, _ in gates] + [up for _, up in gates])
        assert joined.equal(whole.layers[1]["gate_up"].values)


def test_zero_points_of_0_borrow_from_their_neighbours() -> None:
    """GPTQ's first format: one is taken from each number, in whole words."""
    generator = torch.Generator().manual_seed(9)
    zeros, numbers = (torch.randint(0, 16, shape, generator=generator) for shape in ((40, 2), (40, 32)))
    zeros[:, 1] = torch.arange(40) % 2 * 15  # a zero has neighbours of 15, in the same word
    tensors = {
        "w.qweight": words(numbers.T, 0), "w.qzeros": words(zeros.T, 1) - 0x11111111,
        "w.scales": torch.ones(2, 40).half(),
    }  # fmt: skip
    stored = Int4Format("gptq", 16, less_one=True).stored(
        "w.weight", tensors, lambda key: Dense.of(tensors[key])
    )
    assert stored.values.equal((numbers - zeros.repeat_interleave(16, 1)).float())


@pytest.mark.parametrize("begin", [0, 3, 8, 21])
@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq act-order", "compressed zeros"])
def test_a_part_may_begin_within_a_word(kind: str, begin: int, tmp_path: Path) -> None:
    folder, wanted = save_int4(kind, "llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    scheme = scheme_of(json.loads((folder / "config.json").read_text()))
    assert isinstance(scheme, Int4Format)
    stored = scheme.stored(name, tensors, lambda key: Dense.of(tensors[key]))
    rows, columns = Cut(0, begin, 40), Cut(1, begin, 45)
    assert stored.cut(rows).cut(columns).values.equal(wanted[name][begin:40, begin:45])
    assert stored.cut(Cut(0, 5, 5)).values.shape == (0, 112)
    assert stored.rows(torch.tensor([5, 2])).values.equal(wanted[name][[5, 2]])


EXPERTS = {  # the form, the model, and an expert's matrices
    "awq": ({**AWQ, "group_size": 8}, "qwen3-moe", "mlp.experts.{}.{}_proj"),
    "gptq rows": (gptq(group_size=-1, sym=True), "qwen3-moe", "mlp.experts.{}.{}_proj"),
    "compressed": (compressed(group_size=8, symmetric=False), "qwen3-moe", "mlp.experts.{}.{}_proj"),
    "mixtral": (gptq(), "mixtral", "block_sparse_moe.experts.{}.{}"),
}


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in EXPERTS), ("awq", 1)])
def test_experts_lie_below_each_other(
    kind: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantised at load, or kept in 4 bits; a rank has some of them."""
    monkeypatch.setattr(int4, "GROUPS", (8, GROUP))
    config, source, at = EXPERTS[kind]
    matrices = ("w1", "w3", "w2") if source == "mixtral" else ("gate", "up", "down")
    folder, wanted = save_int4(config, source, tmp_path)
    for rank in range(ranks):
        for load_part in (None, part_in_int4):
            more = {} if load_part is None else {"load_part": load_part}
            shapes, weights = load_hf(
                folder, torch.float32, CPU, lambda s, r=rank: partition(s, r, ranks), **more
            )
            layer = weights.layers[1]
            for name in ("gate_up", "down"):
                assert isinstance(layer[name], Dense if load_part is None else ScaledInt4)
                assert len(layer[name].values) == layer[name].shape[0]
            assert shapes.experts is not None
            first = shapes.experts.first
            for i, (both, down) in enumerate(zip(layer["gate_up"].values, layer["down"].values, strict=True)):
                names = [f"model.layers.1.{at.format(first + i, each)}.weight" for each in matrices]
                assert torch.cat([wanted[name] for name in names[:2]]).equal(both)
                assert wanted[names[2]].equal(down)


def test_experts_of_which_one_is_plain_are_dequantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4, "GROUPS", (8,))
    folder, wanted = save_int4(gptq(group_size=8), "qwen3-moe", tmp_path)
    module = "model.layers.1.mlp.experts.5.down_proj."
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
    save_file({**tensors, f"{module}weight": wanted[f"{module}weight"]}, folder / "model.safetensors")
    _, weights = load_hf(folder, torch.float32, CPU, load_part=part_in_int4)
    down = weights.layers[1]["down"]
    assert isinstance(down, Dense)
    assert down.values[5].equal(wanted[f"{module}weight"])


def test_an_expert_that_products_cannot_read_is_named(tmp_path: Path) -> None:
    folder, _ = save_int4(gptq(group_size=8), "qwen3-moe", tmp_path)
    with pytest.raises(SetupError, match=r"experts\.0\.gate_proj\.qweight' has groups of 8 columns"):
        load_hf(folder, torch.float32, CPU, load_part=part_in_int4)


def test_biases_of_zeros_are_dropped_and_others_refused(tmp_path: Path) -> None:
    folder, _ = save_int4("gptq", "llama", tmp_path)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.o_proj.bias"
    save_file({**tensors, name: torch.zeros(64)}, folder / "model.safetensors")
    load_hf(folder, torch.float32, CPU)
    save_file({**tensors, name: torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(SetupError, match=f"tensors that this executor does not compute: {name}"):
        load_hf(folder, torch.float32, CPU)


def test_a_head_in_4_bits_that_is_not_the_embedding_is_refused(tmp_path: Path) -> None:
    folder, _ = save_int4(gptq(group_size=8), "llama-9-3-tied", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    found, _ = packed(gptq(group_size=8), torch.randn(136, 72))
    tensors |= {f"lm_head.{end}": tensor for end, tensor in found.items()}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SetupError, match=r"'lm_head.weight' is stored and is not the embedding"):
        load_hf(folder, torch.float32, CPU)


def without(end: str) -> Callable[[dict[str, torch.Tensor], str], object]:
    return lambda tensors, module: tensors.pop(module + end)


def put(end: str, value: Any) -> Callable[[dict[str, torch.Tensor], str], object]:
    def change(tensors: dict[str, torch.Tensor], module: str) -> None:
        tensors[module + end] = value(tensors[module + end]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("awq", without("scales"), "'{}scales' is missing beside '{}qweight'"),
        ("awq", without("qzeros"), "'{}qzeros' is missing beside"),
        (
            "awq",
            put("scales", torch.ones(4, 8).half()),
            r"'{}scales' is \[4, 8\], which does not fit a matrix of",
        ),
        (
            "awq",
            put("qzeros", torch.ones(4, 4).int()),
            r"'{}qzeros' is \[4, 4\], which does not fit a matrix of",
        ),
        ("awq", put("scales", lambda t: t * torch.nan), "the scales of tensor '{}qweight' are not finite"),
        ("awq", put("scales", lambda t: t.int()), "'{}scales' has no floating point numbers"),
        ("awq", put("qweight", lambda t: t.float()), "'{}qweight' is not in int32"),
        ("awq", put("qweight", lambda t: t[0]), r"'{}qweight' is \[14\]: only matrices"),
        ("awq", put("weight", torch.ones(2)), "has '{}[a-z]+' and also '{}weight'"),
        ("gptq act-order", without("g_idx"), "'{}g_idx' is missing"),
        ("compressed group", without("weight_g_idx"), "'{}weight_g_idx' is missing"),
        ("gptq", put("g_idx", lambda t: t + 9), r"columns of '{}' \(g_idx\) are not 64 of 0 to 3"),
        ("gptq", put("g_idx", lambda t: t[:9]), r"columns of '{}' \(g_idx\) are not 64 of 0 to 3"),
        ("gptq symmetric", put("qzeros", lambda t: t + 1), "'{}qweight' has zero points other than 8"),
        ("compressed", put("weight_shape", torch.tensor([112, 80])), r"'{}weight_shape' is \[112, 80\]"),
        ("compressed zeros", without("weight_zero_point"), "'{}weight_zero_point' is missing"),
        ("compressed", put("weight_zero_point", torch.ones(2)), "'{}weight_zero_point' has zero points, but"),
        ("compressed", put("weight_packed", lambda t: t[:, :6]), r"'{}weight_shape' is \[112, 64\], where"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    kind: str, change: Callable[[dict[str, torch.Tensor], str], object], reason: str, tmp_path: Path
) -> None:
    folder, _ = save_int4(kind, "llama", tmp_path)
    tensors, module = load_file(folder / "model.safetensors"), "model.layers.2.mlp.up_proj."
    change(tensors, module)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(SetupError, match=reason.replace("{}", module)):
        load_hf(folder, torch.float32, CPU)


def test_groups_that_do_not_divide_the_columns_are_refused(tmp_path: Path) -> None:
    folder, _ = save_int4("gptq", "llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 48
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match=r"qweight' has \d+ columns, which groups of 48 do not divide"):
        load_hf(folder, torch.float32, CPU)


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(SetupError) as caught:
        scheme_of({"quantization_config": config})
    assert "in quantization_config of config.json is not supported; supported are fp8" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**AWQ, "version": "gemv"}, "version = 'gemv'"),
        ({**AWQ, "backend": "llm-awq"}, "backend = 'llm-awq'"),
        ({**AWQ, "bits": 8}, "bits = 8"),
        ({**AWQ, "group_size": "128"}, "group_size = '128'"),
        ({**AWQ, "group_size": 0}, "group_size = 0"),
        ({**AWQ, "desc_act": True}, "desc_act = True"),
        ({**AWQ, "surprise": 1}, "surprise = 1"),
        (gptq(bits=3), "bits = 3"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
        (gptq(checkpoint_format=False), "checkpoint_format = False"),
        (gptq(is_marlin_format=True), "is_marlin_format = True"),
        (gptq(pack_dtype="int8"), "pack_dtype = 'int8'"),
        (gptq(dynamic={"-:lm_head": {}}), "dynamic = "),
        (compressed(num_bits=8), "weights.num_bits = 8"),
        (compressed(type="float"), "weights.type = 'float'"),
        (compressed(strategy="tensor"), "weights.strategy = 'tensor'"),
        (compressed(group_size=None), "weights.group_size = None"),
        (compressed(dynamic=True), "weights.dynamic = True"),
        ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes'"),
    ],
)
def test_unreadable_int4_checkpoint_is_refused(config: dict[str, Any], reason: str) -> None:
    assert reason in refused(config)


def test_activations_in_8_bits_are_refused() -> None:
    config = compressed()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    assert "group_0.input_activations = {'num_bits': 8}" in refused(config)
    config = compressed()
    config["config_groups"]["group_1"] = compressed(group_size=32)["config_groups"]["group_0"]
    assert "config_groups = " in refused(config)


def test_folder_declares_its_quantisation(tmp_path: Path) -> None:
    assert scheme_in(tmp_path).kept_in == ""
    assert scheme_in(save_int4("awq", "llama", tmp_path)[0]).kept_in == "int4"
    config = json.loads((tmp_path / "config.json").read_text())
    for given, wanted in (({"quant_method": "fp8"}, "fp8"), (None, ""), ({"quant_method": "bitnet"}, "")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": given}))
        assert scheme_in(tmp_path).kept_in == wanted


def in_file(config: dict[str, Any], rows: int, columns: int) -> InInt4:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    tensors = {f"w.{end}": tensor for end, tensor in packed(config, values)[0].items()}
    scheme = scheme_of({"quantization_config": config})
    assert isinstance(scheme, Int4Format)
    return scheme.stored("w.weight", tensors, lambda key: Dense.of(tensors[key]))


def test_unsupported_weights_are_refused_by_the_name_of_the_tensor() -> None:
    ok = in_file(gptq(group_size=32), 16, 128)
    assert ok.in_int4(torch.float32, CPU).values.equal(ok.values)
    assert ok.cut(Cut(1, 32, 96)).in_int4(torch.float32, CPU).values.equal(ok.values[:, 32:96])
    cases = (
        (
            in_file(gptq(desc_act=True, group_size=32), 16, 128),
            r"in the order of activations \(desc_act, g_idx\)",
        ),
        (
            in_file(gptq(group_size=64), 16, 128).cut(Cut(1, 0, 32)),
            "be cut within a group of 64 columns, at 0 and 32",
        ),
        (
            in_file(gptq(group_size=16), 16, 128),
            "groups of 16 columns, where products take 32, 64, 128 or a row",
        ),
    )
    for stored, reason in cases:
        with pytest.raises(SetupError, match=f"tensor 'w.qweight' .*{reason}.* use dtype fp8 or bf16"):
            stored.in_int4(torch.float32, CPU)
        stored.loaded(torch.float32, CPU)
    rows = in_file(gptq(group_size=-1, sym=True), 16, 128)
    assert rows.cut(Cut(1, 40, 72)).in_int4(torch.float32, CPU).values.equal(rows.values[:, 40:72])


def test_memory_has_rows_columns_and_joined_matrices_right() -> None:
    first, second = (
        in_file(gptq(group_size=32, sym=symmetric), 16, 128).in_int4(torch.float32, CPU)
        for symmetric in (False, True)
    )
    assert second.matrix.zeros is None
    assert len(second.data) == 2
    whole = first.join([second])
    assert isinstance(whole, ScaledInt4)
    assert whole.values.equal(torch.cat((first.values, second.values)))
    assert whole.rows(torch.tensor([20, 1])).values.equal(whole.values[[20, 1]])
    assert whole.cut(Cut(0, 10, 20)).values.equal(whole.values[10:20])
    assert whole.cut(Cut(1, 32, 96)).values.equal(whole.values[:, 32:96])
    assert isinstance(whole.join([Dense.of(whole.values)]), Dense)
    others = in_file(gptq(group_size=64), 16, 128).in_int4(torch.float32, CPU)
    assert whole.join([others]).values.equal(torch.cat((whole.values, others.values)))
    assert whole.scaled(torch.full((32, 1), 0.25)).values.equal(whole.values * 0.25)
    of_groups = torch.tensor([0.5, 2.0, 1.0, 2.0**-30]).repeat_interleave(32)
    scaled = whole.scaled(of_groups)
    assert isinstance(scaled, ScaledInt4)
    assert scaled.values.equal(whole.values * of_groups)
    mixed = torch.tensor([0.5, 2.0] * 64)
    assert whole.scaled(mixed).values.equal(whole.values * mixed)


def test_sizes_that_the_product_cannot_take_stay_plain() -> None:
    for shape in ((128, 64), (64, 128)):
        part = Part("gate", shape, WIDTH)
        assert isinstance(part_in_int4(part, in_file(gptq(group_size=32), *shape), torch.float32, CPU), Dense)
        assert isinstance(dummy_in_int4(part, Dense.of(torch.randn(shape)), torch.float32, CPU), Dense)
    values = torch.randn(128, 256, generator=torch.Generator().manual_seed(5))
    found = dummy_in_int4(Part("gate", (128, 256), WIDTH), Dense.of(values), torch.float32, CPU)
    assert isinstance(found, ScaledInt4)
    assert found.matrix.group == 128
    assert (found.values - values).abs().max() <= found.matrix.scales.max() * 0.51
