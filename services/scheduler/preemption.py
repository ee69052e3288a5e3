"""Preemption pauses sequences when blocks are short, and drops none.

A paused sequence waits with all its tokens, and comes back by prefix lookup: what its blocks still hold, here
or in a tier below, is not computed again. `withdraw` is how any sequence leaves its executor, and
`wait_again` how it gets back into the queue.

Nobody is paused for one of a lower class. Whoever has just come back is spared, and so is who would free
nothing, where there is another. After three pauses a sequence is pinned: promised all it may ever need, so
that it is never short and nobody's victim. Every pause is noted with its reason and candidates: the blocks
that each would free, those that a tier below holds, and what bringing back or computing the rest would cost.
"""

from __future__ import annotations

from services.scheduler import headroom, model_kinds, prefix_cache
from services.scheduler.headroom import lacking
from services.scheduler.recompute_cost import Recompute
from services.scheduler.state.requests import PIN_AFTER, Phase, Sequence
from services.scheduler.state.state import Executor, State
from services.scheduler.state.waiting_queue import Unit
from shared.messages import SlotClose

NAMED = 8  # candidates that a decision names


def make_room(state: State, executor: Executor) -> int:
    """Pause until every row of the next step gets its block, now or when steps in flight and copies are back.
    How many rows need one, unless there is one for each row anyhow."""
    ledger = executor.ledger
    if ledger.free_blocks - ledger.reserved >= len(executor.running):
        return 0
    while needy := headroom.needy(executor):
        if len(needy) <= ledger.free_blocks - ledger.reserved + ledger.coming_blocks:
            break
        first = min(needy, key=lambda s: (s.request.level, s.request.arrival_us, s.seq))
        candidates = _candidates(state, executor, first.request.level)
        victim = state.limits.policy.the("victim")(candidates)[0]
        headroom.paused(executor)
        why = f"{len(needy)} rows need a block, the oldest is of seq {first.seq}"
        pause(state, executor, victim, why, candidates)
    return len(needy)


def give_way(state: State, unit: Unit) -> bool:
    """Pause sequences of lower classes, as many as the unit needs to start on their executor. True when some
    were: where no step is in flight their memory is free at once."""
    level = unit.request.level
    for executor in state.executors.values():
        if not any(executor.levels[level + 1 :]) or not model_kinds.serves(executor, unit.request):
            continue
        candidates = _candidates(state, executor, level + 1)
        blocks, slots = lacking(state, executor, unit)
        if max(blocks, slots) <= 0:
            return False  # enough is on its way
        if len(candidates) < slots or sum(len(s.table) + s.reserved for s in candidates) < blocks:
            continue
        why = f"seq {unit.number} of class {unit.request.asked.slo_class} needs its place"
        for victim in state.limits.policy.the("victim")(candidates):
            pause(state, executor, victim, why, candidates)
            if max(lacking(state, executor, unit)) <= 0:
                break
        return True
    return False


def pause(state: State, executor: Executor, victim: Sequence, why: str, candidates: list[Sequence]) -> None:
    """Take a sequence off its executor; it waits. Choices that wait for its prompt go with it."""
    followers = [s for s in executor.running if s.leader is victim]
    costs = Recompute.of(executor)
    named = ", ".join(_describe(executor, s, costs) for s in candidates[:NAMED])
    for sequence in (victim, *followers):
        sequence.pauses += 1
        sequence.pinned = sequence.pauses >= PIN_AFTER and not state.limits.policy.greedy
        state.meter.preemptions += 1
        sequence.decide(
            state.now_us,
            "pause",
            f"{why}; {state.limits.policy.victim} of {len(candidates)}: {named}",
            blocks=len(sequence.table),
            freed_blocks=executor.ledger.alone(sequence.table),
            below_blocks=sum(block in executor.ledger.clean for block in sequence.table),
            reload_us=_reload_us(executor, sequence),
            recompute_us=costs.tokens_us(0, min(sequence.computed, len(sequence.tokens))),
            computed=min(sequence.computed, len(sequence.tokens)),
            pauses=sequence.pauses,
            free=executor.ledger.free_blocks,
            fenced=executor.ledger.fenced_blocks,
        )
        table = sequence.table
        if state.limits.policy.tier != "forget":
            prefix_cache.register_tail(executor, sequence)
        settled = _settled(executor, sequence)
        withdraw(state, sequence, 0)
        executor.ledger.settle(table[:settled])
        if state.limits.policy.tier == "forget":
            for block in table:
                executor.ledger.forget(block)
        wait_again(state, sequence)


