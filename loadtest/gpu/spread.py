"""Measures a group of GPUs with a mixture of experts, and with prefill steps in micro-batches.

Run as `--parts moe2` (against one GPU) and `--parts halves2,experts2` (off and on in turn; a dense 8B, and
Qwen3-30B-A3B). One part a process, because a process can hold only one group.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from loadtest.driver import Driver
from loadtest.gpu.rig import Built, llama_8b
from loadtest.gpu.shape import LLAMA_8B, QWEN3_30B_A3B
from services.executor.engine import COMM, COMPUTE, StepOutput
from services.executor.parallel.step_split import NEVER
from shared.telemetry.traces import covered_us

SIZES, PROMPT, REPEATS = (1024, 2048, 4096, 8192), 2048, 5
PROMPTS = tuple(range(100, 292, 4))  # their lengths in the comparison with one GPU
GENERATED = 24
TINY = {
    **QWEN3_30B_A3B, "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 768, "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 128, "vocab_size": 8192,
}  # fmt: skip
FEW_LAYERS = {**QWEN3_30B_A3B, "num_hidden_layers": 6}
WITHIN_S = 240.0

Answer = tuple[Tensor, list[int]]


def moe(size: int) -> list[dict[str, Any]]:
    """Logits behind prompts, and greedy ids, on one GPU and on several. A token that a rounding routes
    otherwise is far off, so the median counts, and how far one GPU is from itself in other company."""
    rows = []
    for name, config in (("tiny", TINY), ("30B-A3B, 6 layers", FEW_LAYERS)):
        one, other = _apart(1, config, (len(PROMPTS), 1))
        (several,) = _apart(size, config, (len(PROMPTS),))
        rows.append({
            "model": name, "ranks": size, "several_to_one": _far(one[0], several[0]),
            "one_in_other_company": _far(one[0], other[0]), "logits_std": float(one[0].std()),
            "ids": len(one[1]), "same_ids": sum(a == b for a, b in zip(one[1], several[1], strict=True)),
            "same_ids_in_other_company": sum(a == b for a, b in zip(one[1], other[1], strict=True)),
        })  # fmt: skip
        print("moe", rows[-1], flush=True)
    return rows


def halves(size: int, step_tokens: int) -> dict[str, Any]:
    """A dense 8B."""
    return _halves(llama_8b(step_tokens, LLAMA_8B, size, overlap_comm="two_stream"))


def experts(size: int, step_tokens: int) -> dict[str, Any]:
    """Qwen3-30B-A3B."""
    return _halves(llama_8b(step_tokens, QWEN3_30B_A3B, size, overlap_comm="two_stream"))


def _far(one: Tensor, other: Tensor) -> dict[str, float]:
    mine, theirs = one.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = (mine.exp() * (mine - theirs)).sum(-1)
    return {
        "median_kl": float(kl.median()), "largest_kl": float(kl.max()),
        "median_of_largest_difference": float((one - other).abs().amax(1).median()),
        "same_top": float((one.argmax(1) == other.argmax(1)).float().mean()),
    }  # fmt: skip


def _apart(ranks: int, config: dict[str, Any], companies: tuple[int, ...]) -> list[Answer]:
    """In a process of its own: there is one group in a process, ever."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_answers, ranks, config, companies).result(WITHIN_S)


def _answers(ranks: int, config: dict[str, Any], companies: tuple[int, ...]) -> list[Answer]:
    """An answer for each: with so many prompts in a step."""
    built = llama_8b(16_384, config, ranks, blocks=4_000, slots=64)
    found = [_answer(built, config["vocab_size"], company) for company in companies]
    built.backend.close()
    return found


def _answer(built: Built, vocab: int, company: int) -> Answer:
    """Logits behind prompts `[prompts, vocab]`, and the greedy ids after the first."""
    backend, driver, draw = built.backend, Driver(built.backend), random.Random(3)
    prompts = [draw.choices(range(vocab), k=length) for length in PROMPTS]
    room = max(PROMPTS) + GENERATED + 1
    opened = [driver.open_with(slot, tokens, room, logprobs=1) for slot, tokens in enumerate(prompts)]
    logits, ids = [], []
    for first in range(0, len(opened), company):
        rows = opened[first : first + company]
        wanted = [(slot, 0, len(prompts[slot]), False) for slot, _ in rows]
        pending = backend.forward(driver.plan(wanted, dict(rows)))
        assert pending.logits is not None, "a row that asks for log probabilities is sampled in torch"
        logits.append(pending.logits.float().cpu())
        ids += backend.sample(pending).ids
    ids = ids[:1]
    for step in range(GENERATED):
        ids += backend.sample(backend.forward(driver.plan([(0, len(prompts[0]) + step, 1, True)], {}))).ids
    driver.close()
    return torch.cat(logits), ids


