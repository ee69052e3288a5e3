"""Measures steps of the engine in this process: decode by batch, prefill by length, beside their floors."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.quantised import Fp8Rows
from kernels.quantised import gpu as int4
from kernels.quantised.gpu import Int4Weight, quantise_rows, scaled_mm
from loadtest.driver import Driver
from loadtest.gpu.rig import Built
from loadtest.gpu.timing import eager_ms

BATCHES = (1, 32, 64, 128, 256)
CONTEXT, STEPS, WARM_STEPS = 1024, 128, 8
PREFILLS = ((8, 8192), (64, 1024))
MIXED_ROWS, MIXED_CHUNK = 64, 192


def decode(built: Built, limits: dict[str, float], batches: Sequence[int] = BATCHES) -> list[dict[str, Any]]:
    """Time of a decode step at 1k context, two steps in flight; the floor is all bytes of a GPU once."""
    rows = []
    info = built.backend.info
    for batch in batches:
        driver = Driver(built.backend)
        tables = dict(driver.open(slot, CONTEXT, CONTEXT + STEPS + WARM_STEPS + 1) for slot in range(batch))
        plans = []
        for step in range(STEPS + WARM_STEPS):
            wanted = [(slot, CONTEXT - 1 + step, 1, step > 0) for slot in range(batch)]
            plans.append(driver.plan(wanted, tables if not step else {}))
        ends_s = driver.run(plans)
        driver.close()
        step_ms = (ends_s[-2] - ends_s[WARM_STEPS]) / (len(ends_s) - 2 - WARM_STEPS) * 1e3
        gaps = [1e3 * (b - a) for a, b in itertools.pairwise(ends_s[WARM_STEPS:-1])]
        context = CONTEXT + WARM_STEPS + STEPS / 2
        kv = batch * context * info.bytes_per_block / info.block_tokens / built.ranks
        floor_ms = (built.weight_bytes + kv) / limits["read_gb_s"] / 1e6
        rows.append({
            "batch": batch, "step_ms": step_ms, "p99_ms": statistics.quantiles(gaps, n=100)[98],
            "read_gb": (built.weight_bytes + kv) / 1e9, "floor_ms": floor_ms, "of_floor": floor_ms / step_ms,
            "tok_s": 1e3 * batch / step_ms,
        })  # fmt: skip
        print("decode", {k: round(v, 3) for k, v in rows[-1].items()}, flush=True)
    return rows


def prefill(
    built: Built, step_tokens: int, prefills: Sequence[tuple[int, int]] = PREFILLS
) -> list[dict[str, Any]]:
    """Prompts as steps of `step_tokens`; the floor is the library's products and cuDNN's attention."""
    rows = []
    for prompts, length in prefills:
        seconds, tokens = prefill_s(built, step_tokens, prompts, length), prompts * length
        floor_s = tokens / min(tokens, step_tokens) * _floor_s(built, min(tokens, step_tokens), length)
        rows.append({
            "prompts": prompts, "length": length, "seconds": seconds, "tok_s": tokens / seconds,
            "floor_s": floor_s, "of_floor": floor_s / seconds,
        })  # fmt: skip
        print("prefill", {k: round(v, 3) for k, v in rows[-1].items()}, flush=True)
    return rows


def prefill_s(built: Built, step_tokens: int, prompts: int, length: int) -> float:
    """The shorter time of two."""
    times = []
    for _ in range(2):
        driver = Driver(built.backend)
        tables = dict(driver.open(slot, length, length + 1) for slot in range(prompts))
        each = max(1, step_tokens // length)
        plans = []
        for first in range(0, prompts, each):
            slots = range(first, min(first + each, prompts))
            wanted = [(slot, 0, length, False) for slot in slots]
            plans.append(driver.plan(wanted, {slot: tables[slot] for slot in slots}))
        times.append(driver.run(plans)[-1])
        driver.close()
    return min(times)


def mixed(built: Built) -> dict[str, float]:
    """A step of decodes with a prompt chunk beside them, against the two run in turn."""
    driver, ms = Driver(built.backend), dict[str, float]()
    tables = dict(driver.open(slot, CONTEXT, CONTEXT + 4 * STEPS) for slot in range(MIXED_ROWS))
    tables |= dict([driver.open(MIXED_ROWS, CONTEXT, CONTEXT + 1)])
    chunk = (MIXED_ROWS, CONTEXT - MIXED_CHUNK, MIXED_CHUNK, False)
    at = CONTEXT - 1
    for name, has_decodes, has_chunk in (
        ("decode_ms", True, False), ("chunk_ms", False, True), ("mixed_ms", True, True)
    ):  # fmt: skip
        plans = []
        for _ in range(STEPS):
            rows = [(slot, at, 1, at >= CONTEXT) for slot in range(MIXED_ROWS)] if has_decodes else []
            plans.append(driver.plan([*rows, chunk] if has_chunk else rows, tables))
            tables, at = {}, at + has_decodes
        ends_s = driver.run(plans)[WARM_STEPS:-1]
        ms[name] = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(ends_s))
    driver.close()
    ms["of_its_parts"] = ms["mixed_ms"] / (ms["decode_ms"] + ms["chunk_ms"])
    print("mixed", {k: round(v, 3) for k, v in ms.items()}, flush=True)
    return ms


@torch.inference_mode()
def _floor_s(built: Built, tokens: int, length: int) -> float:
    """Matrix products and cuDNN's attention of one step of whole prompts, nothing else."""
    model: Any = built.own._runner._model
    shapes, layers = model._shapes, model._layers
    hidden = torch.randn(tokens, shapes.hidden, dtype=torch.bfloat16, device="cuda")
    wide = torch.randn(tokens, shapes.intermediate, dtype=torch.bfloat16, device="cuda")

    in_fp8 = any(isinstance(weight, Fp8Rows) for weight in layers[0].values())
    narrow = {id(x): quantise_rows(x) for x in (hidden, wide)} if in_fp8 else {}

    def products() -> None:
        for layer in layers[:4]:
            for name, x in (("qkv", hidden), ("out", hidden), ("gate_up", hidden), ("down", wide)):
                if isinstance(layer[name], Fp8Rows):
                    scaled_mm(narrow[id(x)], layer[name])
                elif isinstance(layer[name], Int4Weight):
                    int4.product(x, layer[name])
                else:
                    F.linear(x, layer[name])

    def heads(count: int) -> torch.Tensor:
        made = torch.randn(
            tokens // length, length, count, shapes.head_dim, dtype=torch.bfloat16, device="cuda"
        )
        return made.transpose(1, 2)

    q, k, v = heads(shapes.heads), heads(shapes.kv_heads), heads(shapes.kv_heads)

    def attention() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    head_ms = eager_ms(lambda: F.linear(hidden[: tokens // length], model._head))
    return (eager_ms(products) / 4 * len(layers) + eager_ms(attention) * len(layers) + head_ms) / 1e3