def _settled(executor: Executor, sequence: Sequence) -> int:
    """How many blocks of its table hold what steps have computed that are back: all before its last known
    token, once one was sampled from it, and its tail, behind which steps in flight write. None while a block
    is copied for a fork."""
    forking = executor.forked_step > executor.ledger.acked_step
    if forking or len(sequence.tokens) <= sequence.opened_length:
        return 0
    at, valid = divmod(len(sequence.tokens) - 1, executor.hello.block_tokens)
    table = sequence.table
    return at + (valid > 0 and at < len(table) and executor.ledger.valid_of(table[at]) == valid)


def _candidates(state: State, executor: Executor, level: int) -> list[Sequence]:
    """Who may be paused for one of this class. A choice that waits for a prompt goes with who computes it;
    one whose blocks are being brought would be paused for nothing."""
    all_of = [
        s
        for s in executor.running
        if s.request.level >= level and not s.pinned and s.leader is None and not s.loading
    ]
    unspared = [s for s in all_of if s.spared_until_us <= state.now_us]
    return [s for s in unspared if s.reserved or executor.ledger.alone(s.table[-1:])] or unspared or all_of


def _describe(executor: Executor, s: Sequence, costs: Recompute) -> str:
    ledger = executor.ledger
    text = f"seq {s.seq} ({s.request.asked.slo_class}, {len(s.table)} blocks, {s.pauses} pauses"
    if not ledger.write_back:
        return text + ")"
    below = sum(block in ledger.clean for block in s.table)
    reload_us, again_us = _reload_us(executor, s), costs.tokens_us(0, min(s.computed, len(s.tokens)))
    return f"{text}, {below} below, {reload_us / 1e3:.1f} ms to bring back, {again_us / 1e3:.1f} to compute)"


def _reload_us(executor: Executor, s: Sequence) -> int:
    """What it would take to bring all of it back from the tier below."""
    return executor.up.predict_us(len(s.table) * executor.hello.bytes_per_block)


def withdraw(state: State, sequence: Sequence, known_tokens: int) -> None:
    """Take a sequence off its executor: blocks and slot go back behind the fence, full blocks stay cached.
    The KV of its first `known_tokens` tokens is, or is being, computed: full blocks of it can serve others,
    or the sequence itself when it comes back."""
    executor = state.executors.get(sequence.executor)
    if executor is not None and sequence in executor.running:
        prefix_cache.register(executor, sequence, min(sequence.computed, known_tokens))
        executor.leave(sequence)
        if executor.ledger.write_back:  # only what a tier may take is asked for its owner
            executor.ledger.own(sequence.table, sequence.seq)
        executor.copies = [copy for copy in executor.copies if copy[1] not in sequence.table]
        executor.ledger.unreserve(sequence.reserved)
        executor.ledger.release(sequence.table, [sequence.slot], executor.step)
        closed = SlotClose(slot=sequence.slot, generation=sequence.generation, last_step=executor.step)
        state.send(executor.source, closed)
    sequence.leave()


def wait_again(state: State, sequence: Sequence) -> None:
    """Queue a sequence that has left its executor, with all its tokens, ahead of those that never ran."""
    sequence.phase = Phase.WAITING
    sequence.unit = sequence.seq
    state.waiting.add(Unit(sequence.request, [sequence], sequence.unit, resumes=True), state.now_us)
