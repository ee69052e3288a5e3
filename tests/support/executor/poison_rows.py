"""Runs hostile rows beside rows with known answers on one engine: no known answer changes, no step fails.

    a round:  8 sequences with known answers  +  24 with every field drawn at its extremes, some beyond what
              the edge admits: prompts in one step, decodes after it, all queued at once

A small model with random weights, float32; one token's embedding is NaN. Half of the rows in the usual mode,
half in the deterministic one.
"""

from __future__ import annotations

import json
import math
import platform
import queue
import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loadtest.driver import Driver
from loadtest.gpu.shape import LLAMA_8B
from services.executor.checkpoint.loader import TorchOptions
from services.executor.device_thread import DeviceThread, Reset, checked_slot
from services.executor.engine import Backend, BackendInfo, sequence_error
from shared.clock import SystemClock
from shared.messages import Sampling, SlotClose, SlotOpen, StepPlan, StepResult, floats, ints

VOCAB, ROTTEN = 1000, 999  # its embedding is NaN
BYSTANDERS, HOSTILE, DECODES = 8, 24, 3
BEYOND = 0.8  # how often a row that the engine would not be shown is drawn anew
BLOCKS_EACH, BLOCK_TOKENS = 4, 16
WITHIN_S = 300.0
SHAPE = {
    **LLAMA_8B, "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip

# The first of each is usual; the last ones no edge admits.
TEMPERATURES = (
    1.0,
    0.0,
    5e-324,
    1e-50,
    1e-40,
    1.2e-38,
    1e-7,
    1e-6,
    0.7,
    2.0,
    1e300,
    math.inf,
    math.nan,
    -1.0,
)
TOP_PS = (1.0, 5e-324, 1e-50, 1e-40, 1.2e-38, 0.5, 0.9, 1 - 1e-16, 0.0, math.nan, 2.0)
TOP_KS = (0, 1, 2, 5, 256, 999, 1000, 1001, 2**24 + 1, 2**31 - 1, -1)
MIN_PS = (0.0, 5e-324, 1e-50, 1e-38, 0.1, 1.0, math.nan)
REPETITIONS = (1.0, 0.01, 1e-6, 1e-30, 1e-40, 5e-324, 10.0, 1e300, 0.0, math.inf, math.nan, -1.0)
PENALTIES = (0.0, 1e-50, -2.0, 2.0, 1e39, math.inf, math.nan)
BIASES = (0, 1, 300, 1024)
BIAS_VALUES = (1.0, -100.0, 100.0, 1e-40, 3e38, -math.inf, math.inf, math.nan)
STOPS = (0, 1, 31, 32, 33, 64, 66, 128, 129, 500)
LOGPROBS = (0, 1, 2, 21)
SEEDS = (0, 1, 2**63, 2**64 - 1)
LENGTHS = (0, 1, 2**31 - 1)  # max_length, besides those near the prompt's
PROMPTS = ("plain", "one token", "rotten begin", "rotten end", "unknown token", "far token")
PROCESSORS = ((), ("{",), ('{"name": "absent", "args": {}}',))
GRAMMARS = ("", "{", "[]", '{"kind": "regex", "source": "("}')


def drawn(dice: random.Random, slot: int) -> SlotOpen:
    """A sequence whose every field is at an extreme, most of them at the usual one."""

    def one(of: Any, usual: float = 0.5) -> Any:
        return of[0] if dice.random() < usual else dice.choice(of)

    kind = one(PROMPTS)
    tokens = [dice.randrange(ROTTEN) for _ in range(1 if kind == "one token" else dice.randint(2, 40))]
    at = 0 if kind == "rotten begin" else -1
    bad = {"rotten begin": ROTTEN, "rotten end": ROTTEN, "unknown token": VOCAB, "far token": 2**31 - 1}
    tokens[at] = bad.get(kind, tokens[at])
    biased = one(BIASES, 0.7)
    ids = [dice.randrange(VOCAB) for _ in range(biased)]
    if biased and dice.random() < 0.1:
        ids[0] = one((VOCAB, 2**31 - 1))
    value = one(BIAS_VALUES)
    return SlotOpen(
        slot=slot, generation=0, seq=slot, prompt_tokens=dice.choice((1, len(tokens))),
        max_length=dice.choice((0, len(tokens) + 1, len(tokens) + 9, *LENGTHS)), seed=one(SEEDS),
        sampling=Sampling(
            temperature=one(TEMPERATURES), top_k=one(TOP_KS), top_p=one(TOP_PS), min_p=one(MIN_PS),
            repetition_penalty=one(REPETITIONS), presence_penalty=one(PENALTIES, 0.7),
            frequency_penalty=one(PENALTIES, 0.7), bias_ids=ints(ids), bias_values=floats([value] * biased),
        ),
        stop_ids=ints(dice.randrange(VOCAB + 100) for _ in range(one(STOPS))), logprobs=one(LOGPROBS),
        grammar=one(GRAMMARS, 0.97), processors=one(PROCESSORS, 0.95), tokens=ints(tokens),
    )  # fmt: skip


def _hostile(dice: random.Random, slot: int, info: BackendInfo) -> SlotOpen:
    """Most get as far as the engine; some are what it is never shown."""
    one = drawn(dice, slot)
    while dice.random() < BEYOND and sequence_error(one, info):
        one = drawn(dice, slot)
    return one


def bystander(slot: int) -> SlotOpen:
    """One that asks for nothing unusual; each slot's is another one."""
    dice = random.Random(slot)
    wishes = (
        Sampling(temperature=0.0), Sampling(temperature=0.0, frequency_penalty=0.3), Sampling(top_p=0.9),
        Sampling(temperature=0.8, top_k=40), Sampling(), Sampling(temperature=1.3, min_p=0.02),
        Sampling(repetition_penalty=1.2, top_p=0.95), Sampling(bias_ids=ints([3]), bias_values=floats([5.0])),
    )  # fmt: skip
    tokens = [dice.randrange(ROTTEN) for _ in range(dice.randint(3, 40))]
    return SlotOpen(
        slot=slot, generation=0, seq=slot, prompt_tokens=len(tokens), seed=slot, sampling=wishes[slot],
        logprobs=2 * (slot == 4), tokens=ints(tokens),
    )  # fmt: skip


@dataclass
class Found:
    """What came of the rows so far."""

    rows: int = 0
    steps: int = 0
    failed_steps: list[str] = field(default_factory=list)
    compared: int = 0  # tokens of bystanders
    changed: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)  # hostile rows with neither token nor error
    outcomes: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)  # each row's draw and outcome, JSON


