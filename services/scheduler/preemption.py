"""Preemption pauses sequences when blocks are short, and drops none.

A paused sequence waits with all its tokens, and comes back by prefix lookup: what its blocks still hold, here
or in a tier below, is not computed again. `withdraw` is how any sequence leaves its executor, and
`wait_again` how it gets back into the queue.

Nobody is paused for one of a lower class; a class is the one that a request counts as, which may have risen
while it waited. But a tenant of which nothing runs takes a place from those that have more than an equal
part, whatever their class, and who has more than that takes none from who has not. Whoever has just come back
is spared, and so is who would free nothing, where there is another. After three pauses a sequence is pinned:
promised all it may ever need, so that it is never short and nobody's victim. A pause for such a tenant counts
only within the turn of who is paused, or the next ones of that tenant would find everybody pinned; those come
first that have had their turn. So whoever is paused again and again ends all the same. Every pause is noted
with its reason and candidates: the blocks that each would free, those that a tier below holds, and what
bringing back or computing the rest would cost.
"""

from __future__ import annotations

from services.scheduler import headroom, model_kinds, prefix_cache
from services.scheduler.recompute_cost import Recompute
from services.scheduler.state.requests import NAMES, PIN_AFTER, Phase, Sequence
from services.scheduler.state.state import Executor, State
from services.scheduler.state.waiting_queue import Unit
from shared.messages import SlotClose

NAMED = 8  # candidates that a decision names


def make_room(state: State, executor: Executor) -> int:
    """Pause until every row of the next step gets its block, now or when steps in flight and copies are back.
    How many rows need one, unless there is one for each row anyhow."""
    pool = executor.pool
    if pool.unreserved_blocks >= len(executor.running):
        return 0
    while needy := headroom.needy(executor):
        if len(needy) <= pool.unreserved_blocks + pool.coming_blocks:
            break
        first = min(needy, key=lambda s: (s.level, s.request.arrival_us, s.seq))
        candidates = _candidates(state, executor, _may_give(executor, first))
        victim = state.limits.policy.the("victim")(candidates)[0]
        headroom.paused(executor)
        why = f"{len(needy)} rows need a block, the oldest is of seq {first.seq}"
        pause(state, executor, victim, why, candidates)
    return len(needy)


def give_way(state: State, unit: Unit, open_to: list[Executor]) -> bool:
    """Pause sequences of lower classes, as many as the unit needs to start on one of the executors `open_to`
    it, or its first choice; or, for that one, of tenants that have more than their share. None where enough
    is on its way. True when some were: where no step is in flight their memory is free at once."""
    tenant, one = unit.client[0], unit
    if len(unit.sequences) > 1:
        one = Unit(unit.request, unit.sequences[:1], unit.number)
    serving = [e for e in state.executors.values() if model_kinds.serves(e, unit.request)]
    last = unit.level == len(NAMES) - 1
    comes = not (unit.resumes or last or any(tenant in e.tenants for e in serving))
    able = [e for e in open_to if headroom.holds(e, one)]
    ways = [(e, _of_lower_class(e, unit), _of_who_has_more(state, e, one) if comes else []) for e in able]
    ways = [way for way in ways if way[1] or way[2]]
    if not ways or any(max(headroom.lacking(state, e, one)) <= 0 for e in able):
        return False
    why = f"seq {unit.number} of class {unit.request.asked.slo_class} needs its place"
    for executor, lower, over in ways:
        for part in (unit, one) if one is not unit else (unit,):
            if _make_way(state, executor, part, lower, why):
                return True
        if _make_way(state, executor, one, over, f"nothing of tenant {tenant!r} runs: {why}", cede=True):
            return True
    return False


def _of_lower_class(executor: Executor, unit: Unit) -> list[Sequence]:
    """Those that a unit may take the place of by its class. A tenant that has more than its share takes from
    itself and its like alone."""
    if not any(executor.levels[unit.level + 1 :]):
        return []
    lower = _from_level(executor, unit.level + 1)
    over = over_share(executor, len(executor.tenants))
    return [s for s in lower if s.tenant in over] if unit.client[0] in over else lower


def _of_who_has_more(state: State, executor: Executor, one: Unit) -> list[Sequence]:
    """Those that the only choice of a tenant may take the place of, if it fits in an equal part. Whose only
    one it is keeps it from a lower class."""
    tenants = len(executor.tenants) + 1
    if sum(headroom.promises(state, executor, one)) * tenants > executor.pool.blocks:
        return []
    over = over_share(executor, tenants)
    return [
        s
        for s in executor.running
        if s.tenant in over and (executor.tenants[s.tenant] > 1 or s.level >= one.level)
    ]


def _make_way(
    state: State, executor: Executor, unit: Unit, running: list[Sequence], why: str, cede: bool = False
) -> bool:
    """Pause as many of the `running` ones as a unit needs; none where all of them are too few. Whoever was
    paused and has come back is paused for nobody before it was in a step: so nobody is paused twice within
    one event, and admission comes to an end in whatever order units are taken."""
    others = [s for s in running if not (s.pauses and s.opened_after == executor.step)]
    candidates = _candidates(state, executor, others)
    blocks, slots = headroom.lacking(state, executor, unit)
    if len(candidates) < max(slots, 1) or (blocks > 0 and _frees(executor, candidates) < blocks):
        return False
    victims = state.limits.policy.the("victim")(candidates)
    if cede:
        victims = sorted(victims, key=lambda s: not _had_turn(state, s))
    for victim in victims:
        if cede and _had_turn(state, victim):
            for s in executor.running:
                s.ceded += s is victim or s.leader is victim
        pause(state, executor, victim, why, candidates)
        if max(headroom.lacking(state, executor, unit)) <= 0:
            break
    return True


def _frees(executor: Executor, running: list[Sequence]) -> int:
    """Blocks that would be free, or promised to nobody, without these; those of a shared prefix once, and
    only if nobody else holds them."""
    gone = {s.seq for s in running}
    promised = [s.reserved for s in executor.running if (s.leader or s).seq in gone]
    return sum(promised) + executor.pool.held_only_by(s.table for s in running)


def _had_turn(state: State, s: Sequence) -> bool:
    """Since it came back it has run for as long as it had waited, and has computed more than it had lost."""
    reach = max(s.reach, min(s.computed, len(s.tokens)))
    return state.now_us >= s.turn_us and reach >= s.turn_tokens


def _from_level(executor: Executor, level: int) -> list[Sequence]:
    """Those that run and count as of this class or a lower one."""
    return [s for s in executor.running if s.level >= level]


def _may_give(executor: Executor, first: Sequence) -> list[Sequence]:
    """Who gives a block to one that runs: those of its class and lower ones, of tenants that have more than
    their share if there are such; where its own has not, of any class."""
    of_class = _from_level(executor, first.level)
    if len(executor.tenants) == 1:
        return of_class
    over = over_share(executor, len(executor.tenants))
    any_class = first.tenant not in over
    give = [s for s in executor.running if s.tenant in over and (any_class or s.level >= first.level)]
    return [s for s in give if _pausable(s)] or of_class


def over_share(executor: Executor, tenants: int) -> set[str]:
    """The tenants that have more than an equal part of an executor's slots or blocks, between so many of
    them. The only sequence of a tenant is more only by its blocks."""
    blocks = dict.fromkeys(executor.tenants, 0)
    for s in executor.running:
        blocks[s.tenant] += len(s.table) + s.reserved
    return {
        tenant
        for tenant, count in executor.tenants.items()
        if (count > 1 and count * tenants > executor.pool.slots)
        or blocks[tenant] * tenants > executor.pool.blocks
    }


def pause(state: State, executor: Executor, victim: Sequence, why: str, candidates: list[Sequence]) -> None:
    """Take a sequence off its executor; it waits. Choices that wait for its prompt go with it."""
    followers = [s for s in executor.running if s.leader is victim]
    costs = Recompute.of(executor)
    named = ", ".join(_describe(executor, s, costs) for s in candidates[:NAMED])
    for sequence in (victim, *followers):
        sequence.pauses += 1
        sequence.pinned = sequence.pauses - sequence.ceded >= PIN_AFTER and not state.limits.policy.greedy
        state.meter.preemptions += 1
        sequence.decide(
            state.now_us,
            "pause",
            f"{why}; {state.limits.policy.victim} of {len(candidates)}: {named}",
            blocks=len(sequence.table),
            freed_blocks=executor.pool.held_only_by([sequence.table]),
            below_blocks=sum(block in executor.pool.clean for block in sequence.table),
            reload_us=_reload_us(executor, sequence),
            recompute_us=costs.tokens_us(0, min(sequence.computed, len(sequence.tokens))),
            computed=min(sequence.computed, len(sequence.tokens)),
            pauses=sequence.pauses,
            free=executor.pool.free_blocks,
            fenced=executor.pool.fenced_blocks,
        )
        table = sequence.table
        if not state.limits.policy.forgets:
            prefix_cache.register_tail(executor, sequence)
        stable = _stable_blocks(executor, sequence)
        withdraw(state, sequence, 0)
        executor.pool.mark_stable(table[:stable])
        if state.limits.policy.forgets:
            for block in table:
                executor.pool.forget(block)
        wait_again(state, sequence)


def _stable_blocks(executor: Executor, sequence: Sequence) -> int:
    """How many blocks of its table hold what steps have computed that are back, once a token was sampled from
    it: all that are full before its last known token. Steps in flight write into the next one, its tail, and
    one that fails may spoil what it writes into: that block is copied when they are back."""
    if len(sequence.tokens) <= sequence.opened_length:
        return 0
    return (len(sequence.tokens) - 1) // executor.hello.block_tokens


def _candidates(state: State, executor: Executor, running: list[Sequence]) -> list[Sequence]:
    """Who of them may be paused, those that were not just now if there are such."""
    all_of = [s for s in running if _pausable(s)]
    unspared = [s for s in all_of if s.spared_until_us <= state.now_us]
    refs = executor.pool.refs
    frees = [s for s in unspared if s.reserved or (s.table and refs[s.table[-1]] == 1)]
    return frees or unspared or all_of


def _pausable(s: Sequence) -> bool:
    """A choice that waits for a prompt goes with who computes it; one whose blocks are being brought would be
    paused for nothing."""
    return not s.pinned and s.leader is None and not s.loading


def _describe(executor: Executor, s: Sequence, costs: Recompute) -> str:
    pool = executor.pool
    text = f"seq {s.seq} ({s.request.asked.slo_class}, {len(s.table)} blocks, {s.pauses} pauses"
    if not pool.write_back:
        return text + ")"
    below = sum(block in pool.clean for block in s.table)
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
        executor.copies = [copy for copy in executor.copies if copy[1] not in sequence.table]
        executor.pool.unreserve(sequence.reserved)
        executor.pool.release(sequence.table, [sequence.slot], executor.step, sequence.seq)
        closed = SlotClose(slot=sequence.slot, generation=sequence.generation, last_step=executor.step)
        state.send(executor.source, closed)
    sequence.leave()


def wait_again(state: State, sequence: Sequence) -> None:
    """Queue a sequence that has left its executor, with all its tokens, ahead of those that never ran."""
    sequence.phase = Phase.WAITING
    sequence.unit = sequence.seq
    state.waiting.add(Unit(sequence.request, [sequence], sequence.unit, resumes=True), state.now_us)
