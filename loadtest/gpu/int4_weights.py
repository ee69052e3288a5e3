"""Measures weights in 4 bits beside bf16, in one run: products, steps, and the logits of one checkpoint kept
in 4 bits and dequantised.

The engines come one after the other, since a GPU of 80 GB has no room for two caches: bf16, int4, bf16 again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.quantised import Int4Groups, dequantise, pack, quantise_groups
from kernels.quantised import gpu as int4
from loadtest.gpu.deterministic import end
from loadtest.gpu.engine import decode, prefill
from loadtest.gpu.exact import kept_and_dequantised
from loadtest.gpu.products import WEIGHTS
from loadtest.gpu.rig import llama_8b
from loadtest.gpu.timing import graph_us
from services.executor.checkpoint import loader
from services.executor.checkpoint.int4 import ScaledInt4, products_read
from services.executor.checkpoint.stored import Stored
from services.executor.model.description import Part

ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 8192)
BATCHES, PREFILLS = (1, 32, 64, 256), ((8, 1024),)
GROUPS = (32, 64, 128, 4096)  # of columns, the last a whole row
_WIDTH, _INNER = 1536, 4096
_COPIES = 8  # of a weight: more than the second-level cache holds


def int4_weights(limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """Steps and prompts of both."""
    engines = []
    for dtype in ("bf16", "int4", "bf16"):
        built = llama_8b(step_tokens, dtype=dtype)
        info = built.backend.info
        engines.append({
            "dtype": info.dtype, "load_s": built.load_s, "warm_up_s": built.warm_up_s,
            "weight_bytes": built.weight_bytes, "kv_tokens": info.blocks * info.block_tokens,
            "decode": decode(built, limits, BATCHES),
        })  # fmt: skip
        if len(engines) < 3:
            engines[-1]["prefill"] = prefill(built, step_tokens, PREFILLS)
        end(built)
        print("engine", {k: v for k, v in engines[-1].items() if k not in ("decode", "prefill")}, flush=True)
    first, own, again = engines
    ratios = {
        f"decode {row['batch']}": (a["step_ms"] + b["step_ms"]) / 2 / row["step_ms"]
        for a, row, b in zip(first["decode"], own["decode"], again["decode"], strict=True)
    }
    speeds = [each["prefill"][0]["tok_s"] for each in engines[:2]]
    ratios["prefill"] = speeds[1] / speeds[0]
    print("ratios", {key: round(value, 3) for key, value in ratios.items()}, flush=True)
    return {"engines": engines, "ratios": ratios}


def int4_kinds(limits: dict[str, float], step_tokens: int) -> list[dict[str, Any]]:
    """Steps with random weights in each kind of numbers, which are those of MXFP4 and of types of GGUF."""
    engines, chosen = [], loader.dummy_in_int4
    for kind, quantise in KINDS.items():

        def dummy(part: Part, stored: Stored, dtype: torch.dtype, device: torch.device) -> Stored:
            plain = stored.loaded(dtype, device)
            if len(plain.shape) != 2 or not products_read(part, plain):
                return plain
            return ScaledInt4(quantise(plain.values), dtype)  # noqa: B023

        loader.dummy_in_int4 = dummy
        built = llama_8b(step_tokens, dtype="int4")
        engines.append({
            "kind": kind, "load_s": built.load_s, "weight_bytes": built.weight_bytes,
            "decode": decode(built, limits, BATCHES), "prefill": prefill(built, step_tokens, PREFILLS),
        })  # fmt: skip
        end(built)
        print("kind", {k: v for k, v in engines[-1].items() if k not in ("decode", "prefill")}, flush=True)
    loader.dummy_in_int4 = chosen
    return engines


def _with_zeros(x: Tensor) -> Int4Groups:
    """Groups of 32 with a scale and a zero between two numbers, as Q4_1 and Q4_K."""
    wide = x.float().view(len(x), -1, 32)
    least, largest = wide.aminmax(dim=-1)
    scales = (largest - least) / 15
    numbers = ((wide - least[..., None]) / scales[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return Int4Groups(pack(numbers.flatten(1)), scales, -least / scales)


def _in_bytes(x: Tensor, group: int) -> Int4Groups:
    """As Q8_0 (groups of 32) and Q6_K (16)."""
    wide = x.float().view(len(x), -1, group)
    scales = wide.abs().amax(-1) / 127
    numbers = (wide / scales[..., None]).round_() + 128
    return Int4Groups(pack(numbers.to(torch.uint8).flatten(1), 8), scales, None, 8)


def _in_mxfp4(x: Tensor) -> Int4Groups:
    """Any numbers of 4 bits over the scale that fits."""
    exponents = x.float().view(len(x), -1, 32).abs().amax(-1).log2().floor() - 2
    return replace(quantise_groups(x, 32), scales=2.0**exponents, e2m1=True)


KINDS: dict[str, Callable[[Tensor], Int4Groups]] = {
    "MXFP4": _in_mxfp4,
    "Q4_0": lambda x: quantise_groups(x, 32),
    "Q4_1, Q4_K": _with_zeros,
    "Q6_K": lambda x: _in_bytes(x, 16),
    "Q8_0": lambda x: _in_bytes(x, 32),
}


def int4_exact() -> list[dict[str, Any]]:
    """KL divergence of small random checkpoints in 4 bits from transformers in float32 over their dequantised
    weights: kept in 4 bits, and dequantised to bf16."""
    return [row for kind in ("llama", "qwen3") for row in kept_and_dequantised(kind, _in_4_bits)]


def _in_4_bits(folder: Path, packed: Path) -> None:
    """Write the model of a folder as one of compressed-tensors, and what that stands for into the folder."""
    tensors, plain = {}, load_file(folder / "model.safetensors")
    for name, values in plain.items():
        module = name.removesuffix("weight")
        if not module.endswith("_proj."):
            tensors[name] = values
            continue
        matrix = quantise_groups(values, 128)
        plain[name] = dequantise(matrix).to(values.dtype)
        tensors |= {
            module + "weight_packed": matrix.numbers, module + "weight_scale": matrix.scales,
            module + "weight_shape": torch.tensor(values.shape),
        }  # fmt: skip
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    (packed / "config.json").write_text(json.dumps(config))


@torch.inference_mode()
def int4_products() -> dict[str, Any]:
    """Errors of products by group and zero points, and µs of products of 8B's matrices."""
    errors = [_errors(group, zeros) for group in GROUPS for zeros in (False, True)]
    times = [row for name, sizes in WEIGHTS.items() for row in _times(name, *sizes)]
    return {"errors": errors, "times": times}


