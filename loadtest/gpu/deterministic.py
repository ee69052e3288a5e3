"""Measures the cost and the effect of deterministic mode: an 8B engine with and without it, and how many
greedy answers change with the other rows of their batch.

The answers are those of a small random model with logits that lie close together: fewer answers of a trained
model change.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loadtest.driver import Driver
from loadtest.gpu import engine, exact, rig
from services.executor.checkpoint.loader import TorchOptions
from services.executor.cuda.engine import CudaBackend, build

BATCHES, PREFILLS = (1, 32, 128, 256), ((8, 1024),)
PROMPTS, ANSWER, CHUNK = 64, 64, 50
STEP_TOKENS = 4096


def deterministic(limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """Cost of the mode, and the share of answers that differ between running alone and in a batch. Raises
    AssertionError if one does in the mode."""
    greedy = [_greedy(deterministic=mode) for mode in (False, True)]
    assert greedy[1]["differ"] == 0, f"deterministic mode: {greedy[1]}"
    return {"greedy": greedy, "cost": _cost(limits, step_tokens)}


def end(built: rig.Built | None) -> None:
    """Give an engine's memory back."""
    if built is not None:
        built.backend.close()
    gc.collect()
    torch.cuda.empty_cache()


def _cost(limits: dict[str, float], step_tokens: int) -> list[dict[str, Any]]:
    times: list[dict[str, float]] = []
    for mode in (False, True):
        built = rig.llama_8b(step_tokens, deterministic=mode)
        print("deterministic" if mode else "usual", {"warm_up_s": built.warm_up_s}, flush=True)
        decodes = engine.decode(built, limits, BATCHES)
        prefills = engine.prefill(built, step_tokens, PREFILLS)
        end(built)
        times.append(
            {f"decode {row['batch']}": row["step_ms"] for row in decodes}
            | {f"prefill {row['prompts']} x {row['length']}": 1e3 * row["seconds"] for row in prefills}
        )
    usual, exactly = times
    found = [
        {"what": what, "usual_ms": ms, "deterministic_ms": exactly[what], "ratio": exactly[what] / ms}
        for what, ms in usual.items()
    ]
    for row in found:
        print("cost", row, flush=True)
    return found


def _greedy(*, deterministic: bool) -> dict[str, Any]:
    draw = random.Random(7)
    prompts = {
        slot: [draw.randrange(exact.VOCAB) for _ in range(draw.randrange(20, 200))] for slot in range(PROMPTS)
    }
    with tempfile.TemporaryDirectory() as folder:
        exact.small_model("llama").to(torch.bfloat16).save_pretrained(folder)
        backend = build(
            TorchOptions(
                model_path=Path(folder), model_name="llama", device="cuda", dtype="bf16", blocks=1400,
                slots=PROMPTS, max_step_tokens=STEP_TOKENS, deterministic=deterministic,
            )
        )  # fmt: skip
    backend.warm_up()
    alone: dict[int, list[int]] = {}
    for slot, prompt in prompts.items():
        alone |= _answers(backend, {slot: prompt}, STEP_TOKENS)
    together = _answers(backend, prompts, CHUNK)
    backend.close()
    firsts = [
        next(i for i, (a, b) in enumerate(zip(alone[slot], together[slot], strict=True)) if a != b)
        for slot in prompts
        if alone[slot] != together[slot]
    ]
    found = {
        "deterministic": deterministic, "prompts": PROMPTS, "tokens": ANSWER, "differ": len(firsts),
        "share": len(firsts) / PROMPTS, "first_at": sorted(firsts),
    }  # fmt: skip
    print("greedy", found, flush=True)
    return found


def _answers(backend: CudaBackend, prompts: Mapping[int, list[int]], chunk: int) -> dict[int, list[int]]:
    """Greedy answers of all prompts in one batch, their prompts in chunks, beside which others decode."""
    driver = Driver(backend)
    tables = dict(
        driver.open_with(slot, prompt, len(prompt) + ANSWER + 1) for slot, prompt in prompts.items()
    )
    at, found = dict.fromkeys(prompts, 0), {slot: list[int]() for slot in prompts}
    while rows := [
        (slot, at[slot], min(chunk, max(len(prompt) - at[slot], 1)), at[slot] >= len(prompt))
        for slot, prompt in prompts.items()
        if len(found[slot]) < ANSWER
    ]:
        ids = backend.sample(backend.forward(driver.plan(rows, tables))).ids
        tables = {}
        for (slot, start, count, _), token in zip(rows, ids, strict=True):
            at[slot] = start + count
            if at[slot] >= len(prompts[slot]):
                found[slot].append(token)
    driver.close()
    return found
