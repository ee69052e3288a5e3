"""Splits a step into two micro-batches of equal tokens, and measures from how many tokens on this is faster.

The cut may go through a prompt: its second part attends to the KV of the first, so in every layer the first
micro-batch must compute first. `two_stream_tokens` measures the split threshold at an engine's start.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.executor.engine import Backend, BackendInfo, trial_plan
from services.executor.parallel.ranks import Ranks
from shared.kv_blocks import blocks_for
from shared.messages import SlotOpen, StepPlan, ints

log = logging.getLogger("headrace.executor")
CUT_TOKENS = 64  # the first micro-batch has a multiple of this: a product's tile of rows
LEAST = 1024  # tokens: below it micro-batches gain nothing, since they read the weights twice
PROMPT = 2048  # tokens of a measured prompt
REPEATS = 3
_STRIDE = 7919  # a prime: spreads the tokens over the vocabulary
NEVER = 1 << 30
MARGIN = 0.98  # two streams must need less than this share of one stream's time: the rest is noise
Times = dict[int, tuple[float, float]]  # by tokens: a step's ns, whole and split


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence: token rows `first` to `first + count`, from position `start` on."""

    slot: int
    first: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Two plans in place of one. `order`: for each sample row of the whole plan, its index among the sample
    rows of `first` followed by those of `second`."""

    first: StepPlan
    second: StepPlan
    order: tuple[int, ...]


def split_chunks(
    chunks: Sequence[Chunk], cut: int = CUT_TOKENS
) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """The chunks of the first half of the tokens, and of the second half with token rows from 0 on. `chunks`
    are in the order of their rows, from row 0 on; with `2 * cut` tokens neither half is empty."""
    tokens = sum(chunk.count for chunk in chunks)
    middle = (tokens // 2 + cut // 2) // cut * cut
    before, after = [], []
    for chunk in chunks:
        here = min(max(middle - chunk.first, 0), chunk.count)
        if here:
            before.append(replace(chunk, count=here))
        if here < chunk.count:
            first = chunk.first + here - middle
            after.append(Chunk(chunk.slot, first, chunk.start + here, chunk.count - here))
    return tuple(before), tuple(after)


def split(plan: StepPlan, cut: int = CUT_TOKENS) -> MicroBatches | None:
    """The rows of a plan (chunks and decodes) as two micro-batches, without its table deltas and copies,
    which are applied before; None for a step of less than `2 * cut` tokens."""
    rows, tokens = [], 0
    for row, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        rows.append(Chunk(row, tokens, start, count))
        tokens += count
    if tokens < 2 * cut:
        return None
    parts = split_chunks(rows, cut)
    in_second = {chunk.slot for chunk in parts[1]}  # with a row that is cut: its last token is there
    samples: tuple[list[int], list[int]] = ([], [])
    for sample, row in enumerate(plan.sample_rows):
        samples[row in in_second].append(sample)
    order = [0] * len(plan.sample_rows)
    for at, sample in enumerate([*samples[0], *samples[1]]):
        order[sample] = at
    first, second = (_rows(plan, *micro_batch) for micro_batch in zip(parts, samples, strict=True))
    return MicroBatches(first, second, tuple(order))


def _rows(plan: StepPlan, chunks: Sequence[Chunk], samples: Sequence[int]) -> StepPlan:
    """The plan of these parts of rows (the chunks' slots are row indices) and these sample rows."""
    row_of = {chunk.slot: row for row, chunk in enumerate(chunks)}
    return StepPlan(
        exec_epoch=plan.exec_epoch,
        step=plan.step,
        mode=plan.mode,
        micro_batch=plan.micro_batch,
        slots=ints(plan.slots[chunk.slot] for chunk in chunks),
        starts=ints(chunk.start for chunk in chunks),
        counts=ints(chunk.count for chunk in chunks),
        from_device=ints(plan.from_device[chunk.slot] for chunk in chunks),
        sample_rows=ints(row_of[plan.sample_rows[sample]] for sample in samples),
        sample_slots=ints(plan.sample_slots[sample] for sample in samples),
    )


def two_stream_tokens(
    backend: Backend,
    ranks: Ranks,
    prepare: Callable[[int], None] = lambda tokens: None,
    now_ns: Callable[[], int] = time.perf_counter_ns,
) -> int:
    """The split threshold for ExecHello: from how many tokens on an engine's prefill steps are faster in two
    micro-batches. It measures the longest steps first, until micro-batches gain nothing; `prepare` is called
    with the tokens of the next steps. Leaves slots open.

    All ranks measure the same steps at once, and the slowest rank's time counts, because a step ends on all
    ranks. Whole and split steps alternate, so that neither finds a cooler device. The prompts have different
    tokens: a router sends equal ones to the same experts."""
    slowest: Times = {}
    for tokens in reversed(sizes(backend.info)):
        prepare(tokens)
        found = ranks.exchange(_times(backend, tokens, now_ns))
        slowest[tokens] = max(whole for whole, _ in found), max(in_two for _, in_two in found)
        if split_threshold(slowest) != tokens:
            break
    since = split_threshold(slowest)
    log.info(
        "steps are split into micro-batches, one's collectives under the other's compute: %s "
        "(ms whole and split: %s)",
        "never" if since == NEVER else f"from {since} tokens on",
        ", ".join(f"{tokens} {one / 1e6:.1f} {two / 1e6:.1f}" for tokens, (one, two) in slowest.items()),
    )
    return since


def split_threshold(times: Mapping[int, tuple[float, float]]) -> int:
    """The least number of tokens from which on two streams took less than MARGIN of one stream's time at
    every measured size; NEVER if not even at the largest. `times`: one stream's and two streams', by tokens.

    Small micro-batches are slower (the weights are read twice, and a collective is mostly latency), large
    ones are faster."""
    found = NEVER
    for tokens, (one, two) in sorted(times.items(), reverse=True):
        if two >= MARGIN * one:
            break
        found = tokens
    return found


def sizes(info: BackendInfo) -> list[int]:
    """The tokens of the steps to measure: powers of two times LEAST that this engine can compute."""
    doublings = range((info.max_step_tokens // LEAST).bit_length())
    return [LEAST << times for times in doublings if _has_room(info, LEAST << times)]


def _prompts(info: BackendInfo, tokens: int) -> list[int]:
    """The lengths of the prompts of a measured step."""
    each = min(PROMPT, tokens, info.max_context - 1)
    return [min(each, tokens - at) for at in range(0, tokens, each)]


def _has_room(info: BackendInfo, tokens: int) -> bool:
    prompts = _prompts(info, tokens)
    blocks = sum(blocks_for(length, info.block_tokens) for length in prompts)
    return len(prompts) <= info.slots and blocks <= info.blocks


def _times(backend: Backend, tokens: int, now_ns: Callable[[], int]) -> tuple[float, float]:
    """The median times of a step in ns, whole and split, without the first of each."""
    opened, plan = _step(backend.info, tokens)
    taken: tuple[list[int], list[int]] = ([], [])
    for _ in range(1 + REPEATS):
        for in_two in (False, True):
            for each in opened:
                backend.open_slot(each)
            began_ns = now_ns()
            backend.sample(backend.forward(replace(plan, two_stream=in_two)))
            taken[in_two].append(now_ns() - began_ns)
    return statistics.median(taken[False][1:]), statistics.median(taken[True][1:])


def _step(info: BackendInfo, tokens: int) -> tuple[list[SlotOpen], StepPlan]:
    """A step of whole prompts that samples nothing, and its slots."""
    lengths = _prompts(info, tokens)
    counts = [blocks_for(length, info.block_tokens) for length in lengths]
    opened = [
        SlotOpen(
            slot=slot, generation=0, seq=slot, prompt_tokens=length,
            tokens=ints((slot + i * _STRIDE) % info.vocab for i in range(length)),
        )
        for slot, length in enumerate(lengths)
    ]  # fmt: skip
    return opened, trial_plan([0] * len(lengths), lengths, counts, sampled=False)
