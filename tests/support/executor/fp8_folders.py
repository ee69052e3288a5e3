"""Small random models as folders in fp8, in each supported form, and the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.executor.tiny_models import save_tiny

FP8 = torch.float8_e4m3fn
BLOCK = (32, 16)
TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**weights, "observer": "minmax", **more}}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {**group, "input_activations": TOKEN, "output_activations": None}},
        "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


# By name: the configuration, the end of the scales' names, rows and columns with one scale (0: all of them).
KINDS: dict[str, tuple[dict[str, Any], str, tuple[int, int]]] = {
    "tensor": (compressed("tensor"), "_scale", (0, 0)),
    "channel": (compressed("channel"), "_scale", (1, 0)),
    "plain tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "_scale", (0, 0)),
    "blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [*BLOCK]},
        "_scale_inv",
        BLOCK,
    ),
    "compressed blocks": (compressed("block", block_structure="32x16"), "_scale", BLOCK),
}


def quantised(
    values: torch.Tensor, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales by block, and what they stand for, by a loop over blocks."""
    height, width = block[0] or len(values), block[1] or values.shape[1]
    grid = -(-len(values) // height), -(-values.shape[1] // width)
    numbers, scales, wanted = values.to(FP8), torch.empty(grid), values.clone()
    for row in range(grid[0]):
        for column in range(grid[1]):
            at = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            scales[row, column] = scale = values[at].abs().max() / 448
            numbers[at] = (values[at] / scale).to(FP8)
            wanted[at] = numbers[at].float() * scale
    return numbers, scales, wanted


def save_fp8(kind: str, source: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny model with its layers' matrices in fp8, and the numbers that they stand for."""
    config, suffix, block = KINDS[kind]
    tensors = load_file(save_tiny(source, folder) / "model.safetensors")
    wanted = {}
    for name, values in [*tensors.items()]:
        if name.endswith("proj.weight"):
            numbers, scales, wanted[name] = quantised(values, block)
            tensors[name] = numbers
            tensors[name + suffix] = scales.view(1) if scales.numel() == 1 else scales.bfloat16()
            if scales.numel() > 1:  # a file may keep them in bf16
                exact = scales.bfloat16().float()
                spread = exact.repeat_interleave(block[0], 0)[: len(values)]
                spread = spread.repeat_interleave(block[1] or values.shape[1], 1)[:, : values.shape[1]]
                wanted[name] = numbers.float() * spread
    save_file(tensors, folder / "model.safetensors")
    changed(folder, quantization_config=config)
    return folder, wanted


def changed(folder: Path, **keys: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder
