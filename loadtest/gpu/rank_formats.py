"""Two GPUs in every format of weights and KV: what a few layers of 8B's shape choose on one GPU, as ranks
that share layers and as stages; and steps of the whole model.

Run as `--parts formats2,steps2`. Each engine is in a process of its own, since a process is in one group,
ever; those of the comparison run a few at a time on the same GPUs.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from loadtest.driver import Driver
from loadtest.gpu import rig
from loadtest.gpu.engine import decode
from loadtest.gpu.rig import llama_8b
from loadtest.gpu.shape import LLAMA_8B
from shared.errors import SetupError

FORMATS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "f32"},
    "bf16": {"dtype": "bf16"},
    "bf16, KV in fp8": {"dtype": "bf16", "kv_dtype": "fp8"},
    "fp8": {"dtype": "fp8"},
    "int4": {"dtype": "int4"},
    "bf16, deterministic": {"dtype": "bf16", "deterministic": True},
    "fp8, deterministic": {"dtype": "fp8", "deterministic": True},
    "int4, deterministic": {"dtype": "int4", "deterministic": True},
}
WHOLE = ("fp8", "int4", "bf16")  # formats of the whole model's steps
WAYS = {"one GPU": (1, False), "ranks": (2, False), "stages": (2, True)}
PROMPTS, GENERATED, LAYERS, AT_ONCE = (700, 90, 333, 17), 24, 4, 6
BATCHES = (1, 64, 256)
WITHIN_S = 240.0


def part(name: str, limits: dict[str, float], step_tokens: int) -> list[dict[str, Any]]:
    """`formats2` or `steps2`."""
    return formats() if name == "formats2" else steps(limits, step_tokens)


def formats() -> list[dict[str, Any]]:
    """Ids and log probabilities by format and way."""
    with ThreadPoolExecutor(AT_ONCE) as several:
        asked = list(itertools.product(FORMATS, WAYS))
        answers = dict(zip(asked, several.map(lambda each: _apart(_answer, *each), asked), strict=True))
    return [_row(name, way, answers) for name, way in asked]


def steps(limits: dict[str, float], step_tokens: int) -> list[dict[str, Any]]:
    """Decode steps of the whole model on two GPUs that share its layers, by format."""
    return [{"format": name, **_apart(_steps, name, limits, step_tokens)} for name in WHOLE]


def _apart(run: Any, *given: Any) -> dict[str, Any]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            found: dict[str, Any] = process.submit(run, *given).result(WITHIN_S)
        except Exception as error:  # noqa: BLE001 - the others go on
            found = {"error": f"{type(error).__name__}: {error}"}
            for each in process._processes.values():
                each.kill()
        return found


def _row(name: str, way: str, answers: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    one, here = answers[name, "one GPU"], answers[name, way]
    row: dict[str, Any] = {"format": name, "way": way}
    for refused in ("error", "refused"):
        if refused in here:
            return row | {refused: here[refused]}
    together, alone = here["together"], here["alone"]
    row |= {
        "dtype": here["dtype"], "start_s": here["start_s"],
        "alone_as_together": sum(a == b for a, b in zip(together, alone, strict=True)),
        "of": len(together),
    }  # fmt: skip
    if "together" in one:
        row["as_one_gpu"] = sum(a == b for a, b in zip(together, one["together"], strict=True))
        pairs = zip(here["logprobs"], one["logprobs"], strict=True)
        row["largest_difference"] = max(abs(a - b) for a, b in pairs)
    print("formats", row, flush=True)
    return row


def _answer(name: str, way: str) -> dict[str, Any]:
    """Greedy ids of some prompts together and of each alone, decoded in graphs, and log probabilities of the
    likeliest tokens behind the longest prompt."""
    rig._give_up = lambda why: None  # a refusal is an answer
    ranks, pipeline = WAYS[way]
    config = {**LLAMA_8B, "num_hidden_layers": LAYERS}
    began_s = time.monotonic()
    try:
        built = llama_8b(
            2048, config, ranks, pipeline=pipeline, blocks=1100, slots=8, **FORMATS[name]
        )  # fmt: skip
    except SetupError as error:
        return {"refused": str(error)}
    start_s = time.monotonic() - began_s
    draw = random.Random(3)
    prompts = [draw.choices(range(1000, 100_000), k=length) for length in PROMPTS]
    together = _greedy(built.backend, dict(enumerate(prompts)))
    alone = [ids for slot, prompt in enumerate(prompts) for ids in _greedy(built.backend, {slot: prompt})]
    driver = Driver(built.backend)
    slot, blocks = driver.open_with(0, prompts[0], PROMPTS[0], logprobs=20)
    plan = driver.plan([(slot, 0, PROMPTS[0], False)], {slot: blocks})
    found = built.backend.sample(built.backend.forward(plan))
    dtype = built.backend.info.dtype
    built.backend.close()
    return {
        "together": together, "alone": alone, "dtype": dtype, "start_s": start_s,
        "logprobs": [*found.logprobs, *found.top_logprobs],
    }  # fmt: skip


def _greedy(backend: Any, prompts: dict[int, list[int]]) -> list[list[int]]:
    driver = Driver(backend)
    opened = {
        slot: driver.open_with(slot, tokens, len(tokens) + GENERATED + 1)[1]
        for slot, tokens in prompts.items()
    }
    rows = [(slot, 0, len(tokens), False) for slot, tokens in prompts.items()]
    steps = [list(backend.sample(backend.forward(driver.plan(rows, opened))).ids)]
    for step in range(GENERATED):
        rows = [(slot, len(tokens) + step, 1, True) for slot, tokens in prompts.items()]
        steps.append(list(backend.sample(backend.forward(driver.plan(rows, {}))).ids))
    driver.close()
    return [list(ids) for ids in zip(*steps, strict=True)]


def _steps(name: str, limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    built = llama_8b(step_tokens, ranks=2, **FORMATS[name])
    info = built.backend.info
    found = {
        "dtype": info.dtype, "load_s": built.load_s, "warm_up_s": built.warm_up_s,
        "kv_tokens": info.blocks * info.block_tokens, "decode": decode(built, limits, BATCHES),
    }  # fmt: skip
    built.backend.close()
    return found
