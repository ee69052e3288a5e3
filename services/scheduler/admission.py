"""Admission: the first that waits starts as soon as an executor has what it needs.

Units are taken strictly in the order of the queue, so that a large one is never overtaken for ever. Where
one must wait, sequences of lower classes may have to give way.

A request under which executors have died is a suspect: it may be what they die of. From the second death on
it is on trial, until it has come well past the token where the last one died. An executor tries one at a
time, beside few that have not shown yet that they do no harm; should it die, the one on trial is to blame,
and the others are not (recovery.py). So a poison ends after three deaths, and nobody else with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler import (
    arrival,
    finish,
    headroom,
    model_kinds,
    preemption,
    prefix_cache,
    recompute_cost,
)
from services.scheduler.headroom import most_spare_blocks, spare_blocks
from services.scheduler.kv_tiers import load, lookups
from services.scheduler.load_shedding import RETRY_AFTER_MS
from services.scheduler.state import policies
from services.scheduler.state.policies import Option
from services.scheduler.state.requests import Phase, Request, Sequence
from services.scheduler.state.state import Executor, State
from services.scheduler.state.waiting_queue import Unit
from shared.errors import Unavailable
from shared.messages import SlotOpen

SUSPECT = 2  # deaths
NEIGHBOURS = 4  # beside the one on trial, that have not come PAST yet
PAST = 8  # tokens of each choice since its place, or since the death: some were on their way when it came


@dataclass(slots=True)  # not frozen: to set its fields would cost three times as much
class Offer:
    """An executor that can start a unit now: the cached blocks of its prompt, the one with its tail if it was
    paused, and what it promises."""

    executor: Executor
    hits: list[int]
    tail: int | None
    promises: list[int]
    option: Option


def admit(state: State) -> None:
    """Start what can start, in order."""
    waiting = state.waiting
    if not waiting.lines:
        return
    waiting.age(state.now_us)
    for model in sorted({e.hello.model for e in state.executors.values()}):
        while (unit := waiting.first(model)) is not None and _admit(state, unit):
            pass


def _admit(state: State, unit: Unit) -> bool:
    """Start the first unit of the queue, or set it aside; False when it must wait."""
    executors = state.executors.values()
    if state.stuck and state.stuck == _seen(state, unit):
        return False
    offers = [offer for e in executors if (offer := _offer(state, e, unit)) is not None]
    if offers:
        if lookups.pending(state, unit):
            return False
        _start(state, _place(state, offers), unit)
        return True
    if why := model_kinds.stranded(state, unit.request):
        finish.fail(state, unit.request, Unavailable.code, why, RETRY_AFTER_MS)
        return True
    if not any(model_kinds.serves(e, unit.request) and headroom.holds(e, unit) for e in executors):
        state.waiting.park(unit)  # it was accepted for a larger executor, now gone or about to go
        return True
    if preemption.give_way(state, unit):
        return True
    lookups.refresh(state, unit)
    state.stuck = _seen(state, unit)
    return False


def _seen(state: State, unit: Unit) -> tuple[int, ...]:
    """What must change before a unit that had to wait may start."""
    seen = [unit.number]
    for e in state.executors.values():
        seen += e.step, e.ledger.free_blocks, e.ledger.reserved, e.ledger.free_slots, e.draining
    return tuple(seen)


def _offer(state: State, executor: Executor, unit: Unit) -> Offer | None:
    hello, ledger, head = executor.hello, executor.ledger, unit.sequences[0]
    if head.max_length > hello.max_context or not model_kinds.serves(executor, unit.request):
        return None
    if executor.holds:
        return None  # the places that come are for who runs
    if not _safe(executor, unit):
        return None
    if ledger.free_slots < len(unit.sequences) or not _joins(state, executor):
        return None
    hits = prefix_cache.lookup(executor, head)
    tail = prefix_cache.tail_block(executor, head, len(hits))
    present = hits if tail is None else [*hits, tail]
    promises = headroom.promises(state, executor, unit)
    promises[0] = max(promises[0] - len(present), 0)
    blocks, slots, taken = sum(promises), len(promises), ledger.free_taken_by(present)
    plenty = ledger.can_admit(blocks + most_spare_blocks(state, executor, head), slots, taken)
    if not plenty:
        spare = spare_blocks(state, executor, unit.sequences)
        if not ledger.can_admit(blocks + spare, slots, taken):
            return None
    room = ledger.free_blocks + ledger.coming_blocks - ledger.reserved
    option = Option(executor.source, len(hits) * hello.block_tokens, room, len(executor.running))
    return Offer(executor, hits, tail, promises, option)


def _joins(state: State, executor: Executor) -> bool:
    fill = state.limits.policy.fill
    return policies.joins(fill, True) or policies.joins(fill, any(s.computed for s in executor.running))


def on_trial(request: Request) -> bool:
    """Whether executors may die of it. Who has passed once, and was there at the next death, is tried to its
    end."""
    if request.deaths < SUSPECT:
        return False
    generated = sum(s.generated for s in request.sequences)
    return request.deaths > SUSPECT or generated <= request.died_at + PAST * len(request.sequences)


def tried(executor: Executor) -> Request | None:
    """The request that is on trial here."""
    suspects = (s.request for s in executor.running if s.request.deaths >= SUSPECT)
    return next((request for request in suspects if on_trial(request)), None)


def _safe(executor: Executor, unit: Unit) -> bool:
    """True where no trial is disturbed: neither that of the unit nor one that it would join."""
    there, trial = tried(executor), on_trial(unit.request)
    if there is unit.request or (there is None and not trial):
        return True
    if there is not None and trial:
        return False
    request = there or unit.request
    unproven = [
        s for s in executor.running if s.request is not request and len(s.tokens) <= s.opened_length + PAST
    ]
    joining = 0 if trial else len(unit.sequences)
    return len(unproven) + joining <= NEIGHBOURS


def _place(state: State, offers: list[Offer]) -> Offer:
    if len(offers) == 1:
        return offers[0]
    chosen = state.limits.policy.the("place")([offer.option for offer in offers])
    return next(offer for offer in offers if offer.option == chosen)


def _start(state: State, offer: Offer, unit: Unit) -> None:
    executor, leader, request = offer.executor, unit.sequences[0], unit.request
    state.waiting.remove(unit)
    if request.model_digest != executor.hello.model_digest:
        request.model_digest = executor.hello.model_digest
        arrival.leave_asked(state, request)
    for sequence, blocks in zip(unit.sequences, offer.promises, strict=True):
        executor.ledger.reserve(blocks)
        executor.generation += 1
        sequence.phase, sequence.reserved = Phase.RUNNING, blocks
        sequence.executor, sequence.slot = executor.hello.executor, executor.ledger.take_slot()
        sequence.last_executor = sequence.executor
        sequence.generation = executor.generation
        sequence.leader = None if sequence is leader else leader
        sequence.opened_after = executor.step
        sequence.opened_length = len(sequence.tokens)
        sequence.compiling = executor.hello.tells_grammars and bool(sequence.request.asked.grammar)
        if sequence is leader:
            _take_hits(state, offer, unit)
        executor.enter(sequence)
        _note(state, offer, unit, sequence)
        state.send(offer.option.source, _slot_open(sequence), sequence.request.trace)
    load.begin(state, executor, leader, unit)
    recompute_cost.returned(state, executor, leader, unit)


def _take_hits(state: State, offer: Offer, unit: Unit) -> None:
    leader = unit.sequences[0]
    fresh = leader.admitted_us == 0
    found = prefix_cache.adopt(offer.executor, leader, offer.hits)
    if offer.tail is not None:
        prefix_cache.claim_tail(offer.executor, leader, offer.tail)
    if fresh:
        state.meter.prefix_lookup_tokens += len(leader.tokens)
        state.meter.prefix_hit_tokens += found
        below = max((sum(t > 0 for t in answer.found) for answer in unit.answers.values()), default=0)
        known = max(len(offer.hits), below)
        known += prefix_cache.lost_after(offer.executor, leader, known)
        hit = min(known * offer.executor.hello.block_tokens, len(leader.tokens))
        state.reuse_pm = (15 * state.reuse_pm + 1000 * hit // len(leader.tokens)) // 16


def _note(state: State, offer: Offer, unit: Unit, sequence: Sequence) -> None:
    ledger = offer.executor.ledger
    if not sequence.admitted_us:
        sequence.admitted_us = state.now_us
        state.meter.queue_us.add(state.now_us - sequence.request.arrival_us)
    sequence.decide(
        state.now_us,
        "resume" if unit.resumes else "admit",
        f"{state.limits.policy.place}: {offer.option.source}, {offer.option.room_blocks} blocks free",
        blocks=sequence.reserved,
        hit_tokens=sequence.computed,
        recompute_tokens=max(0, sequence.reach - sequence.computed),
        free=ledger.free_blocks,
        reserved=ledger.reserved,
    )


def _slot_open(sequence: Sequence) -> SlotOpen:
    asked = sequence.request.asked
    return SlotOpen(
        slot=sequence.slot,
        generation=sequence.generation,
        seq=sequence.seq,
        prompt_tokens=sequence.prompt_tokens,
        computed=sequence.computed,
        max_length=sequence.max_length,
        seed=sequence.seed,
        sampling=asked.sampling,
        stop_ids=asked.stop_ids,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        grammar=asked.grammar,
        tokens=sequence.tokens[:],
        processors=asked.processors,
        tenant=asked.tenant,
    )
