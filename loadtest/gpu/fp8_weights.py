"""Measures weights in fp8 beside bf16, in one run: products, steps, and what it costs in the logits.

The engines come one after the other, since a GPU of 80 GB has no room for two caches: bf16, fp8, fp8 with KV
in fp8 too, bf16 again.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise.gpu import add_rms_norm_, rms_norm_fp8, swiglu, swiglu_fp8
from kernels.gemm.gpu import matmul
from kernels.quantised import gpu as fp8
from kernels.quantised import quantise_rows
from loadtest.eval.divergence import kl_divergence, log_probs, same_top
from loadtest.eval.logits import by_steps
from loadtest.gpu.deterministic import end
from loadtest.gpu.engine import decode, prefill
from loadtest.gpu.exact import compare
from loadtest.gpu.products import WEIGHTS
from loadtest.gpu.rig import Built, llama_8b
from loadtest.gpu.timing import graph_us
from services.executor.cuda.kernel_configs import device_tuning

ROWS = (1, 32, 64, 128, 256, 1024, 8192)
BATCHES, PREFILLS = (1, 32, 64, 256), ((8, 8192),)
ENGINES = (("bf16", "auto"), ("fp8", "auto"), ("fp8", "fp8"), ("bf16", "auto"))  # of the weights, of KV
TOKENS, CHUNK, VOCAB = 192, 64, 128_256  # of the sequence whose logits are compared
_COPIES = 4  # of a weight: more than the second-level cache holds
_LAUNCHES = 16


def fp8_weights(limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """Steps and prompts of both, how far the logits of both are from each other, kernels alone."""
    found: dict[str, Any] = {"engines": []}
    wanted: dict[str, Tensor] = {}
    for dtype, kv_dtype in ENGINES:
        built = llama_8b(step_tokens, dtype=dtype, kv_dtype=kv_dtype)
        info = built.backend.info
        row: dict[str, Any] = {
            "dtype": info.dtype, "kv_dtype": kv_dtype, "load_s": built.load_s, "warm_up_s": built.warm_up_s,
            "weight_bytes": built.weight_bytes, "kv_tokens": info.blocks * info.block_tokens,
            "decode": decode(built, limits, BATCHES),
        }  # fmt: skip
        if len(found["engines"]) < 3:
            row["prefill"] = prefill(built, step_tokens, PREFILLS)
            row["kl"] = _divergence(built, wanted)
        end(built)
        found["engines"].append(row)
        print("engine", {key: row[key] for key in row if key not in ("decode", "prefill")}, flush=True)
    found["ratios"] = _ratios(found["engines"])
    found["kernels"], found["products"] = _kernels(), _products()
    return found


def fp8_exact() -> list[dict[str, Any]]:
    """KL divergence of small random models in fp8 from transformers in float32, beside bf16."""
    return [
        row for kind in ("llama", "qwen3") for dtype in ("bf16", "fp8") for row in compare(kind, dtype=dtype)
    ]


def _ratios(engines: list[dict[str, Any]]) -> dict[str, float]:
    """How many times as fast each engine with weights in fp8 is as the mean of both runs in bf16."""
    first, *narrow, again = engines
    found = {}
    for engine in narrow:
        name = f"KV {engine['kv_dtype']}"
        for a, row, b in zip(first["decode"], engine["decode"], again["decode"], strict=True):
            mean_ms = (a["step_ms"] + b["step_ms"]) / 2
            found[f"{name}, decode {row['batch']}"] = mean_ms / row["step_ms"]
        found[f"{name}, prefill"] = engine["prefill"][0]["tok_s"] / first["prefill"][0]["tok_s"]
    print("ratios", {key: round(value, 3) for key, value in found.items()}, flush=True)
    return found


def _divergence(built: Built, wanted: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """KL of the 8B engine from the first one that came here, by path."""
    tokens = random.Random(5).choices(range(VOCAB), k=TOKENS)
    found = {}
    for path, each in (("decode", 1), ("prefill", CHUNK)):
        own = torch.cat(
            [log_probs(logits).cpu() for logits in by_steps(built.backend, [tokens], CHUNK, each)]
        )
        first = wanted.setdefault(path, own)
        kl = kl_divergence(first, own)
        found[path] = {
            "positions": len(own), "kl_mean": kl.mean().item(), "kl_max": kl.max().item(),
            "top1": same_top(first, own).mean().item(),
        }  # fmt: skip
    return found


@torch.inference_mode()
def _kernels() -> list[dict[str, float]]:
    """Kernels that write fp8 rows beside those that write bf16, µs."""
    rows = []
    weight = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    for count in ROWS:
        x, residual, wide = (
            torch.randn(count, width, dtype=torch.bfloat16, device="cuda") for width in (4096, 4096, 28672)
        )
        runs = {
            "add_rms_norm": lambda i: add_rms_norm_(x, residual, weight, 1e-5),  # noqa: B023
            "add_rms_norm_fp8": lambda i: rms_norm_fp8(x, weight, 1e-5, residual),  # noqa: B023
            "swiglu": lambda i: swiglu(wide),  # noqa: B023
            "swiglu_fp8": lambda i: swiglu_fp8(wide),  # noqa: B023
            "quantise_rows": lambda i: fp8.quantise_rows(x),  # noqa: B023
        }
        rows.append({"rows": count, **{name: graph_us(run, _LAUNCHES) for name, run in runs.items()}})
        print("kernels", {key: round(value, 2) for key, value in rows[-1].items()}, flush=True)
    return rows


@torch.inference_mode()
def _products() -> list[dict[str, Any]]:
    """µs by weight and rows: the library's and ours, in bf16 and fp8; ours only where a layout is chosen."""
    tuning = device_tuning(torch.cuda.get_device_name())
    rows = []
    for name, (width, inner) in WEIGHTS.items():
        plain = [
            torch.randn(width, inner, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(_COPIES)
        ]
        narrow = [quantise_rows(each) for each in plain]
        for count in ROWS:
            x = torch.randn(count, inner, dtype=torch.bfloat16, device="cuda")
            few, layouts = quantise_rows(x), tuning.of(count)
            runs: dict[str, Any] = {
                "library_us": lambda i: F.linear(x, plain[i % _COPIES]),  # noqa: B023
                "library_fp8_us": lambda i: fp8.scaled_mm(few, narrow[i % _COPIES]),  # noqa: B023
            }
            if (own := layouts.product(width, inner, count)) is not None:
                runs["own_us"] = lambda i: matmul(x, plain[i % _COPIES], own)  # noqa: B023
            if (fp8_own := layouts.product(width, inner, count, fp8=True)) is not None:
                runs["own_fp8_us"] = lambda i: matmul(few, narrow[i % _COPIES], fp8_own)  # noqa: B023
            rows.append({
                "weight": name, "rows": count, **{key: graph_us(run, _COPIES) for key, run in runs.items()}
            })  # fmt: skip
            print("products", rows[-1], flush=True)
    return rows