class House:
    """An engine under its device thread, fed by hand."""

    def __init__(self, backend: Backend) -> None:
        self.info, self._backend = backend.info, backend
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._device = DeviceThread(lambda: backend, SystemClock(), self._results.put)
        built: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._device.start(built.put)
        if isinstance(error := built.get(timeout=WITHIN_S), BaseException):
            raise error
        self._driver = Driver(backend)

    def answers(self, opened: list[SlotOpen], dice: random.Random) -> list[StepResult]:
        """The results of their prompts in one step and of the decodes after it, all queued before the first
        is back; then they are closed. Blocks may have belonged to any sequence before."""
        blocks = list(range(self.info.blocks))
        dice.shuffle(blocks)
        tables = {o.slot: [blocks.pop() for _ in range(BLOCKS_EACH)] for o in opened}
        for one in opened:
            self._device.put(checked_slot(one, self.info))
        plans: list[StepPlan] = []
        for step in range(DECODES + 1):
            rows = [
                (o.slot, len(o.tokens) + step - 1, 1, True) if step else (o.slot, 0, len(o.tokens), False)
                for o in opened
            ]
            plans.append(self._driver.plan(rows, {} if step else tables))
            self._device.put(plans[-1])
        for one in opened:
            self._device.put(SlotClose(slot=one.slot, generation=0, last_step=plans[-1].step))
        return [self._results.get(timeout=WITHIN_S) for _ in plans]

    def end(self) -> None:
        self._device.put(Reset())
        self._device.join(WITHIN_S)


