"""Small random models as folders in 4 bits, in each supported form, and the numbers that they stand for.

The packing follows the libraries that write such folders (AutoAWQ `gemm`, AutoGPTQ and GPTQModel,
compressed-tensors), by loops over single numbers: nothing of the product's is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.executor.fp8_folders import changed
from support.executor.tiny_models import VOCAB, save_tiny

GROUP = 16
MIXTRAL = tuple(f".w{i}.weight" for i in (1, 2, 3))  # the ends of the names of an expert's matrices
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # number AWQ_ORDER[i] of eight lies at bits 4 * i


def gptq(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False,
        "checkpoint_format": "gptq", "lm_head": False, "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:2.0"]}, **more,
    }  # fmt: skip


def compressed(**more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
        "dynamic": False, "observer": "minmax", "actorder": None, **more,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


MXFP4 = {
    **compressed(type="float", group_size=32, scale_dtype="torch.uint8"), "format": "mxfp4-pack-quantized",
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "gptq": gptq(),
    "gptq v2": gptq(checkpoint_format="gptq_v2"),
    "gptq symmetric": gptq(sym=True),
    "gptq act-order": gptq(desc_act=True),
    "gptq rows": gptq(group_size=-1, sym=True),
    "compressed": compressed(),
    "compressed zeros": compressed(symmetric=False),
    "compressed rows": compressed(strategy="channel", group_size=None),
    "compressed group": compressed(actorder="group"),
}

WIDE = {  # for the products of a GPU
    "awq": {**AWQ, "group_size": 64},
    "gptq": gptq(group_size=128, sym=True),
    "compressed": compressed(group_size=32),
    "mxfp4": MXFP4,
}


def words(numbers: torch.Tensor, dim: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Numbers of 0 to 15, eight along `dim` in an int32; columns that are missing at the end are zeros."""
    along = numbers.movedim(dim, -1)
    along = torch.nn.functional.pad(along, (0, -along.shape[-1] % 8)).long()
    found = torch.zeros(*along.shape[:-1], along.shape[-1] // 8, dtype=torch.int64)
    for at, which in enumerate(order):
        found += along[..., which::8] << 4 * at
    found = torch.where(found >= 2**31, found - 2**32, found)
    return found.int().movedim(-1, dim).contiguous()


def quantised(
    values: torch.Tensor, of_columns: torch.Tensor, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers `[rows, columns]`, scales and zeros `[rows, groups]`, and what they stand for."""
    groups = int(of_columns.max()) + 1
    numbers, wanted = values.int(), values.clone()
    scales, zeros = torch.empty(len(values), groups).half(), torch.full((len(values), groups), 8)
    for group in range(groups):
        at = of_columns == group
        least, most = values[:, at].amin(1), values[:, at].amax(1)
        if symmetric:
            scales[:, group] = (torch.maximum(-least, most) / 7).half()
        else:
            scales[:, group] = ((most - least) / 15).half()
            zeros[:, group] = (-least / scales[:, group].float()).round().clamp(0, 15)
        scale, zero = scales[:, group, None].float(), zeros[:, group, None]
        numbers[:, at] = ((values[:, at] / scale).round() + zero).clamp(0, 15).int()
        wanted[:, at] = (numbers[:, at] - zero) * scale
    return numbers, scales, zeros, wanted


def packed(config: dict[str, Any], values: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a matrix by the ends of their names, and what they stand for."""
    if config is MXFP4:
        return _mxfp4(values)
    method, columns = config["quant_method"], values.shape[1]
    options = config if method != "compressed-tensors" else config["config_groups"]["group_0"]["weights"]
    size = options["group_size"] or -1
    of_columns = torch.arange(columns) // (size if size > 0 else columns)
    reordered = options.get("desc_act") or options.get("actorder")
    if reordered:
        of_columns = of_columns[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    symmetric = options.get("sym", options.get("symmetric", False))
    numbers, scales, zeros, wanted = quantised(values, of_columns, symmetric=symmetric)
    if method == "awq":
        tensors = {
            "qweight": words(numbers.T, 1, AWQ_ORDER), "qzeros": words(zeros.T, 1, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }  # fmt: skip
    elif method == "gptq":
        stored = words(zeros.T, 1)
        if config["checkpoint_format"] == "gptq":
            stored = stored - 0x11111111  # of a whole word, as GPTQModel does
        tensors = {
            "qweight": words(numbers.T, 0), "qzeros": stored, "scales": scales.T.contiguous(),
            "g_idx": of_columns.int(),
        }  # fmt: skip
    else:
        shape = torch.tensor(values.shape)
        tensors = {"weight_packed": words(numbers, 1), "weight_scale": scales, "weight_shape": shape}
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros, 0)
        if reordered:
            tensors["weight_g_idx"] = of_columns.int()
    return tensors, wanted


def _mxfp4(values: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """To the nearest of the numbers of 4 bits, over the power of two that takes the largest to 4 or more."""
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    rows, columns = values.shape
    codes, wanted = torch.empty(rows, columns, dtype=torch.uint8), values.clone()
    exponents = torch.empty(rows, columns // 32, dtype=torch.uint8)
    for group in range(columns // 32):
        at = slice(group * 32, group * 32 + 32)
        exponent = values[:, at].abs().amax(1).log2().floor() - 2
        exponents[:, group] = (exponent + 127).to(torch.uint8)
        over = values[:, at] / 2.0 ** exponent[:, None]
        nearest = (over.abs()[..., None] - steps).abs().argmin(-1)
        codes[:, at] = (nearest + 8 * (over < 0)).to(torch.uint8)
        wanted[:, at] = steps[nearest] * over.sign() * 2.0 ** exponent[:, None]
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": exponents}, wanted


def save_int4(kind: str | dict[str, Any], source: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny model with its layers' matrices in 4 bits, and the numbers that they stand for by name."""
    config = KINDS[kind] if isinstance(kind, str) else kind
    tensors = load_file(save_tiny(source, folder) / "model.safetensors")
    wanted = {}
    for name in [name for name in tensors if name.endswith(("proj.weight", *MIXTRAL))]:
        found, wanted[name] = packed(config, tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in found.items()}
    save_file(tensors, folder / "model.safetensors")
    changed(folder, quantization_config=config)
    return folder, wanted


def wide_model(family: str = "qwen2") -> Any:
    """A random model of transformers, of sizes that the products of a GPU take, also a half of each; qwen2,
    qwen3_moe or mixtral."""
    import transformers

    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if family == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=5))
    if family == "qwen3_moe":
        experts = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 384}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts))
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))


def save_wide(kind: str, folder: Path, family: str = "qwen2") -> Path:
    """The wide model of a family in a form of WIDE."""
    wide_model(family).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("proj.weight", *MIXTRAL))]:
        found, _ = packed(WIDE[kind], tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in found.items()}
    save_file(tensors, folder / "model.safetensors")
    return changed(folder, quantization_config=WIDE[kind])
