"""MXFP4 as compressed-tensors stores it: what its numbers stand for, on a CPU, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.int4_folders import MXFP4, packed, save_wide

import kernels.cpu_jit
from services.executor.checkpoint.loader import TorchOptions, load
from services.executor.checkpoint.stored import Cut, Dense
from services.executor.model.description import WIDTH, Part
from services.executor.quantised.int4 import InInt4, Int4Format, ScaledInt4, part_in_blocks, part_in_int4
from services.executor.quantised.schemes import scheme_of
from shared.errors import SetupError

CPU = torch.device("cpu")
PART = Part("gate", (128, 256), WIDTH)


def in_file(**other: torch.Tensor | None) -> tuple[InInt4, torch.Tensor]:
    """A matrix as a file has it, with `other` tensors (None: none), and what it stands for."""
    values = torch.randn(128, 256, generator=torch.Generator().manual_seed(3))
    values[5, 32:64] *= 2.0**-30
    values[6] *= 3.0
    tensors, wanted = packed(MXFP4, values)
    given = {f"w.{end}": tensor for end, tensor in {**tensors, **other}.items() if tensor is not None}
    scheme = scheme_of({"quantization_config": MXFP4})
    assert isinstance(scheme, Int4Format)
    assert scheme.weight_of("w.weight_packed", given) == "w.weight"
    return scheme.stored("w.weight", given, lambda key: Dense.of(given[key])), wanted


def test_numbers_equal_the_standards_times_a_power_of_two() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(128, 16)
    exponents = torch.tensor([120, 127, 128, 1, 250, 127, 127, 127], dtype=torch.uint8).expand(128, 8)
    stored, _ = in_file(weight_packed=codes[:, ::2] | codes[:, 1::2] << 4, weight_scale=exponents)
    half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    standard = torch.cat((half, -half)).repeat(16) * 2.0 ** (exponents[0].double() - 127).repeat_interleave(
        32
    )
    assert stored.values.double().equal(standard.expand(128, 256))
    assert stored.in_int4(torch.float32, CPU).values.double().equal(standard.expand(128, 256))


def test_parts_equal_the_parts_of_the_whole() -> None:
    stored, wanted = in_file()
    assert stored.values.equal(wanted)
    assert stored.cut(Cut(1, 40, 90)).cut(Cut(0, 3, 9)).values.equal(wanted[3:9, 40:90])
    kept = part_in_int4(PART, stored, torch.bfloat16, CPU)
    assert isinstance(kept, ScaledInt4)
    assert kept.values.equal(wanted.bfloat16())
    joined = kept.cut(Cut(1, 64, 128)).join([kept.cut(Cut(1, 0, 64))])
    assert isinstance(joined, ScaledInt4)
    assert joined.values.equal(torch.cat((wanted[:, 64:128], wanted[:, :64])).bfloat16())
    assert kept.scaled(torch.full((128, 1), 0.25)).values.equal(wanted.bfloat16() * 0.25)
    with pytest.raises(SetupError, match="would be cut within a group of 32 columns"):
        part_in_int4(Part("gate", (128, 128), WIDTH), stored.cut(Cut(1, 16, 144)), torch.bfloat16, CPU)


@pytest.mark.skipif(not kernels.cpu_jit.available(), reason="no Numba: matrices do not stay in blocks")
def test_a_cpu_multiplies_with_twice_the_numbers_in_8_bits() -> None:
    stored, wanted = in_file(weight_scale=torch.full((128, 8), 125, dtype=torch.uint8))
    kept = part_in_blocks(PART, stored, torch.float32, CPU)
    assert isinstance(kept, ScaledInt4)
    (blocks,) = kept.blocks()
    assert blocks.format.bits == 8
    assert blocks.values().equal(stored.values)
    small = part_in_blocks(PART, in_file()[0], torch.float32, CPU)
    assert isinstance(small, Dense)  # float16 has no such scale
    assert small.values.equal(wanted)


def test_a_folder_is_loaded_on_a_cpu(tmp_path: Path) -> None:
    folder = save_wide("mxfp4", tmp_path)
    found = load(TorchOptions(model_path=folder, model_name="m", device="cpu", blocks=8, slots=2))
    down = found.weights.layers[1]["down"].values
    assert down.shape == (512, 768)
    assert 0.01 < down.std() < 0.03
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    tensors[name] = torch.full_like(tensors[name], 255)  # NaN
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SetupError, match=f"scales of tensor '{name[:-5]}packed' are not finite"):
        load(TorchOptions(model_path=folder, model_name="m", device="cpu", blocks=8, slots=2))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"weight_scale": None}, "'w.weight_scale' is missing beside 'w.weight_packed'"),
        ({"weight_scale": torch.ones(128, 9, dtype=torch.uint8)}, "'w.weight_scale' is .128, 9., which does"),
        ({"weight_scale": torch.ones(128, 8)}, "'w.weight_scale' is no matrix of bytes"),
        (
            {"weight_packed": torch.ones(128, 32, dtype=torch.int32)},
            "'w.weight_packed' is no matrix of bytes",
        ),
        ({"weight_packed": torch.ones(128, 120, dtype=torch.uint8)}, "which does not fit a matrix of 128"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(other: dict[str, torch.Tensor | None], why: str) -> None:
    with pytest.raises(SetupError, match=why):
        in_file(**other)


def test_inputs_that_are_rounded_as_they_come_stay_plain_and_others_are_refused() -> None:
    def scheme(where: str, **keys: Any) -> object:
        config = copy.deepcopy(MXFP4)
        group = config["config_groups"]["group_0"]
        group[where] = {**group["weights"], **keys}
        return scheme_of({"quantization_config": config})

    assert scheme("input_activations", dynamic=True) == Int4Format("mxfp4", 32, symmetric=True)
    for where, keys, why in (
        ("input_activations", {}, "input_activations = "),
        ("input_activations", {"dynamic": True, "num_bits": 8}, "input_activations.num_bits = 8"),
        ("weights", {"group_size": 16}, "weights.group_size = 16"),
        ("weights", {"type": "int"}, "weights.type = 'int'"),
        ("weights", {"dynamic": True}, "weights = "),
    ):
        with pytest.raises(SetupError, match=why):
            scheme(where, **keys)