def torment(backend: Backend, rows: int, seed: int, found: Found) -> None:
    """Run so many hostile rows."""
    house, dice = House(backend), random.Random(seed)
    known: dict[int, list[int]] = {}
    for slot in range(BYSTANDERS):
        known[slot] = [result.ids[0] for result in house.answers([bystander(slot)], dice)]
    end = found.rows + rows
    while found.rows < end:
        count = min(HOSTILE, end - found.rows)
        hostile = [_hostile(dice, BYSTANDERS + i, house.info) for i in range(count)]
        opened = [bystander(slot) for slot in range(BYSTANDERS)] + hostile
        dice.shuffle(opened)
        results = house.answers(opened, dice)
        found.steps += len(results)
        found.failed_steps += [result.error for result in results if result.error]
        for row, one in enumerate(opened):
            _note(found, one, row, results, known)
        found.rows += count
    house.end()


def _note(
    found: Found, one: SlotOpen, row: int, results: list[StepResult], known: dict[int, list[int]]
) -> None:
    ids = [result.ids[row] for result in results]
    reasons = [why for result in results for at, why in result.row_errors if at == row]
    errors = [re.sub(r"/\S+", "PATH", why) for why in reasons]  # the model's temporary folder
    if one.slot < BYSTANDERS:
        found.compared += len(ids)
        if ids != known[one.slot] or errors:
            found.changed.append({"slot": one.slot, "round": found.rows, "ids": ids, "errors": errors})
        return
    ended = next((i for i, result in enumerate(results) if result.done[row]), len(results))
    tokens = [token for token in ids if token >= 0]
    sound = all(token < VOCAB for token in tokens) and ids[: len(tokens)] == tokens
    if not sound or (not errors and len(tokens) < min(ended + 1, len(results))):
        found.wrong.append({"round": found.rows, "ids": ids, "errors": errors, "asked": _words(one)})
    outcome = errors[0] if errors else "answered"
    found.outcomes["".join("#" if letter.isdigit() else letter for letter in outcome)[:90]] += 1
    found.lines.append(json.dumps({"asked": _words(one), "ids": ids, "errors": errors[:1]}))


def _words(one: SlotOpen) -> dict[str, Any]:
    wanted = one.sampling
    return {
        "tokens": len(one.tokens), "largest": max(one.tokens), "rotten": ROTTEN in one.tokens,
        "temperature": wanted.temperature, "top_k": wanted.top_k, "top_p": wanted.top_p,
        "min_p": wanted.min_p, "repetition": wanted.repetition_penalty, "presence": wanted.presence_penalty,
        "frequency": wanted.frequency_penalty, "biases": len(wanted.bias_ids),
        "bias": wanted.bias_values[0] if wanted.bias_values else 0.0, "stops": len(one.stop_ids),
        "logprobs": one.logprobs, "seed": one.seed, "max_length": one.max_length, "grammar": one.grammar,
        "processors": one.processors,
    }  # fmt: skip


def small_engine(device: str, *, deterministic: bool) -> Backend:
    """The model on that device."""
    slots = BYSTANDERS + HOSTILE
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        options = TorchOptions(
            model_path=Path(folder), model_name="poisoned", dummy=True, device=device, dtype="f32",
            blocks=(slots + 1) * BLOCKS_EACH, block_tokens=BLOCK_TOKENS, slots=slots,
            max_step_tokens=slots * BLOCKS_EACH * BLOCK_TOKENS, deterministic=deterministic, threads=1,
        )  # fmt: skip
        if device == "cpu":
            from services.executor.cpu.engine import build as build_cpu

            backend: Any = build_cpu(options)
            embedding = backend._model._embedding.values
        else:
            from services.executor.cuda.engine import build

            backend = build(options)
            embedding = backend._runner._model._embedding
    embedding[ROTTEN] = math.nan
    return backend


def report(device: str, rows: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Run `rows` hostile rows; the summary, and each row's line. `clean` is what the program is for."""
    found = Found()
    for deterministic in (False, True):
        share = rows - rows // 2 if deterministic else rows // 2
        torment(small_engine(device, deterministic=deterministic), share, seed + deterministic, found)
    clean = not (found.failed_steps or found.changed or found.wrong)
    summary = {
        "clean": clean, "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__, "python": platform.python_version(), "seed": seed, "rows": found.rows,
        "steps": found.steps, "failed_steps": found.failed_steps[:20], "bystander_tokens": found.compared,
        "bystanders_changed": found.changed[:20], "wrong": found.wrong[:20],
        "outcomes": dict(found.outcomes.most_common()),
    }  # fmt: skip
    return summary, found.lines
