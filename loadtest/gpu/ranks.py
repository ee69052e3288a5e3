"""An 8B model on several GPUs: its results against one GPU, and its steps.

    tp    ranks that share layers, beside the floor of one rank
    pp    stages of layers: `single`, all rows in each step, the next one when its ids are there, so that one
          stage works at a time; `two_batch`, half of the rows in each step, two steps in flight

Run as `--parts tp2`, `--parts pp2`: one number of GPUs in a process. Modes of `pp` take turns; its figures
are medians of their runs.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from loadtest.driver import Driver
from loadtest.gpu import engine
from loadtest.gpu.rig import Built, llama_8b
from loadtest.gpu.shape import LLAMA_8B
from services.executor.engine import Backend

DECODES, PREFILLS = (1, 64, 256), ((1, 8192), (8, 8192), (64, 1024))  # of ranks
ROWS, CONTEXT, STEPS, WARM_STEPS, REPEATS = (64, 256), 1024, 48, 8, 5  # of stages
PROMPT, GENERATED, LAYERS, TOP = 700, 24, 4, 20
WITHIN_S = 240.0


def tp(size: int, limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """`size` ranks that share layers."""
    found: dict[str, Any] = {"ranks": size, "exact": exact(size, pipeline=False)}
    built = llama_8b(step_tokens, ranks=size)
    found["start"] = start(built)
    found["decode"] = engine.decode(built, limits, DECODES)
    found["prefill"] = [
        {
            "prompts": n,
            "length": length,
            "tok_s": n * length / engine.prefill_s(built, step_tokens, n, length),
        }
        for n, length in PREFILLS
    ]
    print("prefill", found["prefill"], flush=True)
    built.backend.close()
    return found


def pp(size: int, step_tokens: int) -> dict[str, Any]:
    """`size` stages."""
    found: dict[str, Any] = {"stages": size, "exact": exact(size, pipeline=True)}
    built = llama_8b(step_tokens, ranks=size, pipeline=True)
    found["start"] = start(built)
    found["prefill"] = prefill(built.backend, max(ROWS), step_tokens)
    found["decode"] = [decode(built.backend, rows) for rows in ROWS]
    built.backend.close()
    return found


def start(built: Built) -> dict[str, Any]:
    """How long the start took, and its blocks."""
    blocks = built.backend.info.blocks
    found = {"load_s": built.load_s, "warm_up_s": built.warm_up_s, "blocks": blocks}
    print("start", found, flush=True)
    return found


def decode(backend: Backend, rows: int) -> dict[str, Any]:
    """The time in which every row gets a token, by mode."""
    times: dict[str, list[float]] = {"single": [], "two_batch": []}
    for _ in range(REPEATS):
        times["single"].append(_decode_ms(backend, rows, 1))
        times["two_batch"].append(_decode_ms(backend, rows, 2))
    medians = {mode: statistics.median(each) for mode, each in times.items()}
    row = {"rows": rows, "ms": medians, "gain": medians["single"] / medians["two_batch"], "runs_ms": times}
    print("decode", {k: v for k, v in row.items() if k != "runs_ms"}, flush=True)
    return row


def _decode_ms(backend: Backend, rows: int, batches: int) -> float:
    """The time of one token for each row, with as many steps in flight as there are batches of rows."""
    driver = Driver(backend)
    tables = _tables(driver, rows)
    plans = []
    for step in range(STEPS + WARM_STEPS):
        for batch in range(batches):
            slots = range(batch * rows // batches, (batch + 1) * rows // batches)
            wanted = [(slot, CONTEXT - 1 + step, 1, step > 0) for slot in slots]
            plans.append(driver.plan(wanted, {} if step else {slot: tables[slot] for slot in slots}))
    ends_s = driver.run(plans, in_flight=batches)
    driver.close()
    return (ends_s[-1] - ends_s[WARM_STEPS * batches - 1]) / STEPS * 1e3


def _tables(driver: Driver, rows: int) -> dict[int, list[int]]:
    """The same blocks for the same slots, in every mode."""
    room = CONTEXT + STEPS + WARM_STEPS + 1
    return dict(driver.open(slot, CONTEXT, room) for slot in range(rows))


def prefill(backend: Backend, prompts: int, step_tokens: int) -> dict[str, float]:
    """The prompts of all rows, which leave their KV in every stage; a step in each stage."""
    driver = Driver(backend)
    tables = _tables(driver, prompts)
    each, plans = max(1, step_tokens // CONTEXT), []
    for first in range(0, prompts, each):
        slots = range(first, min(first + each, prompts))
        wanted = [(slot, 0, CONTEXT - 1, False) for slot in slots]
        plans.append(driver.plan(wanted, {slot: tables[slot] for slot in slots}, samples=False))
    ends_s = driver.run(plans)
    driver.close()
    later_s = ends_s[-1] - ends_s[len(ends_s) // 4]  # the first ones meet lengths that they plan for
    steps = len(ends_s) - 1 - len(ends_s) // 4
    row = {"prompts": prompts, "length": CONTEXT - 1, "tok_s": steps * each * (CONTEXT - 1) / later_s}
    print("prefill", row, flush=True)
    return row


def exact(size: int, *, pipeline: bool) -> list[dict[str, Any]]:
    """Greedy ids and their log probabilities of a few layers on one GPU and on several."""
    rows = []
    for dtype in ("f32", "bf16"):
        (one, one_ids), (several, ids) = (_apart(ranks, pipeline, dtype) for ranks in (1, size))
        rows.append({
            "dtype": dtype, "ids": len(ids),
            "same_ids": sum(a == b for a, b in zip(one_ids, ids, strict=True)),
            "largest_difference": max(abs(a - b) for a, b in zip(one, several, strict=True)),
        })  # fmt: skip
        print("exact", rows[-1], flush=True)
    return rows


def _apart(ranks: int, pipeline: bool, dtype: str) -> tuple[list[float], list[int]]:
    """In a process of its own: there is one group in a process, ever."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_answer, ranks, pipeline, dtype).result(WITHIN_S)


def _answer(ranks: int, pipeline: bool, dtype: str) -> tuple[list[float], list[int]]:
    """The log probabilities after a prompt, and the greedy ids after it, decoded in graphs."""
    config = {**LLAMA_8B, "num_hidden_layers": LAYERS}
    built = llama_8b(1024, config, ranks, pipeline=pipeline and ranks > 1, dtype=dtype, blocks=1100, slots=8)
    backend, driver = built.backend, Driver(built.backend)
    tokens = random.Random(3).choices(range(1000, 100_000), k=PROMPT)
    slot, blocks = driver.open_with(0, tokens, PROMPT + GENERATED + 1)
    ids = list(backend.sample(backend.forward(driver.plan([(slot, 0, PROMPT, False)], {slot: blocks}))).ids)
    for step in range(GENERATED):
        ids += backend.sample(backend.forward(driver.plan([(slot, PROMPT + step, 1, True)], {}))).ids
    slot, blocks = driver.open_with(1, tokens, PROMPT, logprobs=TOP)
    found = backend.sample(backend.forward(driver.plan([(slot, 0, PROMPT, False)], {slot: blocks})))
    backend.close()
    return [*found.logprobs, *found.top_logprobs], ids
