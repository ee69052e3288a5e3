"""Blocks of a GGUF file as the products of a GPU take them: the same numbers, in 4 or 8 bits."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from support.executor.gguf_raw import SCALES, random_blocks
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import save_tiny

from services.executor.checkpoint import loader
from services.executor.checkpoint.loader import TorchOptions, load
from services.executor.checkpoint.stored import Dense
from services.executor.model.description import VOCAB, WIDTH, Part
from services.executor.quantised import dtypes, int4
from services.executor.quantised.gguf_blocks import InBlocks, part_in_groups
from services.executor.quantised.int4 import ScaledInt4
from shared.errors import SetupError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PART = Part("gate", (128, 512), WIDTH)


def in_file(kind: GgmlType) -> InBlocks:
    return InBlocks.of(random_blocks(kind, 128, 512), kind, 128)


def in_groups(stored: InBlocks, part: Part = PART) -> ScaledInt4:
    found = part_in_groups(part, stored, torch.float32, CPU)
    assert isinstance(found, ScaledInt4)
    return found


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_elements_equal_the_elements_of_the_blocks(kind: GgmlType) -> None:
    stored = in_file(kind)
    found, wanted = in_groups(stored), stored.values
    assert found.matrix.bits == (4 if kind.name.startswith("Q4") else 8)
    assert found.matrix.group == (16 if kind == GgmlType.Q6_K else 32)
    if found.matrix.zeros is None:
        assert found.values.equal(wanted)
    else:  # a minimum is divided by its scale, and multiplied again
        torch.testing.assert_close(found.values, wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())


def test_a_block_without_a_scale_is_its_minimum() -> None:
    raw = random_blocks(GgmlType.Q4_1, 128, 512)
    raw[3, 20:22] = 0
    stored = InBlocks.of(raw, GgmlType.Q4_1, 128)
    found = in_groups(stored).values
    assert found[3, 32:64].equal(stored.values[3, 32:64])
    assert found[3, 32:64].unique().numel() == 1


def test_matrices_of_several_types_are_joined_in_8_bits() -> None:
    kinds = (GgmlType.Q4_K, GgmlType.Q4_0, GgmlType.Q6_K, GgmlType.Q8_0)
    first, *more = map(in_groups, map(in_file, kinds))
    joined = first.join(more)
    assert isinstance(joined, ScaledInt4)
    assert (joined.matrix.bits, joined.matrix.group) == (8, 16)
    assert joined.values.equal(torch.cat([each.values for each in (first, *more)]))
    alike = more[1].join([more[2]])
    assert isinstance(alike, ScaledInt4)
    assert alike.matrix.zeros is None
    assert alike.values.equal(torch.cat([more[1].values, more[2].values]))


def test_damaged_scales_are_refused_and_sizes_without_a_product_stay_plain() -> None:
    raw = random_blocks(GgmlType.Q8_0, 128, 512)
    raw[5, :2] = np.frombuffer(np.float16(np.inf).tobytes(), dtype=np.uint8)
    damaged = InBlocks.of(raw, GgmlType.Q8_0, 128)
    with pytest.raises(SetupError, match="a matrix gate of the model has scales that are not finite"):
        in_groups(damaged)
    stored = in_file(GgmlType.Q8_0)
    for part in (Part("gate", (120, 512), WIDTH), Part("embedding", (128, 512), VOCAB)):
        own = InBlocks.of(stored.matrices[0][0][: part.shape[0]], GgmlType.Q8_0, part.shape[0])
        found = part_in_groups(part, own, torch.float32, CPU)
        assert isinstance(found, Dense)
        assert found.values.equal(own.values)


def test_a_gpu_keeps_a_file_in_blocks_if_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(
        "llama", tmp_path / "a.gguf", types={"weight": GgmlType.F32, ".ffn_gate.weight": GgmlType.F32}
    )
    save_tiny("llama", tmp_path / "folder")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())  # transformers is imported by now

    def dtype(of: Path, name: str = "auto", **more: bool) -> str:
        wanted = TorchOptions(model_path=of, model_name="m", device="cuda", dtype=name, **more)
        return loader._dtype_name(wanted, CUDA)

    assert dtype(path) == "bf16"  # few weights are in blocks
    with pytest.raises(SetupError, match="and GGUF files of 4 to 8 bits"):
        dtype(path, "int4")
    monkeypatch.setattr(dtypes, "type_of_blocks", lambda _: GgmlType.Q4_0)
    assert dtype(path) == "bf16"
    with pytest.raises(SetupError, match="no products of 64 by 112 columns, which are no multiples of 128"):
        dtype(path, "int4")
    monkeypatch.setattr(int4, "_MULTIPLE", 16)
    assert dtype(path) == dtype(path, "int4") == "int4"
    assert dtype(path, deterministic=True) == "bf16"
    assert dtype(path, "fp8") == "fp8"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert dtype(path) == "bf16"


def test_a_file_is_loaded_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, in the memory of a CPU: q and k in the order of the model."""
    monkeypatch.setattr(dtypes, "INT4", replace(dtypes.INT4, why_not=lambda *_: ""))
    monkeypatch.setattr(int4, "_MULTIPLE", 16)
    types = dict.fromkeys(
        ("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight"), GgmlType.Q8_0
    )
    path = write_gguf("llama", tmp_path / "a.gguf", types=types)

    def layer(dtype: str) -> dict[str, object]:
        wanted = TorchOptions(model_path=path, model_name="m", device="cpu", dtype=dtype, blocks=8, slots=2)
        return dict(load(wanted).weights.layers[1])

    kept, plain = layer("int4"), layer("bf16")
    assert isinstance(kept["qkv"], ScaledInt4)
    assert isinstance(kept["gate_up"], Dense)  # up is not in blocks
    for name in ("qkv", "out", "gate_up", "down"):
        assert kept[name].values.equal(plain[name].values)