def _errors(group: int, zeros: bool) -> dict[str, Any]:
    """The relative error of products against float64 over the dequantised weight, beside that of torch's
    product of the weight dequantised to bf16; the larger of each over numbers of rows."""
    generator = torch.Generator("cuda").manual_seed(3)
    matrix = quantise_groups(
        torch.randn(_WIDTH, _INNER, device="cuda", generator=generator).bfloat16(), group
    )
    if zeros:
        given = torch.randint(0, 16, matrix.scales.shape, device="cuda", generator=generator)
        matrix = Int4Groups(matrix.numbers, matrix.scales, given.to(torch.uint8))
    began_s = time.monotonic()
    weight, plain = int4.prepare(matrix), dequantise(matrix)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"group": group, "zeros": zeros, "prepare_s": time.monotonic() - began_s}
    row["kernels"], row["error"], row["library_error"] = len(weight.kernels) // 4, 0.0, 0.0
    for rows in (1, 3, 16, 33, 64, 100, 256, 1000, 4096):
        x = torch.randn(rows, _INNER, device="cuda", generator=generator).bfloat16()
        wanted = x.double() @ plain.double().T
        runs = {"error": int4.product(x, weight), "library_error": F.linear(x, plain.bfloat16())}
        for name, found in runs.items():
            row[name] = max(row[name], ((found.double() - wanted).norm() / wanted.norm()).item())
        again = int4.product(x, weight)
        row["same_again"] = row.get("same_again", True) and torch.equal(again, runs["error"])
    print("int4 errors", row, flush=True)
    return row


def _times(name: str, width: int, inner: int) -> list[dict[str, Any]]:
    """The library's product in bf16 and the one in 4 bits, by rows."""
    plain = [torch.randn(width, inner, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(_COPIES)]
    began_s = time.monotonic()
    packed = [int4.prepare(quantise_groups(each, 128)) for each in plain]
    torch.cuda.synchronize()
    prepare_s, found = time.monotonic() - began_s, []
    for count in ROWS:
        x: Tensor = torch.randn(count, inner, dtype=torch.bfloat16, device="cuda")
        found.append({
            "weight": name, "rows": count, "prepare_s": prepare_s, "kernels": len(packed[0].kernels) // 4,
            "library_us": graph_us(lambda i: F.linear(x, plain[i % _COPIES]), _COPIES),  # noqa: B023
            "int4_us": graph_us(lambda i: int4.product(x, packed[i % _COPIES]), _COPIES),  # noqa: B023
        })  # fmt: skip
        print("int4 products", found[-1], flush=True)
    return found
