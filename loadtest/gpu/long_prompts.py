"""Measures prompts in chunks of a step's budget: with the prefill kernel of any device, then with that of
kernels.attention.hopper, in engines of this process; and the attention of chunks by both alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.attention import FP8
from loadtest.driver import Driver
from loadtest.gpu import deterministic, engine
from loadtest.gpu.chunks import long_chunks
from loadtest.gpu.rig import Built, llama_8b
from services.executor.cuda import engine as cuda_engine
from services.executor.cuda.kernel_configs import DeviceTuning

# Number, length and tokens of a step: the default of `headrace up`, and the longest step with a graph.
PROMPTS = ((1, 100_000, 1024), (8, 32_768, 1024), (32, 8_192, 1024), (1, 100_000, 2048))
ROWS, CONTEXT, STEPS = 8, 32_768, 32  # decodes


def long_prompts(limits: dict[str, float], most: int, kv_dtype: str = "auto") -> dict[str, Any]:
    """Seconds to the last prompt's first token by kernel and tokens of a step, and the ratios. `most`: tokens
    of a step, for prompts in whole steps."""
    found: dict[str, Any] = {"attention": long_chunks(FP8 if kv_dtype == "fp8" else torch.bfloat16)}
    chosen: Callable[..., DeviceTuning] = cuda_engine.with_tma
    for name, choose in (("before", lambda tuning, *_: tuning), ("after", chosen)):
        cuda_engine.with_tma = choose
        deterministic.end(None)
        built = llama_8b(most, max_context=131_072, slots=128, kv_dtype=kv_dtype)
        rows = [_prompts(built, *asked) for asked in PROMPTS]
        found[name] = {
            "start": {"load_s": built.load_s, "warm_up_s": built.warm_up_s},
            "prompts": rows,
            "whole": engine.prefill(built, most),
            "mixed": engine.mixed(built),
            "decode_ms": _decode(built),
        }
        deterministic.end(built)
    cuda_engine.with_tma = chosen
    for before, after in zip(found["before"]["prompts"], found["after"]["prompts"], strict=True):
        after["of_before"] = after["seconds"] / before["seconds"]
        print("long_prompts", after, flush=True)
    return found


def _prompts(built: Built, prompts: int, length: int, step_tokens: int) -> dict[str, float]:
    """Prompts one after the other, as the scheduler plans them. The first one's first chunk warms up."""
    driver = Driver(built.backend)
    tables = dict(driver.open(slot, length, length + 1) for slot in range(prompts))
    plans = []
    for slot in range(prompts):
        for start in range(0, length, step_tokens):
            row = (slot, start, min(step_tokens, length - start), False)
            last = start + step_tokens >= length
            plans.append(driver.plan([row], {} if start else {slot: tables[slot]}, samples=last))
    driver.run(plans[:1])
    ends_s = driver.run(plans)
    driver.close()
    row = {"prompts": prompts, "length": length, "step_tokens": step_tokens, "seconds": ends_s[-1]}
    print("prompts", row, flush=True)
    return row


def _decode(built: Built) -> float:
    """A decode step behind long contexts."""
    driver = Driver(built.backend)
    tables = dict(driver.open(slot, CONTEXT, CONTEXT + STEPS + 1) for slot in range(ROWS))
    plans = []
    for step in range(STEPS):
        wanted = [(slot, CONTEXT - 1 + step, 1, step > 0) for slot in range(ROWS)]
        plans.append(driver.plan(wanted, tables if not step else {}))
    ends_s = driver.run(plans)
    driver.close()
    step_ms = (ends_s[-2] - ends_s[7]) / (len(ends_s) - 9) * 1e3
    print("decode at", CONTEXT, {"rows": ROWS, "step_ms": step_ms}, flush=True)
    return step_ms
