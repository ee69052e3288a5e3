"""Starts waiting sequence groups on executors that have room for them. `core.decide` calls `admit`.

Groups are taken in queue order. A group that must wait holds an executor: no later group starts there, so a
large group is never overtaken for ever. Later groups start on the other executors. Tenants without a running
sequence go first, within limits (`_next`). A request with several choices starts as many as there is room
for. If the first group must wait, preemption.py may preempt sequences for it, and then for those after it: so
requests that arrive together start together.

A request that ran on executors when they died is a suspect: it may be the cause. After the second death it is
on trial until it has generated more than PROVEN_TOKENS past the last death. An executor tries one request at
a time, with at most MAX_UNPROVEN other sequences that are not proven harmless. If the executor dies, the
request on trial is to blame and the others are not (core.py). So a poisonous request fails after
MOST_DEATHS, and no other request fails with it. An executor on a busy machine may be silent for so long that
it counts as dead: if it comes back, its requests are acquitted. A single silence during a trial does not fail
the request.

Predicts what it costs to start a group on an executor: the input of the routing policies.

    ttft_us   the rest of the steps in flight
              + the steps that compute its prompt and those already there, beside the decodes; part of its
              prompt comes from the prefix cache, or from a tier if that is faster
              + one loop between scheduler and executor
    harm_us   the time that its prompt adds to the steps of the rows that decode there, summed over the rows
    tbt_pm    how much of the time between tokens that these rows should keep their steps take, per mille

Every term is learned from the executor's own steps and copies, so executors may differ in speed.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from services.scheduler import headroom, lifecycle, load_shedding, overlap, preemption, prefix_cache
from services.scheduler.kv_tiers import load, lookups, store
from services.scheduler.load_shedding import RETRY_AFTER_MS
from services.scheduler.preemption import RecomputeCost
from services.scheduler.state.policies import RoutingOption
from services.scheduler.state.requests import CLASS_NAMES, Phase, Request, Sequence
from services.scheduler.state.state import DECODE, PREFILL, Executor, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.errors import Unavailable
from shared.messages import SlotOpen
from shared.step_model import NO_ROWS, StepShape

OVERTAKEN, OVERTAKEN_US = 8, 5_000_000  # times, and time: after both no other group goes first
MAX_TOGETHER = 32  # groups after the first that are given room: each arrival looks at all of them
MAX_VICTIMS = 8  # for them in one event: each takes half a millisecond at 256 rows, and the next plan waits
TRIAL_DEATHS, MOST_DEATHS = 2, 4  # under which a request is tried apart, and ends
MAX_UNPROVEN = 4  # sequences on an executor with a trial that have at most PROVEN_TOKENS
PROVEN_TOKENS = 8  # per choice since admission, or since the death: results of some were in flight then


@dataclass(slots=True)  # not frozen: setting the fields would take three times as long
class Offer:
    """An executor that can start a group, or some of its choices, now."""

    executor: Executor
    hits: list[int]  # cached blocks of the prompt
    tail: int | None  # the cached partial block after them, of a preempted sequence
    reservations: list[int]  # blocks for each choice that starts
    room_blocks: int  # free and unreserved, now or soon
    awaited_blocks: int = 0  # so many must be free first: ended sequences keep some of them


@dataclass(slots=True)
class HeldExecutors:
    """Executors that waiting groups hold."""

    sources: set[str] = field(default_factory=set)
    awaits_lookup: bool = False  # one of the groups starts as soon as a tier answers


def admit(state: State) -> None:
    """Start the groups that can start, in queue order."""
    waiting = state.waiting
    if not waiting.groups:
        return
    waiting.promote_aged(state.now_us)
    for model in sorted(state.by_model):
        while (group := _next(state, model)) is not None:
            if state.blocked_on and state.blocked_on == _blocking_state(state, group):
                break
            if not _admit(state, group, held := HeldExecutors()) and not _preempt_for_others(state, group):
                _admit_others(state, group, held)
                break


def _next(state: State, model: str) -> SequenceGroup | None:
    """The first group of a tenant without a running sequence; else the first of all.

    The first of all also goes next after OVERTAKEN groups in OVERTAKEN_US have started on the executor that
    it holds, unless its tenant is over its share: else tenants that send one request at a time would starve
    a large group.
    """
    head = state.waiting.first(model)
    if (
        head is not None
        and head.overtaken >= OVERTAKEN
        and state.now_us - head.held_since_us >= OVERTAKEN_US
        and not any(
            head.client[0] in preemption.over_share(e, len(e.running_by_tenant))
            for e in state.by_model[model].executors
        )
    ):
        return head
    return state.waiting.first(model, _running(state, model))


def _running(state: State, model: str) -> Container[str]:
    """The tenants with a running sequence."""
    return state.by_model[model].running_by_tenant


def _admit(state: State, group: SequenceGroup, held: HeldExecutors) -> bool:
    """Start a group, or some of its choices, on an executor that no earlier group holds. Fail or park it if
    no executor can serve it. False if it must wait; it then holds an executor."""
    if group.request.tokenized.adapter and load_shedding.adapting().must_wait(state, group):
        state.waiting.park(group)  # its adapter is being loaded, or waits for a place
        return True
    first, executors = not held.sources, list(state.executors.values())
    free = [e for e in executors if e.pool.free_slots and e.source not in held.sources]
    offers = [offer for e in free if (offer := _offer(state, e, group)) is not None]
    if not all(offer.awaited_blocks for offer in offers):
        offer = _route(state, offers, group)
        if not lookups.must_wait(state, group):
            _start(state, _with_room(state, offer, offers, group), group)
            return True
        held.awaits_lookup = True
        held.sources.add(offer.executor.source)
        return False
    if why := load_shedding.stranded(state, group.request):
        lifecycle.fail(state, group.request, Unavailable.code, why, RETRY_AFTER_MS)
        return True

    fitting = [
        e
        for e in executors
        if load_shedding.may_run(e, group.request)
        and headroom.can_fit(e, group)
        and has_adapter(state, e, group.request)
    ]
    able = [e for e in fitting if not e.role or is_suitable(state, e, group)]
    if not able:
        state.waiting.park(group)  # accepted for a larger executor that is gone or drains
        return True
    if first and preemption.preempt_for(state, group, (e for e in executors if may_join(state, e, group))):
        return True
    if first:
        lookups.refresh(state, group)
    able = [e for e in able if e.source not in held.sources]
    kept = [e for e in able if e.source == group.held_executor]
    _hold_executor(state, group, kept or able, held)
    return False


def _hold_executor(state: State, group: SequenceGroup, able: list[Executor], held: HeldExecutors) -> None:
    """Hold the executor on which a group will start. The choice stays: else later groups would take the room
    that becomes free on each executor in turn."""
    sources = [e.source for e in able]
    if group.held_executor not in sources and able:
        group.held_executor = able[0].source if len(able) == 1 else _least_short(state, able, group)
        group.held_since_us, group.overtaken = state.now_us, 0
    if group.held_executor in sources:
        held.sources.add(group.held_executor)


def _least_short(state: State, able: list[Executor], group: SequenceGroup) -> str:
    """The executor that lacks least for the group. Looks at blocks only where few enough slots are short."""
    least, count = (1 << 62, ""), len(group.sequences)
    # each row has a slot: the others are free, or will be after the steps in flight
    slots = sorted([(max(count + len(e.running) - e.pool.slots, 0), e.source, e) for e in able])
    for short, source, executor in slots:
        if (short, source) > least:
            break
        least = min(least, (_shortfall(state, executor, group), source))
    return least[1]


def _shortfall(state: State, executor: Executor, group: SequenceGroup) -> int:
    return sum(max(lack, 0) for lack in headroom.shortfall(state, executor, group))


def _admit_others(state: State, first: SequenceGroup, held: HeldExecutors) -> None:
    """Start groups after the first, which waits, on executors that it does not hold. Then remember what must
    change before another attempt, unless a tier is about to answer."""
    model = first.request.tokenized.model
    free = [e for e in state.by_model[model].executors if e.pool.free_slots]
    there = [e for e in free if e.source not in held.sources]

    def can_run(group: SequenceGroup) -> bool:
        one = group.first_choice()
        return any(load_shedding.may_run(e, group.request) and headroom.can_fit(e, one) for e in there)

    for group in state.waiting.candidates_after(model, first, can_run) if there else ():
        if group.queue is not None:
            _admit(state, group, held)
        if all(e.source in held.sources for e in there):
            break
    if not held.awaits_lookup:
        state.blocked_on = _blocking_state(state, first)


def _preempt_for_others(state: State, first: SequenceGroup) -> bool:
    """Preempt for groups after the first, if there is room for the first or about to be: so requests that
    arrive together start together. A group without room keeps later ones off the executors where it may
    start. True if room is there at once."""
    lowest, count = _others_above(state, first)
    if not count or is_on_trial(first.request):
        return False
    free = [e for e in state.executors.values() if may_join(state, e, first) and not request_on_trial(e)]
    free.sort(key=lambda e: e.source != first.held_executor)
    own = next((e for e in free if max(headroom.shortfall(state, e, first)) <= 0), None)
    if own is None:
        return False
    model = first.request.tokenized.model
    running, last = _running(state, model), len(CLASS_NAMES) - 1

    def may_preempt(group: SequenceGroup) -> bool:
        """It may preempt, or goes before those that may: see `_next`."""
        return group.level < lowest or (group.level < last and group.client[0] not in running)

    others = state.waiting.candidates_after(model, first, may_preempt)[:MAX_TOGETHER]
    others.sort(key=lambda group: group.client[0] in running)
    preempted, earlier = state.counters.preemptions, {own.source: [first]}
    for group in others:
        if state.counters.preemptions - preempted >= MAX_VICTIMS:
            break  # the next event goes on
        able = [e for e in free if load_shedding.may_run(e, group.request) and headroom.can_fit(e, group)]
        able = [e for e in able if has_adapter(state, e, group.request)]
        if is_on_trial(group.request) or not preemption.preempt_for_next(state, group, earlier, able):
            free = [e for e in free if e not in able]
    return state.counters.preemptions > preempted and not all(e.in_flight for e in free)


def _others_above(state: State, first: SequenceGroup) -> tuple[int, int]:
    """The lowest class that runs, and how many groups other than the first wait in classes above it."""
    model, lowest, count = first.request.tokenized.model, 0, 0
    while any(state.by_model[model].running_by_class[lowest + 1 :]):
        lowest += 1
    for level in range(lowest):
        if (queue := state.waiting.queues.get((model, level))) is not None:
            count += queue.groups
    return lowest, count - (first.level < lowest)


def _blocking_state(state: State, group: SequenceGroup) -> tuple[int, ...]:
    """A waiting group, or one after it, can start only after one of these numbers has changed."""
    executors = state.executors.values()
    seen = [group.number, group.level, *(others := _others_above(state, group))]
    full = not any(e.pool.free_slots for e in executors)
    if full and not (others[1] or state.tiers.by_host or any(preemption.victims_by(state, group))):
        # Only a free slot helps, not another step of any executor, and no request that arrives.
        return *seen, *[e.draining for e in executors]
    seen.append(state.next_seq if len(executors) > 1 else 0)
    for e in executors:
        seen += e.step, e.draining, *e.pool.room
    return tuple(seen)


def _offer(state: State, executor: Executor, group: SequenceGroup) -> Offer | None:
    hello, pool, head = executor.hello, executor.pool, group.sequences[0]
    if executor.awaits_copies or not pool.free_slots:  # the next free blocks are for running sequences
        return None
    if head.max_length > hello.max_context or not may_join(state, executor, group):
        return None
    hits = prefix_cache.lookup(executor, head)
    tail = prefix_cache.tail_block(executor, head, len(hits))
    present = hits if tail is None else [*hits, tail]
    reservations = headroom.reservations(state, executor, group)[: len(pool.free_slots)]
    reservations[0] = max(reservations[0] - len(present), 0)
    room, awaited = pool.unreserved_blocks - pool.free_taken_by(present), 0
    if room < sum(reservations) + headroom.headroom_bound(state, executor, head):
        spare = headroom.headroom_blocks(state, executor, group.sequences[: len(reservations)])
        wanted = sum(reservations) + spare
        while reservations and room < sum(reservations) + spare:
            reservations.pop()
        if not reservations:
            if not pool.write_back:
                return None
            awaited = wanted + sum(not pool.refs[block] for block in present)
            if pool.unreserved_blocks + pool.coming_blocks < awaited:
                return None
    return Offer(executor, hits, tail, reservations, pool.unreserved_blocks + pool.coming_blocks, awaited)


def can_start(state: State, executor: Executor, group: SequenceGroup) -> bool:
    """Whether the executor has room for a group, or for some of its choices, now."""
    offer = _offer(state, executor, group)
    return offer is not None and not offer.awaited_blocks


def may_join(state: State, executor: Executor, group: SequenceGroup) -> bool:
    """True if the group lacks nothing but room here."""
    if not load_shedding.may_run(executor, group.request) or (
        state.suspects and not _is_safe(executor, group)
    ):
        return False
    if executor.role and not is_suitable(state, executor, group):
        return False
    if not has_adapter(state, executor, group.request):
        return False
    return not (state.limits.policy.closed and any(s.computed for s in executor.running))


def has_adapter(state: State, executor: Executor, request: Request) -> bool:
    """Whether a request finds its adapter on an executor, if it has one."""
    return not request.tokenized.adapter or load_shedding.adapting().is_placed(state, executor, request)


def is_suitable(state: State, executor: Executor, group: SequenceGroup) -> bool:
    """Whether the group is work for an executor of this role, or has no executor of the other one."""
    head = group.sequences[0]
    if head.generated:
        other = DECODE
    else:
        other, size = PREFILL, executor.hello.block_tokens
        fits = len(head.tokens) <= executor.prompts.limit + len(prefix_cache.lookup(executor, head)) * size
        if executor.role == DECODE and fits:
            return True
    others = (e for e in state.executors.values() if e.role == other and e is not executor)
    return executor.role == other or not any(
        load_shedding.may_run(e, group.request) and headroom.can_fit(e, group) for e in others
    )


def is_on_trial(request: Request) -> bool:
    """Whether the request may be what kills executors. One that passed a trial and ran at the next death
    stays on trial to its end."""
    if request.executor_deaths < TRIAL_DEATHS:
        return False
    generated = sum(s.generated for s in request.sequences)
    return (
        request.executor_deaths > TRIAL_DEATHS
        or generated <= request.tokens_at_death + PROVEN_TOKENS * len(request.sequences)
    )


def request_on_trial(executor: Executor) -> Request | None:
    """The request that is on trial on this executor."""
    there = (s.request for s in executor.running if s.request.executor_deaths >= TRIAL_DEATHS)
    return next((request for request in there if is_on_trial(request)), None)


def _is_safe(executor: Executor, group: SequenceGroup) -> bool:
    """True if the group disturbs no trial: neither its own nor the one on this executor."""
    there, trial = request_on_trial(executor), is_on_trial(group.request)
    if there is group.request or (there is None and not trial):
        return True
    if there is not None and trial:
        return False
    request = there or group.request
    unproven = [
        s
        for s in executor.running
        if s.request is not request and len(s.tokens) <= s.opened_length + PROVEN_TOKENS
    ]
    joining = 0 if trial else len(group.sequences)
    return len(unproven) + joining <= MAX_UNPROVEN


def _route(state: State, offers: list[Offer], group: SequenceGroup) -> Offer:
    if len(offers) == 1:
        return offers[0]
    options, forecasts = [], state.limits.policy.forecasts
    for offer in offers:
        executor, held_blocks, costs = offer.executor, len(offer.hits), (0, 0, 0)
        if forecasts:
            below = load.predicted(state, executor, group, held_blocks)
            costs = forecast(state, executor, group, held_blocks, below)
        held = held_blocks * executor.hello.block_tokens
        empty = executor.pool.free_blocks - executor.pool.cached_blocks
        running = len(executor.running)
        options.append(RoutingOption(executor.source, held, offer.room_blocks, running, empty, *costs))
    return offers[options.index(state.limits.policy.function("routing")(options))]


def _with_room(state: State, offer: Offer, offers: list[Offer], group: SequenceGroup) -> Offer:
    """The offer, once the executor has dropped the blocks of ended sequences that it keeps until they are
    needed. If it copies them first, the best offer with room: a later group finds room there.

    Without this, an executor whose cache is full would get nothing while any other one has room.
    """
    if not offer.awaited_blocks:
        return offer
    offer.executor.awaited_blocks = max(offer.executor.awaited_blocks, offer.awaited_blocks)
    store.copy_dirty(state, offer.executor)
    again = _offer(state, offer.executor, group)
    if again is not None and not again.awaited_blocks:
        return again
    return _route(state, [other for other in offers if not other.awaited_blocks], group)


def _start(state: State, offer: Offer, group: SequenceGroup) -> None:
    executor, parent, request, level = offer.executor, group.sequences[0], group.request, group.level
    head = state.waiting.first(executor.hello.model)
    if head is not None and head is not group and head.held_executor == executor.source:
        head.overtaken += 1
    if (begins := len(offer.reservations)) < len(group.sequences):
        group = state.waiting.split(group, begins)
    else:
        state.waiting.remove(group)
    if request.model_digest != executor.hello.model_digest:
        request.model_digest = executor.hello.model_digest
        lifecycle.send_to_shard(state, request)
    compiles = executor.note_grammar(request.tokenized.grammar)
    for sequence, blocks in zip(group.sequences, offer.reservations, strict=True):
        executor.pool.reserve(blocks)
        executor.generation += 1
        sequence.phase, sequence.reserved, sequence.level = Phase.RUNNING, blocks, level
        sequence.executor, sequence.slot = executor.hello.executor, executor.pool.take_slot()
        sequence.last_executor = sequence.executor
        sequence.generation = executor.generation
        sequence.parent = None if sequence is parent else parent
        sequence.opened_after = executor.step
        sequence.opened_length = len(sequence.tokens)
        sequence.compiles_grammar = compiles
        executor.add(sequence)
        if sequence is parent:
            _take_hits(state, offer, group)
        _record(state, offer, group, sequence)
        place = load_shedding.adapting().place(state, executor, request) if request.tokenized.adapter else 0
        state.send(executor.source, _slot_open(sequence, place), sequence.request.trace)
    executor.awaited_blocks = 0
    load.begin(state, executor, parent, group)
    preemption.on_resume(state, executor, parent, group)


def _take_hits(state: State, offer: Offer, group: SequenceGroup) -> None:
    parent = group.sequences[0]
    fresh = parent.admitted_us == 0
    prefix_cache.extend_keys(offer.executor, parent)
    found = prefix_cache.adopt(offer.executor, parent, offer.hits)
    if offer.tail is not None:
        prefix_cache.claim_tail(offer.executor, parent, offer.tail)
    if fresh:
        state.counters.prefix_lookup_tokens += len(parent.tokens)
        state.counters.prefix_hit_tokens += found
        state.reuse.add(parent.tenant, _known_tokens(offer, group), len(parent.tokens))
        state.sessions.on_admitted(state, offer.executor, parent)


def _known_tokens(offer: Offer, group: SequenceGroup) -> int:
    """How many tokens of a new prompt were computed before: held here or below, or lost without a copy."""
    parent, held, block_tokens = group.sequences[0], len(offer.hits), offer.executor.hello.block_tokens
    full = (len(parent.tokens) - 1) // block_tokens
    results = group.lookup_results.values()
    known = held + max((lookups.known_after(result, held, full) for result in results), default=0)
    known += prefix_cache.lost_after(offer.executor, parent, known)
    return len(parent.tokens) if known >= full > 0 else known * block_tokens


def _record(state: State, offer: Offer, group: SequenceGroup, sequence: Sequence) -> None:
    pool = offer.executor.pool
    if not sequence.admitted_us:
        sequence.admitted_us = state.now_us
        state.counters.queue_us.add(state.now_us - sequence.request.arrival_us)
    sequence.record_decision(
        state.now_us,
        "resume" if group.resumes else "admit",
        f"{state.limits.policy.routing}: {offer.executor.source}, {offer.room_blocks} blocks free",
        blocks=sequence.reserved,
        hit_tokens=sequence.computed,
        recompute_tokens=max(0, sequence.most_computed - sequence.computed),
        free=pool.free_blocks,
        reserved=pool.reserved,
    )


def _slot_open(sequence: Sequence, place: int) -> SlotOpen:
    tokenized = sequence.request.tokenized
    return SlotOpen(
        slot=sequence.slot,
        generation=sequence.generation,
        seq=sequence.seq,
        prompt_tokens=sequence.prompt_tokens,
        computed=sequence.computed,
        max_length=sequence.max_length,
        seed=sequence.seed,
        sampling=tokenized.sampling,
        stop_ids=tokenized.stop_ids,
        logprobs=tokenized.logprobs,
        prompt_logprobs=tokenized.prompt_logprobs,
        prompt_alternatives=tokenized.prompt_alternatives,
        grammar=tokenized.grammar,
        tokens=sequence.tokens[:],
        processors=tokenized.processors,
        tenant=tokenized.tenant,
        min_tokens=tokenized.min_tokens,
        pooling=tokenized.pooling,
        prediction=tokenized.prediction,
        adapter=place,
    )


def forecast(
    state: State, executor: Executor, group: SequenceGroup, held_blocks: int, load: tuple[int, int]
) -> tuple[int, int, int]:
    """`ttft_us`, `harm_us` and `tbt_pm` of a group of whose prompt the executor holds so many blocks; zeros
    while its cost model has seen too little. `load`: how many more blocks a tier holds, and the time to load
    them."""
    costs = RecomputeCost.of(executor)
    if not costs.is_known:
        return 0, 0, 0
    step_tokens = min(executor.hello.max_step_tokens, state.limits.step_tokens)
    length, held = len(group.sequences[0].tokens), held_blocks * executor.hello.block_tokens
    before = _before(executor)
    _, before_us = costs.steps_us(before, step_tokens)
    us, added_us = costs.steps_us(before.with_chunk(held, max(length - held, 1)), step_tokens)
    in_flight_us = overlap.in_flight_us(state, executor)
    ready_us = in_flight_us + us
    blocks, load_us = load
    if blocks:
        loaded = held + blocks * executor.hello.block_tokens
        rest = NO_ROWS.with_chunk(loaded, max(length - loaded, 1))
        us, rest_added_us = costs.steps_us(before.with_chunk(loaded, rest.tokens), step_tokens)
        later_us = max(in_flight_us + us, load_us + costs.steps_us(rest, step_tokens)[0])
        if later_us < ready_us:
            ready_us, added_us = later_us, rest_added_us
    harm_us = max(added_us - before_us, 0) * costs.base.rows
    tbt_us, _ = state.limits.strictest(executor.running_by_class)
    return ready_us + executor.cost_model.loop_us, harm_us, costs.base_us * 1_000 // tbt_us


def _before(executor: Executor) -> StepShape:
    """The prompts that are already there, as if they had one length."""
    sums = executor.row_sums()
    tokens, prompts = sums.backlog_tokens, sums.backlog_prompts
    half = tokens // prompts // 2 if prompts else 0
    return StepShape(prompts, tokens, tokens, tokens * half)
