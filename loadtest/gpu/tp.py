"""A tensor-parallel 8B model: its results against one GPU, and its steps beside the floor of one rank.

Run as `--parts tp2`, `--parts tp4`: one number of GPUs in a process.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.cuda import Event

from loadtest.driver import Driver
from loadtest.gpu import engine
from loadtest.gpu.rig import Built, llama_8b
from loadtest.gpu.shape import LLAMA_8B
from loadtest.gpu.sums import sums

DECODES = (1, 64, 256)
PREFILLS = ((1, 8192), (8, 8192), (64, 1024))
PROMPT, GENERATED, LAYERS = 700, 24, 4
WITHIN_S = 240.0


def tp(size: int, limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """Everything about `size` GPUs."""
    found: dict[str, Any] = {"ranks": size, "exact": exact(size), "sums": sums(size)}
    built = llama_8b(step_tokens, ranks=size)
    found["start"] = {
        "load_s": built.load_s, "warm_up_s": built.warm_up_s, "blocks": built.backend.info.blocks,
        "short_sums": built.own._runner._model._ranks.one_shot is not None,
        "letter_boxes": built.own._runner._model._ranks.symmetric is not None,
    }  # fmt: skip
    print("start", found["start"], flush=True)
    found["decode"] = engine.decode(built, limits, DECODES)
    found["idle"] = [_idle(built, rows) for rows in DECODES]
    found["prefill"] = [_prefill(built.backend, step_tokens, *each) for each in PREFILLS]
    built.backend.close()
    return found


def _idle(built: Built, rows: int, steps: int = 64, context: int = 1024) -> dict[str, float]:
    """How long the leader's GPU waits for the next step, two in flight: from the end of what one has queued
    to the begin of what the next has. Inside a step kernels start under each other, which a profiler that
    tells them apart would end."""
    passes: Any = built.own._runner
    queue, sample, marks = passes.queue, passes.sample, list[Event]()

    def marking(run: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
        def marked(*given: Any) -> Any:
            mark = Event(enable_timing=True)
            if first:
                mark.record()
            answer = run(*given)
            if not first:
                mark.record()
            marks.append(mark)
            return answer

        return marked

    driver = Driver(built.backend)
    tables = dict(driver.open(slot, context, context + steps + 1) for slot in range(rows))
    plans = [
        driver.plan([(slot, context - 1 + i, 1, i > 0) for slot in range(rows)], {} if i else tables)
        for i in range(steps)
    ]
    passes.queue, passes.sample = marking(queue, first=True), marking(sample, first=False)
    driver.run(plans)
    passes.queue, passes.sample = queue, sample
    driver.close()
    us = [1e3 * a.elapsed_time(b) for a, b in pairwise(marks[8:-4])]
    busy, waits = statistics.median(us[::2]), statistics.median(us[1::2])
    found = {"rows": rows, "busy_us": busy, "waits_us": waits, "idle": waits / (busy + waits)}
    print("idle", found, flush=True)
    return found


def exact(size: int) -> list[dict[str, Any]]:
    """Logits and greedy ids of a few layers on one GPU and on several, in float32 and bfloat16."""
    rows = []
    for dtype in ("f32", "bf16"):
        (one, one_ids), (several, ids) = (_apart(ranks, dtype) for ranks in (1, size))
        prompt, decoded = (one - several).abs().amax(1).tolist()
        rows.append({
            "dtype": dtype, "largest_difference": prompt, "largest_of_a_decode": decoded,
            "logits_std": float(one.std()), "ids": len(ids),
            "same_ids": sum(a == b for a, b in zip(one_ids, ids, strict=True)),
        })  # fmt: skip
        print("exact", rows[-1], flush=True)
    return rows


def _apart(ranks: int, dtype: str) -> tuple[Tensor, list[int]]:
    """In a process of its own: there is one group in a process, ever."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_answer, ranks, dtype).result(WITHIN_S)


def _answer(ranks: int, dtype: str) -> tuple[Tensor, list[int]]:
    """The logits behind a prompt, and those behind its last token as a decode, `[2, vocab]`; and the greedy
    ids after it, decoded in graphs."""
    config = {**LLAMA_8B, "num_hidden_layers": LAYERS}
    built = llama_8b(1024, config, ranks, dtype=dtype, blocks=1100, slots=8)
    backend, driver = built.backend, Driver(built.backend)
    tokens = random.Random(3).choices(range(1000, 100_000), k=PROMPT)
    slot, blocks = driver.open_with(0, tokens, PROMPT + GENERATED + 1)
    ids = list(backend.sample(backend.forward(driver.plan([(slot, 0, PROMPT, False)], {slot: blocks}))).ids)
    for step in range(GENERATED):
        ids += backend.sample(backend.forward(driver.plan([(slot, PROMPT + step, 1, True)], {}))).ids
    slot, blocks = driver.open_with(1, tokens, PROMPT, logprobs=1)
    logits = []
    for start, count in ((0, PROMPT), (PROMPT - 1, 1)):
        pending = backend.forward(driver.plan([(slot, start, count, False)], {slot: blocks}))
        assert pending.logits is not None, "a row that asks for log probabilities is sampled in torch"
        logits.append(pending.logits[0].float().cpu())
        backend.sample(pending)
    backend.close()
    return torch.stack(logits), ids


def _prefill(backend: Any, step_tokens: int, prompts: int, length: int) -> dict[str, float]:
    """Prompts as steps of `step_tokens`, the second time."""
    for _ in range(2):
        driver = Driver(backend)
        tables = dict(driver.open(slot, length, length + 1) for slot in range(prompts))
        each, plans = max(1, step_tokens // length), []
        for first in range(0, prompts, each):
            slots = range(first, min(first + each, prompts))
            wanted = [(slot, 0, length, False) for slot in slots]
            plans.append(driver.plan(wanted, {slot: tables[slot] for slot in slots}))
        seconds = driver.run(plans)[-1]
        driver.close()
    row = {"prompts": prompts, "length": length, "seconds": seconds, "tok_s": prompts * length / seconds}
    print("prefill", row, flush=True)
    return row
