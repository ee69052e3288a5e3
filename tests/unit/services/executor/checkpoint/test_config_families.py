"""A family of models is one entry, shown with Phi-3; no engine knows a family; older fingerprints stay."""

from __future__ import annotations

import functools
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.tiny_models import save_tiny
from support.source_tree import ROOT

from services.executor.checkpoint.config import from_hf
from services.executor.checkpoint.families import FAMILIES
from services.executor.checkpoint.kv_cache import KvFormat, fingerprint
from services.executor.checkpoint.stored import Dense, Stored
from services.executor.checkpoint.weights import (
    Partition,
    Stage,
    assemble,
    load_hf,
    partition,
    stage_partition,
    whole_model,
)
from services.executor.model.description import Part, describe
from shared.errors import SetupError

CPU = torch.device("cpu")
PRODUCT = [
    *(ROOT / "services").rglob("*.py"),
    *(ROOT / "kernels").rglob("*.py"),
    *(ROOT / "shared").rglob("*.py"),
]
ENGINES = (
    *(f"services/executor/{name}/" for name in ("cpu", "cuda", "group", "model", "parallel", "kv_transfer")),
    "kernels/",
)

# The keys of the published Phi-3-mini-4k-instruct.
PHI3: dict[str, Any] = {
    "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1,
    "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 4096,
    "model_type": "phi3", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 4,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.2",
    "use_cache": True, "vocab_size": 100,
}  # fmt: skip


def test_phi3_is_one_entry() -> None:
    lines = {
        str(path.relative_to(ROOT)): [
            line for line in path.read_text("utf-8").splitlines() if re.search("phi.?3", line, re.I)
        ]
        for path in PRODUCT
    }
    assert [name for name, found in lines.items() if found] == ["services/executor/checkpoint/families.py"]
    entry = re.search(
        r'    "phi3": Family\(.*?\n    \),\n',
        (ROOT / "services/executor/checkpoint/families.py").read_text(),
        re.S,
    )
    assert entry is not None
    assert entry[0].count("\n") <= 60


def test_engines_have_no_branch_for_a_family() -> None:
    named = re.compile("|".join(rf"""["']{kind}["']""" for kind in FAMILIES))
    knows = [str(path.relative_to(ROOT)) for path in PRODUCT if named.search(path.read_text("utf-8"))]
    assert [name for name in knows if name.startswith(ENGINES)] == []


def test_the_published_configurations_are_taken() -> None:
    shapes = from_hf(PHI3)
    assert (shapes.max_context, shapes.sliding_window, shapes.kv_heads) == (4096, 2047, 4)
    rope = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    mini4 = {
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "max_position_embeddings": 131072, "partial_rotary_factor": 0.75, "sliding_window": 262144,
    }  # fmt: skip
    for kind in ("longrope", "su"):
        shapes = from_hf({**PHI3, **mini4, "rope_scaling": {**rope, "type": kind}})
        assert (shapes.max_context, shapes.rope_gain) == (131072, pytest.approx(1.190238, abs=1e-6))
        assert [len(shapes.rope_factors), shapes.short_rope[0]] == [8, 4096]
    for change in ({"full_attn_mod": 2}, {"interpolate_factor": 2}, {"lm_head_bias": True}):
        with pytest.raises(SetupError, match=rf"{min(change)} = .* not supported"):
            from_hf({**PHI3, **change})


@pytest.mark.parametrize("kind", ["phi3", "phi3-longrope"])
def test_ranks_cut_parts_of_one_tensor(kind: str, tmp_path: Path) -> None:
    folder = save_tiny(kind, tmp_path)
    _, weights = load_hf(folder, torch.float32, CPU)
    parts = [
        load_hf(folder, torch.float32, CPU, functools.partial(partition, rank=i, size=2)) for i in (0, 1)
    ]
    for i, layer in enumerate(weights.layers):
        held = [part.layers[i] for _, part in parts]
        gates, ups = zip(*(each["gate_up"].values.chunk(2) for each in held), strict=True)
        assert torch.cat([*gates, *ups]).equal(layer["gate_up"].values)
        sizes = [[n * s.head_dim for n in (s.heads, s.kv_heads, s.kv_heads)] for s, _ in parts]
        rows = [each["qkv"].values.split(size) for each, size in zip(held, sizes, strict=True)]
        assert torch.cat([part for same in zip(*rows, strict=True) for part in same]).equal(
            layer["qkv"].values
        )


SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512, "num_attention_heads": 4,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 70, "rms_norm_eps": 1e-5,
}  # fmt: skip
MOE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1],
    "head_dim": 16,
}  # fmt: skip
# By the code before there were descriptions: KV of older executors is still read.
PRINTS = {
    "llama": [
        "409153aac657cc1e8cd4d55e1e3aa9c3",
        "5a4faef9cb39847a4d81ef47b875679b",
        "8955ba5e957979495b28089e46647808",
    ],
    "qwen2": [
        "edcd52af8d03f433f07afba22077c5fc",
        "20f227026264229ca4e5219a1272b551",
        "65c9cd1e18dd029fa69a280a3a5e9f6e",
    ],
    "qwen3": [
        "73f32baffa9d96bf9d6a229162b9cfc1",
        "162841895df9e41a6560edbde5892ceb",
        "35b1e0f10ce59b49be03b1aff6d3f7d9",
    ],
    "qwen3_moe": [
        "719acefed5e5c49ed65c7faaab09cb4b",
        "8d82fb01626dece9c21f16fa04788c13",
        "8a319139ac4d8d083ba7f3f4d7fed87e",
    ],
}


def formula(part: str, layer: int, shape: tuple[int, ...]) -> torch.Tensor:
    size = 1
    for each in shape:
        size *= each
    begin = zlib.crc32(f"{part} {layer}".encode()) % 997
    return (torch.arange(begin, begin + size) * 31 % 257).view(shape).float() / 256 - 0.5


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_fingerprints_of_older_executors_stay(kind: str) -> None:
    more = MOE if kind == "qwen3_moe" else {"tie_word_embeddings": kind == "llama"}
    whole = from_hf({"model_type": kind, **SIZES, **more})
    sizes = {part.name: part.shape for part, _ in describe(whole).parts()}

    def find(part: Part, layer: int) -> Stored:
        return Dense.of(formula(part.name, layer, sizes[part.name]))

    def print_of(part: Partition) -> str:
        weights = assemble(part, find, torch.float32, CPU)
        return fingerprint("m", part.shapes, weights, 16, KvFormat(torch.float32))

    parts = (whole_model(whole), partition(whole, 1, 2), stage_partition(whole, Stage(1, 2)))
    assert [print_of(part) for part in parts] == PRINTS[kind]
