"""Measures weights and KV in fp8, weights in 4 bits and deterministic mode beside bf16, in one run.

The engines come one after the other, since a GPU of 80 GB has no room for two caches; bf16 is the first and
the last.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from loadtest.eval.divergence import kl_divergence, log_probs, same_top
from loadtest.eval.logits import by_steps
from loadtest.gpu.engine import decode, prefill
from loadtest.gpu.rig import Built, end, llama_8b
from loadtest.gpu.shape import QWEN3_30B_A3B

BF16: dict[str, Any] = {"dtype": "bf16"}
DENSE: dict[str, dict[str, Any]] = {
    "bf16": BF16, "KV in fp8": {**BF16, "kv_dtype": "fp8"}, "fp8": {"dtype": "fp8"},
    "fp8, KV in fp8": {"dtype": "fp8", "kv_dtype": "fp8"}, "int4": {"dtype": "int4"},
    "deterministic": {**BF16, "deterministic": True}, "bf16 again": BF16,
}  # fmt: skip
EXPERTS = {"bf16": BF16, "int4": {"dtype": "int4"}, "bf16 again": BF16}
TOKENS, CHUNK, VOCAB = 192, 64, 128_256  # of the sequence whose logits are compared


def formats(limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """Steps and prompts of an 8B model in each format and in deterministic mode, and the divergence of its
    logits from those of the first engine."""
    found, wanted = dict[str, dict[str, Any]](), dict[str, Tensor]()
    for name, options in DENSE.items():
        built = llama_8b(step_tokens, **options)
        found[name] = _row(built, decode(built, limits, (1, 32, 64, 256)))
        found[name]["prefill"] = prefill(built, step_tokens, ((8, 1024),))
        found[name]["kl"] = _divergence(built, wanted)
        end(built)
    return {"engines": found, "ratios": _ratios(found)}


def experts(limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """Steps of Qwen3-30B-A3B, in bf16 and in 4 bits."""
    found = {}
    for name, options in EXPERTS.items():
        built = llama_8b(step_tokens, QWEN3_30B_A3B, slots=64, max_context=4096, **options)
        found[name] = _row(built, decode(built, limits, (1, 8, 64)))
        end(built)
    return {"engines": found, "ratios": _ratios(found)}


def _row(built: Built, decodes: list[dict[str, Any]]) -> dict[str, Any]:
    info = built.backend.info
    row = {
        "load_s": built.load_s, "warm_up_s": built.warm_up_s, "weight_bytes": built.weight_bytes,
        "kv_tokens": info.blocks * info.block_tokens,
    }  # fmt: skip
    print("engine", info.dtype, row, flush=True)
    return {**row, "decode": decodes}


def _ratios(engines: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many times as fast each engine is as the mean of both runs in bf16."""
    found = {}
    first, again = (engines[name]["decode"] for name in ("bf16", "bf16 again"))
    for name, engine in engines.items():
        for a, row, b in zip(first, engine["decode"], again, strict=True):
            mean_ms = (a["step_ms"] + b["step_ms"]) / 2
            found[f"{name}, decode {row['batch']}"] = mean_ms / row["step_ms"]
    print("ratios", {key: round(value, 3) for key, value in found.items()}, flush=True)
    return found


def _divergence(built: Built, wanted: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """KL of the 8B engine from the first one that came here, by path."""
    tokens = random.Random(5).choices(range(VOCAB), k=TOKENS)
    found = {}
    for path, each in (("decode", 1), ("prefill", CHUNK)):
        steps = by_steps(built.backend, [tokens], CHUNK, each)
        own = torch.cat([log_probs(logits).cpu() for logits in steps])
        first = wanted.setdefault(path, own)
        kl = kl_divergence(first, own)
        found[path] = {
            "positions": len(own), "kl_mean": kl.mean().item(), "kl_max": kl.max().item(),
            "top1": same_top(first, own).mean().item(),
        }  # fmt: skip
    return found
