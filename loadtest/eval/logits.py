"""Computes the logits of the scored positions of windows of tokens, by one of two paths.

prefill   a window is one prompt chunk, all its positions at once; for engines with torch's eager model
decode    the first half is a prompt, then one token a step, some windows side by side: for any engine. It
          uses the kernels of decode steps, which may differ in a quantised model
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loadtest.driver import Driver
from loadtest.eval.engines import SIDE_BY_SIDE
from loadtest.eval.llama_cpp import LlamaCpp
from loadtest.eval.text import scored
from services.executor.cpu.engine import TorchBackend
from services.executor.engine import Backend
from shared.errors import BadRequest

Engine = Backend | LlamaCpp
Windows = Sequence[list[int]]
Scored = Iterator[
    tuple[Tensor, Tensor]
]  # logits [positions, vocab] in float32, and what followed [positions]


def path_for(wanted: str, engines: Sequence[Engine]) -> str:
    """The path that all engines can take: `auto` prefers prefill. Raises BadRequest."""
    able = all(isinstance(engine, TorchBackend | LlamaCpp) for engine in engines)
    if wanted == "prefill" and not able:
        raise BadRequest("an engine on a GPU gives logits by decode alone: --path decode")
    path = ("prefill" if able else "decode") if wanted == "auto" else wanted
    if path == "decode" and any(isinstance(engine, LlamaCpp) for engine in engines):
        raise BadRequest("llama.cpp gives logits by prefill alone: --path prefill, without a GPU")
    return path


def logits_by(path: str, engine: Engine, windows: Windows) -> Scored:
    """The scored positions, in an order that depends on the path alone."""
    if isinstance(engine, LlamaCpp):
        return by_llama_cpp(engine, windows)
    if path == "prefill":
        assert isinstance(engine, TorchBackend)
        return prefill(engine, windows)
    return decode(engine, windows)


@torch.inference_mode()
def prefill(engine: TorchBackend, windows: Windows) -> Scored:
    """A window at a time."""
    for window in windows:
        driver, wanted = Driver(engine), scored(len(window))
        slot, blocks = driver.open_with(0, window, len(window))
        plan = driver.plan([(slot, 0, len(window), False)], {slot: blocks}, samples=False)
        engine._slots.apply_tables(plan)
        batch = replace(engine._batches.build(plan), sampled=torch.tensor(wanted))
        logits, *_ = engine._model.forward(batch, engine._cache.tensor)
        assert logits is not None, "an engine that is not a stage of one"
        yield logits, torch.tensor(window)[wanted.start + 1 :]
        driver.close()


def by_llama_cpp(engine: LlamaCpp, windows: Windows) -> Scored:
    """A window at a time."""
    for window in windows:
        wanted = scored(len(window))
        logits = engine.logits(window)[wanted.start : wanted.stop]
        yield logits, torch.tensor(window)[wanted.start + 1 :]


def decode(engine: Backend, windows: Windows) -> Scored:
    """A position of some windows at a time."""
    for first in range(0, len(windows), SIDE_BY_SIDE):
        group = windows[first : first + SIDE_BY_SIDE]
        wanted = scored(len(group[0]))
        steps = by_steps(engine, group, wanted.start + 1, 1)
        for position, logits in zip(wanted, steps, strict=False):
            yield logits, torch.tensor([window[position + 1] for window in group])


@torch.inference_mode()
def by_steps(engine: Backend, sequences: Windows, first: int, each: int) -> Iterator[Tensor]:
    """Sequences of one length, through the engine's protocol: their `first` tokens, a sequence a step, then
    `each` tokens of all in a step. Yields the logits `[sequences, vocab]` after each of these parts."""
    driver, length = Driver(engine), len(sequences[0])
    tables = dict(
        driver.open_with(slot, tokens, length, logprobs=1) for slot, tokens in enumerate(sequences)
    )  # where log probabilities are asked for, logits come out of every engine

    def step(slots: Iterable[int], start: int, count: int) -> Tensor:
        rows = [(slot, start, count, False) for slot in slots]
        plan = driver.plan(rows, {} if start else {slot: tables[slot] for slot in slots})
        pending = engine.forward(plan)
        assert pending.logits is not None
        engine.sample(pending)
        return pending.logits

    yield torch.cat([step([slot], 0, first) for slot in tables])
    for start in range(first, length, each):
        yield step(tables, start, min(each, length - start))
    driver.close()
