"""Stop ids at which answers of the simulated engine end after so many tokens: found by running it beside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from loadtest.fleet import MODEL
from services.executor.sim.engine import SimBackend, SimOptions
from shared.config import load
from shared.kv_blocks import choice_seed
from shared.messages import Sampling, SlotOpen, StepPlan, ints
from shared.vocab.files import resolve
from shared.vocab.vocabulary import load_vocabulary

SPARE = 64  # tokens before the wanted length in which to find one that has not come before


def stop_ids(bodies: Sequence[dict[str, Any]], tokens: int) -> list[int]:
    """For each request an id that its answer has first at place `tokens`, or a little before."""
    return [
        _stop_id(tuple(body["prompt"][-1:]), len(body["prompt"]), body["seed"], tokens) for body in bodies
    ]


@cache
def _stop_id(last: tuple[int, ...], prompt_tokens: int, seed: int, tokens: int) -> int:
    backend = SimBackend(SimOptions(timing="step=0", vocab=_vocab(), slots=1))
    backend.open_slot(
        SlotOpen(
            slot=0, generation=1, seq=0, prompt_tokens=prompt_tokens, seed=choice_seed(seed, 0),
            tokens=ints(last), sampling=Sampling(),
        )
    )  # fmt: skip
    ids = []
    for at in range(tokens):
        start, count = (0, prompt_tokens) if not at else (prompt_tokens + at - 1, 1)
        ids.append(backend.sample(backend.forward(_plan(at + 1, start, count))).ids[0])
    return next(ids[at] for at in range(tokens - 1, tokens - SPARE, -1) if ids[at] not in ids[:at])


def _plan(step: int, start: int, count: int) -> StepPlan:
    return StepPlan(
        exec_epoch=1, step=step, mode="single", micro_batch=0, slots=ints([0]), starts=ints([start]),
        counts=ints([count]), from_device=ints([1]), sample_rows=ints([0]), sample_slots=ints([0]),
        table_slots=ints(), table_first=ints(), table_counts=ints(), table_blocks=ints(),
    )  # fmt: skip


@cache
def _vocab() -> int:
    return load_vocabulary(resolve(MODEL, load().settings.cache_dir)).size
