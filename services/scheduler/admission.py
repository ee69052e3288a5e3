"""Admission by reservation: a sequence runs once every block it may ever need is promised.

No preemption is needed then. Waiting units are taken strictly in order, so that a large one is
never overtaken for ever; where one runs is a pure choice among the executors that fit it.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.records import Phase, Sequence
from services.scheduler.state import Executor, State, Unit
from shared.blocks import blocks_for
from shared.messages import SlotOpen


def admit(state: State) -> None:
    """Start every waiting unit that fits, in order, up to the first of its model that must wait. One
    that was accepted for a larger executor, now gone, holds up nobody."""
    if not state.waiting:
        return
    executors = state.executors.values()
    admitting = {e.hello.model for e in executors}
    left: list[Unit] = []
    for at, unit in enumerate(state.waiting):
        if not admitting:
            left += state.waiting[at:]
            break
        model = unit.sequences[0].request.asked.model
        executor = place(executors, unit, model) if model in admitting else None
        if executor is not None:
            _start(state, executor, unit)
            continue
        left.append(unit)
        if any(e.hello.model == model and _holds(e, unit) for e in executors):
            admitting.discard(model)
    state.waiting = left


def place(executors: Iterable[Executor], unit: Unit, model: str) -> Executor | None:
    """The executor with the most room among those that can take the unit now."""
    slots = len(unit.sequences)
    fitting = [
        e
        for e in executors
        if e.hello.model == model
        and not e.draining
        and e.ledger.can_admit(sum(needs(unit, e.hello.block_tokens)), slots)
        and unit.sequences[0].max_length <= e.hello.max_context
    ]
    return max(fitting, key=lambda e: (e.ledger.free_blocks - e.ledger.reserved, e.source), default=None)


def _holds(executor: Executor, unit: Unit) -> bool:
    """True when the executor can run the unit once it has room."""
    hello, head = executor.hello, unit.sequences[0]
    blocks, slots = sum(needs(unit, hello.block_tokens)), len(unit.sequences)
    return blocks <= hello.blocks and slots <= hello.slots and head.max_length <= hello.max_context


def needs(unit: Unit, block_tokens: int) -> list[int]:
    """Blocks that each sequence of the unit may come to own; followers share full prompt blocks."""
    head = unit.sequences[0]
    shared = len(head.tokens) // block_tokens
    total = [blocks_for(s.max_length, block_tokens) for s in unit.sequences]
    return [total[0]] + [blocks - shared for blocks in total[1:]]


def _start(state: State, executor: Executor, unit: Unit) -> None:
    leader = unit.sequences[0]
    for sequence, blocks in zip(unit.sequences, needs(unit, executor.hello.block_tokens), strict=True):
        executor.ledger.reserve(blocks)
        executor.generation += 1
        sequence.phase, sequence.reserved = Phase.RUNNING, blocks
        sequence.executor, sequence.slot = executor.hello.executor, executor.ledger.take_slot()
        sequence.last_executor = sequence.executor
        sequence.generation = executor.generation
        sequence.leader = None if sequence is leader else leader
        sequence.opened_after = executor.step
        sequence.opened_length = sequence.planned_length = len(sequence.tokens)
        sequence.admitted_us = sequence.admitted_us or state.now_us
        sequence.decide(
            state.now_us,
            "admit",
            f"{executor.source} has the most room",
            blocks=blocks,
            free=executor.ledger.free_blocks,
            reserved=executor.ledger.reserved,
        )
        executor.running.append(sequence)
        state.send(executor.source, _slot_open(sequence), sequence.request.trace)


def _slot_open(sequence: Sequence) -> SlotOpen:
    asked = sequence.request.asked
    return SlotOpen(
        slot=sequence.slot,
        generation=sequence.generation,
        seq=sequence.seq,
        prompt_tokens=sequence.prompt_tokens,
        max_length=sequence.max_length,
        seed=sequence.seed,
        sampling=asked.sampling,
        stop_ids=asked.stop_ids,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        grammar=asked.grammar,
        tokens=sequence.tokens[:],
    )
