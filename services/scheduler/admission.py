"""Admission: the first that waits starts as soon as an executor has what it needs.

Units are taken in the order of the queue. One that must wait keeps an executor for itself, on which nobody
behind it starts, so that a large one is never overtaken for ever; on the others those behind it do. Tenants
of which nothing runs go before it, but not for ever either (`_next`). Of a request with several choices those
start for which there is room, the others wait on. Where the first must wait, sequences of lower classes may
have to give way, and those of a tenant that has more than its share.

A request under which executors have died is a suspect: it may be what they die of. From the second death on
it is on trial, until it has come well past the token where the last one died. An executor tries one at a
time, beside few that have not shown yet that they do no harm; should it die, the one on trial is to blame,
and the others are not (recovery.py). So a poison ends after three deaths, and nobody else with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
from services.scheduler.state.policies import Option
from services.scheduler.state.requests import Phase, Request, Sequence
from services.scheduler.state.state import Executor, State
from services.scheduler.state.waiting_queue import Unit
from shared.errors import Unavailable
from shared.messages import SlotOpen

OVERTAKEN, OVERTAKEN_US = 8, 5_000_000  # so often, and for so long: then it is nobody's turn before
SUSPECT = 2  # deaths
NEIGHBOURS = 4  # beside the one on trial, that have not come PAST yet
PAST = 8  # tokens of each choice since its place, or since the death: some were on their way when it came


@dataclass(slots=True)  # not frozen: to set its fields would cost three times as much
class Offer:
    """An executor that can start a unit now, or some of its choices: the cached blocks of its prompt, the one
    with its tail if it was paused, and what it promises to each that starts."""

    executor: Executor
    hits: list[int]
    tail: int | None
    promises: list[int]
    option: Option


@dataclass(slots=True)
class Kept:
    """What those that must wait have to themselves: executors, by source; `asks`: one of them will start as
    soon as a tier answers."""

    executors: set[str] = field(default_factory=set)
    asks: bool = False


def admit(state: State) -> None:
    """Start what can start, in order."""
    waiting = state.waiting
    if not waiting.lines:
        return
    waiting.age(state.now_us)
    for model in sorted({e.hello.model for e in state.executors.values()}):
        while (unit := _next(state, model)) is not None:
            if state.stuck and state.stuck == _seen(state, unit):
                break
            if not _admit(state, unit, kept := Kept()):
                _admit_others(state, unit, kept)
                break


def _next(state: State, model: str) -> Unit | None:
    """The first of a tenant of which nothing runs, or else of all; but the first of all where others have
    gone before it for long on the executor that it keeps: tenants that ask for one thing at a time would
    leave a large one no room for ever. That is no right of a tenant that has more than its share already."""
    head = state.waiting.first(model)
    if (
        head is not None
        and head.overtaken >= OVERTAKEN
        and state.now_us - head.kept_us >= OVERTAKEN_US
        and not any(
            head.client[0] in preemption.over_share(e, len(e.tenants))
            for e in state.executors.values()
            if e.hello.model == model
        )
    ):
        return head
    return state.waiting.first(model, _running(state, model))


def _running(state: State, model: str) -> set[str]:
    """The tenants of whom something runs."""
    here = [e.tenants for e in state.executors.values() if e.hello.model == model]
    return set().union(*here)


def _admit(state: State, unit: Unit, kept: Kept) -> bool:
    """Start a unit, or some of its choices, on an executor that nobody before it keeps, or set it aside.
    False when it must wait, and keeps one, too."""
    first, executors = not kept.executors, list(state.executors.values())
    free = [e for e in executors if e.source not in kept.executors]
    offers = [offer for e in free if (offer := _offer(state, e, unit)) is not None]
    if offers:
        offer = _place(state, offers)
        if not lookups.pending(state, unit):
            _start(state, offer, unit)
            return True
        kept.asks = True
        kept.executors.add(offer.option.source)
        return False
    if why := model_kinds.stranded(state, unit.request):
        finish.fail(state, unit.request, Unavailable.code, why, RETRY_AFTER_MS)
        return True
    able = [e for e in executors if model_kinds.serves(e, unit.request) and headroom.holds(e, unit)]
    if not able:
        state.waiting.park(unit)  # it was accepted for a larger executor, now gone or about to go
        return True
    if first and preemption.give_way(state, unit, [e for e in executors if _may_join(state, e, unit)]):
        return True
    if first:
        lookups.refresh(state, unit)
    _keep(state, unit, [e for e in able if e in free], kept)
    return False


def _keep(state: State, unit: Unit, able: list[Executor], kept: Kept) -> None:
    """Keep the executor on which a unit will start: once chosen it stays, or others would take all room
    that comes, here and there in turn."""
    sources = [e.source for e in able]
    if unit.keeps not in sources and able:
        unit.keeps = min(
            able, key=lambda e: (_lacks(state, e, unit) if len(able) > 1 else 0, e.source)
        ).source
        unit.kept_us, unit.overtaken = state.now_us, 0
    if unit.keeps in sources:
        kept.executors.add(unit.keeps)


def _lacks(state: State, executor: Executor, unit: Unit) -> int:
    return sum(max(lack, 0) for lack in headroom.lacking(state, executor, unit))


def _admit_others(state: State, first: Unit, kept: Kept) -> None:
    """Those behind the first, which waits, start where it will not. What must change before any of them may
    is noted, unless a tier is about to answer."""
    model = first.request.asked.model
    free = [e for e in state.executors.values() if e.hello.model == model and e.pool.free_slots]
    there = [e for e in free if e.source not in kept.executors]

    def fits(unit: Unit) -> bool:
        one = unit if len(unit.sequences) == 1 else Unit(unit.request, unit.sequences[:1], unit.number)
        return any(model_kinds.serves(e, unit.request) and headroom.holds(e, one) for e in there)

    for unit in state.waiting.behind(model, first, fits) if there else ():
        if unit.line is not None:
            _admit(state, unit, kept)
        if all(e.source in kept.executors for e in there):
            break
    if not kept.asks:
        state.stuck = _seen(state, first)


def _seen(state: State, unit: Unit) -> tuple[int, ...]:
    """What must change before a unit that had to wait may start, or, on another executor, one behind it."""
    seen = [unit.number, unit.level, state.next_seq if len(state.executors) > 1 else 0]
    for e in state.executors.values():
        seen += e.step, e.pool.free_blocks, e.pool.reserved, e.pool.free_slots, e.draining
    return tuple(seen)


def _offer(state: State, executor: Executor, unit: Unit) -> Offer | None:
    hello, pool, head = executor.hello, executor.pool, unit.sequences[0]
    if executor.holds or not pool.free_slots:  # held: the places that come are for who runs
        return None
    if head.max_length > hello.max_context or not _may_join(state, executor, unit):
        return None
    hits = prefix_cache.lookup(executor, head)
    tail = prefix_cache.tail_block(executor, head, len(hits))
    present = hits if tail is None else [*hits, tail]
    promises = headroom.promises(state, executor, unit)[: pool.free_slots]
    promises[0] = max(promises[0] - len(present), 0)
    room = pool.unreserved_blocks - pool.free_taken_by(present)
    if room < sum(promises) + most_spare_blocks(state, executor, head):
        spare = spare_blocks(state, executor, unit.sequences[: len(promises)])
        while promises and room < sum(promises) + spare:
            promises.pop()
        if not promises:
            return None
    coming = pool.unreserved_blocks + pool.coming_blocks
    option = Option(executor.source, len(hits) * hello.block_tokens, coming, len(executor.running))
    return Offer(executor, hits, tail, promises, option)


def _may_join(state: State, executor: Executor, unit: Unit) -> bool:
    """True where nothing but room for it is wanted."""
    return model_kinds.serves(executor, unit.request) and _safe(executor, unit) and _joins(state, executor)


def _joins(state: State, executor: Executor) -> bool:
    return not (state.limits.policy.closed and any(s.computed for s in executor.running))


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
    chosen = state.limits.policy.the("routing")([offer.option for offer in offers])
    return next(offer for offer in offers if offer.option == chosen)


def _start(state: State, offer: Offer, unit: Unit) -> None:
    executor, leader, request, level = offer.executor, unit.sequences[0], unit.request, unit.level
    head = state.waiting.first(executor.hello.model)
    if head is not None and head is not unit and head.keeps == offer.option.source:
        head.overtaken += 1
    if (begins := len(offer.promises)) < len(unit.sequences):
        unit = state.waiting.split(unit, begins)
    else:
        state.waiting.remove(unit)
    if request.model_digest != executor.hello.model_digest:
        request.model_digest = executor.hello.model_digest
        arrival.leave_asked(state, request)
    for sequence, blocks in zip(unit.sequences, offer.promises, strict=True):
        executor.pool.reserve(blocks)
        executor.generation += 1
        sequence.phase, sequence.reserved, sequence.level = Phase.RUNNING, blocks, level
        sequence.executor, sequence.slot = executor.hello.executor, executor.pool.take_slot()
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
    pool = offer.executor.pool
    if not sequence.admitted_us:
        sequence.admitted_us = state.now_us
        state.meter.queue_us.add(state.now_us - sequence.request.arrival_us)
    sequence.decide(
        state.now_us,
        "resume" if unit.resumes else "admit",
        f"{state.limits.policy.routing}: {offer.option.source}, {offer.option.room_blocks} blocks free",
        blocks=sequence.reserved,
        hit_tokens=sequence.computed,
        recompute_tokens=max(0, sequence.reach - sequence.computed),
        free=pool.free_blocks,
        reserved=pool.reserved,
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