def _halves(built: Built) -> dict[str, Any]:
    backend = built.backend
    since = backend.info.two_stream_tokens
    found: dict[str, Any] = {
        "ranks": built.ranks, "load_s": built.load_s, "warm_up_s": built.warm_up_s,
        "crossover": None if since == NEVER else since, "alike": _alike(built), "sizes": [],
    }  # fmt: skip
    print("alike", found["alike"], flush=True)
    for tokens in (size for size in SIZES if size <= backend.info.max_step_tokens):
        taken: dict[bool, list[float]] = {False: [], True: []}
        _once(built, tokens, False)
        _once(built, tokens, True)
        for _ in range(REPEATS):
            for halved in (False, True):
                ms, output = _once(built, tokens, halved)
                taken[halved].append(ms)
        off, on = (statistics.median(taken[halved]) for halved in (False, True))
        chosen = on if tokens >= since else off
        row = {
            "tokens": tokens, "off_ms": off, "on_ms": on, "on": off / on, "auto": off / chosen,
            "all_ms": taken, **_hidden(output),
        }  # fmt: skip
        found["sizes"].append(row)
        print("halves", {key: value for key, value in row.items() if key != "all_ms"}, flush=True)
    backend.close()
    return found


def _alike(built: Built) -> dict[str, float]:
    """How far a step of prompts in halves is from the same one whole, and the step of their first decodes
    beside other prompts."""
    backend, lengths, later = built.backend, PROMPTS[:20], PROMPTS[20:40]
    found = []
    for halved in (False, True):
        driver, draw, logits = Driver(backend), random.Random(5), []
        opened = [
            driver.open_with(slot, draw.choices(range(1000), k=length), length + 2, logprobs=1)
            for slot, length in enumerate((*lengths, *later))
        ]
        prompts = [(slot, 0, length, False) for slot, length in enumerate((*lengths, *later))]
        decodes = [(slot, length, 1, True) for slot, length in enumerate(lengths)]
        for rows, tables in ((prompts[:20], opened[:20]), ([*decodes, *prompts[20:]], opened[20:])):
            pending = backend.forward(driver.plan(rows, dict(tables), two_stream=halved))
            assert pending.logits is not None, "a row that asks for log probabilities is sampled in torch"
            logits.append(pending.logits.float().cpu())
            backend.sample(pending)
        driver.close()
        found.append(torch.cat(logits))
    return _far(found[0], found[1])


def _once(built: Built, tokens: int, halved: bool) -> tuple[float, StepOutput]:
    """One step of prompts, from its plan to its ids, in ms."""
    backend, driver = built.backend, Driver(built.backend)
    each = min(PROMPT, tokens)
    tables = dict(driver.open(slot, each, each + 1) for slot in range(tokens // each))
    plan = driver.plan([(slot, 0, each, False) for slot in tables], tables, two_stream=halved)
    began_s = time.perf_counter()
    output = backend.sample(backend.forward(plan))
    took_s = time.perf_counter() - began_s
    driver.close()
    return 1e3 * took_s, output


def _hidden(output: StepOutput) -> dict[str, float]:
    """Of the first talks of a step, what was under compute."""

    def of(lanes: tuple[int, int]) -> list[tuple[int, int]]:
        return [(p.from_us, p.from_us + p.took_us) for p in output.segments if p.lane in lanes]

    compute, comm = of(COMPUTE), of(COMM)
    talked = covered_us(comm)
    return {
        "first_pieces": float(len(output.segments)), "comm_us": float(talked),
        "hidden": (talked + covered_us(compute) - covered_us([*compute, *comm])) / max(talked, 1),
    }  # fmt: skip
