"""Measures experts in 4 bits beside bf16, in one run: the MLPs of experts of two models, and steps of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.moe.gpu import experts_mlp, permute
from kernels.quantised import dequantise, quantise_groups
from kernels.quantised import gpu as int4
from loadtest.gpu.deterministic import end
from loadtest.gpu.engine import decode, prefill_s
from loadtest.gpu.rig import llama_8b
from loadtest.gpu.shape import QWEN3_30B_A3B
from loadtest.gpu.timing import graph_us

# Experts, experts of a token, columns of the model and of an expert.
SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Mixtral-8x7B": (8, 2, 4096, 14336)}
TOKENS = (1, 8, 64, 256, 1024, 8192)
BATCHES, PROMPTS, LENGTH = (1, 8, 64), 8, 1024
_GROUP = 128
_ROUTES = 8  # other experts in each launch of a timing: those of one may stay in the second-level cache


@torch.inference_mode()
def int4_experts_mlp() -> list[dict[str, Any]]:
    """µs of the experts' MLP of a layer, and its relative error against float64 over the dequantised
    weights."""
    return [row for name, shape in SHAPES.items() for row in _times(name, *shape)]


def _times(name: str, experts: int, per_token: int, hidden: int, width: int) -> list[dict[str, Any]]:
    plain, packed, prepare_s = [], [], 0.0
    for rows, columns in ((2 * width, hidden), (hidden, width)):
        matrix = quantise_groups(
            torch.randn(experts * rows, columns, dtype=torch.bfloat16, device="cuda") * 0.02, _GROUP
        )
        parts = [dequantise(matrix_of).bfloat16() for matrix_of in _each(matrix, experts)]
        plain.append(torch.stack(parts))
        del parts
        began_s = time.monotonic()
        packed.append(int4.prepare(matrix, experts))
        torch.cuda.synchronize()
        prepare_s += time.monotonic() - began_s
    found = []
    for tokens in TOKENS:
        x = torch.randn(tokens * per_token, hidden, dtype=torch.bfloat16, device="cuda")
        routes = [
            permute(torch.rand(tokens, experts, device="cuda").topk(per_token).indices.int(), 0, experts)
            for _ in range(_ROUTES)
        ]
        bounds = [route.bounds for route in routes]

        def by(weights: list[Any]) -> Callable[[int], Tensor]:
            return lambda i: experts_mlp(x, weights[0], weights[1], bounds[i % _ROUTES])  # noqa: B023

        us: dict[str, list[float]] = {"bf16": [], "int4": []}
        for kind, weights in (("bf16", plain), ("int4", packed)) * 2:
            us[kind].append(graph_us(by(weights), 2 * _ROUTES))
        row = {
            "model": name, "tokens": tokens, "bf16_us": min(us["bf16"]), "int4_us": min(us["int4"]),
            "all_us": us, "prepare_s": prepare_s, "kernels": [len(each.kernels) // 4 for each in packed],
            "gb": [sum(each.nbytes for each in plain) / 1e9,
                   sum(part.nbytes for each in packed for part in each.tensors) / 1e9],
        }  # fmt: skip
        if tokens <= 1024:
            wanted = _wanted(x, plain[0], plain[1], bounds[0])
            for kind, weights in (("bf16", plain), ("int4", packed)):
                row[f"{kind}_error"] = ((by(weights)(0).double() - wanted).norm() / wanted.norm()).item()
        found.append(row)
        print("int4 experts", row, flush=True)
    return found


def _each(matrix: Any, experts: int) -> list[Any]:
    """The matrix of each expert: all at once take too much memory in float32."""
    columns = zip(matrix.numbers.chunk(experts), matrix.scales.chunk(experts), strict=True)
    return [type(matrix)(numbers, scales) for numbers, scales in columns]


def _wanted(x: Tensor, gate_up: Tensor, down: Tensor, bounds: Tensor) -> Tensor:
    """In float64."""
    out, limits = torch.empty(x.shape, dtype=torch.float64, device=x.device), bounds.tolist()
    for expert in range(len(limits) - 1):
        some = slice(limits[expert], limits[expert + 1])
        gate, up = (x[some].double() @ gate_up[expert].double().T).chunk(2, -1)
        out[some] = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
    return out


def int4_experts(limits: dict[str, float], step_tokens: int) -> list[dict[str, Any]]:
    """Steps and prompts of Qwen3-30B-A3B, in bf16 and in 4 bits."""
    engines = []
    for dtype in ("bf16", "int4"):
        built = llama_8b(step_tokens, QWEN3_30B_A3B, dtype=dtype, slots=64, max_context=4096)
        info = built.backend.info
        rows = decode(built, limits, BATCHES)
        seconds = prefill_s(built, step_tokens, PROMPTS, LENGTH)
        engines.append({
            "dtype": info.dtype, "load_s": built.load_s, "warm_up_s": built.warm_up_s,
            "weight_bytes": built.weight_bytes, "kv_tokens": info.blocks * info.block_tokens,
            "decode": [{key: row[key] for key in ("batch", "step_ms", "p99_ms", "tok_s")} for row in rows],
            "prefill": {"prompts": PROMPTS, "length": LENGTH, "tok_s": PROMPTS * LENGTH / seconds},
        })  # fmt: skip
        end(built)
        print("engine", engines[-1], flush=True)
    return engines
