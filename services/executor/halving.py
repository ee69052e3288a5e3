"""From how many tokens on an engine's prefill steps are quicker in two halves: measured at its start.

All ranks measure at once, the same steps in the same order, and the slowest rank's times count: a step ends
when all have. The two ways take turns, so that neither has the cooler device. Prompts are as long as prompts
are, of tokens that differ, for a router sends equal ones to the same experts.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from services.executor.backend import Backend, BackendInfo
from services.executor.crossover import NEVER, crossover
from services.executor.ranks import Ranks
from shared.blocks import blocks_for
from shared.messages import SlotOpen, StepPlan, ints

log = logging.getLogger("headrace.executor")

LEAST = 1024  # tokens: below, halves read weights twice and gain nothing
PROMPT = 2048
REPEATS = 3
_STRIDE = 7919  # a prime: tokens are spread over the vocabulary

Times = dict[int, tuple[float, float]]  # by tokens: a step's time whole and in halves


def two_stream_tokens(
    backend: Backend,
    ranks: Ranks,
    prepare: Callable[[int], None] = lambda tokens: None,
    now_ns: Callable[[], int] = time.perf_counter_ns,
) -> int:
    """What the ranks say in their hello. `prepare` is told the tokens of the steps that come next: from the
    longest on, until halves gain nothing. Leaves slots open."""
    slowest: Times = {}
    for tokens in reversed(sizes(backend.info)):
        prepare(tokens)
        found = ranks.exchange(_times(backend, tokens, now_ns))
        slowest[tokens] = max(whole for whole, _ in found), max(halved for _, halved in found)
        if crossover(slowest) != tokens:
            break
    since = crossover(slowest)
    log.info(
        "steps in two halves, the talk of one under the other's compute: %s (ms whole and halved: %s)",
        "never" if since == NEVER else f"from {since} tokens on",
        ", ".join(f"{tokens} {one / 1e6:.1f} {two / 1e6:.1f}" for tokens, (one, two) in slowest.items()),
    )
    return since


def sizes(info: BackendInfo) -> list[int]:
    """The steps to measure: powers of two that this engine can compute, in tokens."""
    return [tokens for tokens in _doubling(LEAST, info.max_step_tokens) if _fits(info, tokens)]


def _doubling(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _prompts(info: BackendInfo, tokens: int) -> list[int]:
    """Their lengths."""
    each = min(PROMPT, tokens, info.max_context - 1)
    return [min(each, tokens - at) for at in range(0, tokens, each)]


def _fits(info: BackendInfo, tokens: int) -> bool:
    prompts = _prompts(info, tokens)
    blocks = sum(blocks_for(length, info.block_tokens) for length in prompts)
    return len(prompts) <= info.slots and blocks <= info.blocks


def _times(backend: Backend, tokens: int, now_ns: Callable[[], int]) -> tuple[float, float]:
    """The medians, after one step of each that does not count."""
    opened, plan = _step(backend.info, tokens)
    taken: tuple[list[int], list[int]] = ([], [])
    for _ in range(1 + REPEATS):
        for halved in (False, True):
            for each in opened:
                backend.open_slot(each)
            began_ns = now_ns()
            backend.sample(backend.forward(replace(plan, two_stream=halved)))
            taken[halved].append(now_ns() - began_ns)
    return statistics.median(taken[False][1:]), statistics.median(taken[True][1:])


def _step(info: BackendInfo, tokens: int) -> tuple[list[SlotOpen], StepPlan]:
    """Prompts that come at once, and nobody's next token."""
    lengths = _prompts(info, tokens)
    counts = [blocks_for(length, info.block_tokens) for length in lengths]
    slots = ints(range(len(lengths)))
    opened = [
        SlotOpen(
            slot=slot, generation=0, seq=slot, prompt_tokens=length,
            tokens=ints((slot + i * _STRIDE) % info.vocab for i in range(length)),
        )
        for slot, length in enumerate(lengths)
    ]  # fmt: skip
    plan = StepPlan(
        exec_epoch=0,
        step=0,
        mode="single",
        micro_batch=0,
        slots=slots,
        starts=ints([0] * len(lengths)),
        counts=ints(lengths),
        from_device=ints([0] * len(lengths)),
        sample_rows=ints(),
        sample_slots=ints(),
        table_slots=slots,
        table_first=ints([0] * len(lengths)),
        table_counts=ints(counts),
        table_blocks=ints(range(sum(counts))),
    )
    return opened, plan
