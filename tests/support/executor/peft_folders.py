"""Adapters in PEFT's format, and the base with an adapter merged into its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    base: Path,
    folder: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = TARGETS,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    size: float = 0.5,
    **config: object,
) -> Path:
    """A random adapter of a Hugging Face folder, large enough that it changes most tokens."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            height, width = weight.shape
            a = torch.randn(rank, width, generator=random) / width**0.5
            b = torch.randn(height, rank, generator=random) * size / rank**0.5
            key = f"base_model.model.{module}"
            tensors |= {f"{key}.lora_A.weight": a.to(dtype), f"{key}.lora_B.weight": b.to(dtype)}
    return save_adapter(folder, tensors, rank=rank, alpha=alpha, targets=targets, **config)


def save_adapter(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] = TARGETS,
    **config: object,
) -> Path:
    """The folder with these matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none",
        "target_modules": [*targets], "base_model_name_or_path": "base", "inference_mode": True,
        "lora_dropout": 0.0, "use_rslora": False, "use_dora": False, "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The base with W + s B A in place of W."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config["use_rslora"] else rank)
    weights, matrices = (
        load_file(base / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for name, a in matrices.items():
        if name.endswith(".lora_A.weight"):
            b = matrices[name.replace("lora_A", "lora_B")]
            key = name.removeprefix("base_model.model.").replace(".lora_A", "")
            added = scale * b.double() @ a.double()
            weights[key] = (weights[key].double() + added).float()
    save_file(weights, folder / "model.safetensors")
    return folder
