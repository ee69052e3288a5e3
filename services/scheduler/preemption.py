"""Preempts running sequences when blocks are short.

A preempted sequence waits with all its tokens and resumes by prefix lookup: KV that its blocks still hold, on
the device or in a tier below, is not computed again. It leaves its executor through `headroom.withdraw` and
returns to the queue through `requeue`. Admission calls `preempt_for` and `preempt_for_next`,
the step planner `make_room`.

Which sequences may be victims:

* Within a tenant a sequence is never preempted for one of a lower class. The class is the current one, after
  aging.
* A tenant without a running sequence may preempt those of tenants that have more than an equal share,
  of any class. A tenant with more than its share preempts none of a tenant with less.
* A sequence that has just resumed is spared if there is another victim; so is one that would free nothing.
* After PIN_AFTER_PREEMPTIONS preemptions a sequence is pinned: it reserves all blocks it may ever need, so it
  is never short and never a victim. A preemption for a tenant without a running sequence counts only
  before the end of the victim's turn (`_has_had_turn`): else all sequences would soon be pinned against such
  tenants. Victims that have had their turn come first. So each sequence ends, however often it is preempted.

Each preemption is recorded with its reason and candidates: the blocks that each would free, the blocks that
a tier below holds, and the predicted times to load or to recompute the rest.

`RecomputeCost` predicts the device time to compute tokens again, from the executor's cost model.
Preemption, KV tiers and admission use it. A resumed sequence is spared for a while (`on_resume`), and the
device time of its recomputation is compared with the prediction (`start_debt`, `on_step`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass

from services.scheduler import load_shedding, prefix_cache
from services.scheduler.headroom import (
    cached_blocks,
    can_fit,
    raise_headroom,
    reservations,
    rows_without_block,
    shortfall,
    withdraw,
)
from services.scheduler.overlap import MIN_SEEN
from services.scheduler.state.cost_model import CostModel
from services.scheduler.state.requests import CLASS_NAMES, PIN_AFTER_PREEMPTIONS, Phase, Sequence
from services.scheduler.state.state import Executor, InFlight, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.step_model import StepShape

MAX_LISTED = 8  # candidates that a decision names


def make_room(state: State, executor: Executor) -> int:
    """Preempt until every row of the next step gets its block, now or when steps in flight and copies end.
    Returns how many rows need a block; 0 if there is one for each row."""
    pool = executor.pool
    if pool.unreserved_blocks >= len(executor.running):
        return 0
    while short_rows := rows_without_block(executor):
        if len(short_rows) <= pool.unreserved_blocks + pool.coming_blocks:
            break
        first = min(short_rows, key=lambda s: (s.level, s.request.arrival_us, s.seq))
        candidates = _candidates(state, executor, _victims_for(executor, first))
        victim = in_order(state, executor, candidates)[0]
        raise_headroom(executor)
        why = f"{len(short_rows)} rows need a block, the oldest is of seq {first.seq}"
        preempt(state, executor, victim, why, candidates)
    return len(short_rows)


def preempt_for(state: State, group: SequenceGroup, open_to: Iterable[Executor]) -> bool:
    """Preempt as many sequences as the group needs to start on one of the executors `open_to` it.

    First for all its sequences, from lower classes; then for its first sequence alone, from lower classes and
    from tenants that have more than their share. None if enough blocks are about to be free. True if some
    were preempted: where no step is in flight their blocks are free at once.
    """
    tenant, one = group.client[0], group.first_choice()
    lower_runs, tenant_is_new = victims_by(state, group)
    if not (lower_runs or tenant_is_new):
        return False
    able = [e for e in open_to if can_fit(e, one)]
    ways = [
        (e, _of_lower_class(state, e, group), _of_tenants_over_share(state, e, one) if tenant_is_new else [])
        for e in able
    ]
    ways = [way for way in ways if way[1] or way[2]]
    if not ways or any(max(shortfall(state, e, one)) <= 0 for e in able):
        return False
    why = f"seq {group.number} of class {group.request.tokenized.slo_class} needs room"
    for executor, lower, over in ways:
        for part in (group, one) if one is not group else (group,):
            if _preempt_until_fits(state, executor, [part], lower, why):
                return True
        if _preempt_until_fits(
            state, executor, [one], over, f"tenant {tenant!r} has no running sequence: {why}", cede=True
        ):
            return True
    return False


def victims_by(state: State, group: SequenceGroup) -> tuple[bool, bool]:
    """Whether a lower class runs, and whether nothing of the group's tenant does, so that it may preempt
    other tenants' sequences."""
    tenant, served = group.client[0], state.by_model.get(group.request.tokenized.model)
    comes = not group.resumes and group.level + 1 < len(CLASS_NAMES)
    if comes and served is not None and tenant in served.running_by_tenant:
        there = (e for e in served.executors if tenant in e.running_by_tenant)
        comes = not any(load_shedding.may_run(e, group.request) for e in there)
    return any(any(f.running_by_class[group.level + 1 :]) for f in state.by_model.values()), comes


def preempt_for_next(
    state: State, group: SequenceGroup, earlier: dict[str, list[SequenceGroup]], able: list[Executor]
) -> bool:
    """Preempt as many sequences of lower classes as a group needs to start after others, on one of the
    executors that are `able` to run it. `earlier` has the groups before it, by executor: those that have
    room, or are about to have it. The group is added; False if there is no room for it, and nothing is
    preempted then."""
    why = f"seq {group.number} of class {group.request.tokenized.slo_class} needs room"
    for executor in able:
        groups = [*earlier.get(executor.source, ()), group]
        if max(shortfall(state, executor, *groups)) <= 0:
            earlier[executor.source] = groups
            return True
    for executor in able:
        before = earlier.get(executor.source, [])
        lower = _of_lower_class(state, executor, group, before)
        if _preempt_until_fits(state, executor, [*before, group], lower, why):
            earlier[executor.source] = [*before, group]
            return True
    return False


def _of_lower_class(
    state: State, executor: Executor, group: SequenceGroup, earlier: Iterable[SequenceGroup] = ()
) -> list[Sequence]:
    """Victims of a lower class. A tenant over its share preempts only tenants over theirs; `earlier` groups,
    which are about to start, count as running."""
    if not any(executor.running_by_class[group.level + 1 :]):
        return []
    lower = _from_level(executor, group.level + 1)
    joining = [(g.client[0], len(g.sequences), sum(reservations(state, executor, g))) for g in earlier]
    tenants = executor.running_by_tenant.keys() | {tenant for tenant, _, _ in joining}
    over = over_share(executor, len(tenants), joining)
    return [s for s in lower if s.tenant in over] if group.client[0] in over else lower


def _of_tenants_over_share(state: State, executor: Executor, one: SequenceGroup) -> list[Sequence]:
    """Victims for a tenant's only sequence, if that fits in an equal share. The only sequence of another
    tenant is no victim of a lower class."""
    tenants = len(executor.running_by_tenant) + 1
    if sum(reservations(state, executor, one)) * tenants > executor.pool.blocks:
        return []
    over = over_share(executor, tenants)
    return [
        s
        for s in executor.running
        if s.tenant in over and (executor.running_by_tenant[s.tenant] > 1 or s.level >= one.level)
    ]


def _preempt_until_fits(
    state: State,
    executor: Executor,
    groups: list[SequenceGroup],
    running: list[Sequence],
    why: str,
    cede: bool = False,
) -> bool:
    """Preempt as many of `running` as these groups together need; none if all of them are too few.

    A resumed sequence is no victim before its first step. So no sequence is preempted twice within one event,
    and admission ends in any order of groups.
    """
    others = [s for s in running if not (s.turn.preemptions and s.opened_after == executor.step)]
    candidates = _candidates(state, executor, others)
    blocks, slots = shortfall(state, executor, *groups)
    if len(candidates) < max(slots, 1):
        return False
    if blocks > 0 and not _has_enough(executor, candidates, cached_blocks(executor, *groups), blocks):
        return False
    victims = in_order(state, executor, candidates)
    if cede:
        victims = sorted(victims, key=lambda s: not _has_had_turn(state, s))
    for victim in victims:
        if cede and _has_had_turn(state, victim):
            for s in executor.running:
                s.turn.ceded += s is victim or s.parent is victim
        preempt(state, executor, victim, why, candidates)
        if max(shortfall(state, executor, *groups)) <= 0:
            break
    return True


def in_order(state: State, executor: Executor, candidates: list[Sequence]) -> list[Sequence]:
    """The candidates, the first victim first."""
    if state.limits.policy.priced and len(candidates) > 1:
        costs = RecomputeCost.of(executor)
        for s in candidates:
            s.turn.price = _price(executor, s, costs)
    return state.limits.policy.function("victim")(candidates)  # type: ignore[no-any-return]  # as declared there


def _price(executor: Executor, s: Sequence, costs: RecomputeCost) -> int:
    """What a preemption costs for each block that it frees, in ns: to compute the tokens again, or to copy
    the blocks down that are not below yet and all of them up, after the copies that wait."""
    pool, size = executor.pool, executor.hello.bytes_per_block
    price_us = costs.tokens_us(0, min(s.computed, len(s.tokens)))
    if pool.write_back:
        dirty = sum(block not in pool.clean for block in s.table)
        down_us = executor.down.predict_us(dirty * size) if dirty else 0
        price_us = min(price_us, down_us + _reload_us(executor, s)) if price_us else down_us
    return price_us * 1000 // max(pool.held_only_by([s.table]) + s.reserved, 1)


def _has_enough(executor: Executor, running: list[Sequence], taken: Container[int], blocks: int) -> bool:
    """Whether so many blocks would be free and unreserved without these sequences, and are not `taken` again.
    A block of a shared prefix counts once, and only if no other sequence holds it. Looks at no more tables
    than it takes to know."""
    gone, refs = {s.seq for s in running}, executor.pool.refs
    blocks -= sum([s.reserved for s in executor.running if (s.parent or s).seq in gone])
    if sum([len(s.table) for s in running]) < blocks:
        return False
    holds = Counter[int]()
    for s in running:
        if blocks <= 0:
            break
        holds.update(s.table)
        blocks -= sum([refs[block] == holds[block] and block not in taken for block in s.table])
    return blocks <= 0


def _has_had_turn(state: State, s: Sequence) -> bool:
    """Since it resumed, the sequence has run for as long as it had waited, and has computed more than it had
    lost."""
    reach = max(s.most_computed, min(s.computed, len(s.tokens)))
    return state.now_us >= s.turn.until_us and reach >= s.turn.tokens


def _from_level(executor: Executor, level: int) -> list[Sequence]:
    """Running sequences of this class or a lower one."""
    return [s for s in executor.running if s.level >= level]


def _victims_for(executor: Executor, first: Sequence) -> list[Sequence]:
    """Victims for a running sequence that lacks a block: sequences of its class and lower ones, from tenants
    over their share if there are any. If its own tenant is not over its share, those of any class."""
    of_class = _from_level(executor, first.level)
    if len(executor.running_by_tenant) == 1:
        return of_class
    over = over_share(executor, len(executor.running_by_tenant))
    any_class = first.tenant not in over
    give = [s for s in executor.running if s.tenant in over and (any_class or s.level >= first.level)]
    return [s for s in give if is_preemptible(s)] or of_class


def over_share(executor: Executor, tenants: int, joining: Iterable[tuple[str, int, int]] = ()) -> set[str]:
    """The tenants that have more than 1/`tenants` of an executor's slots or blocks. A tenant with a single
    sequence is over its share only by blocks. `joining`: tenant, sequences and blocks that count, too."""
    counts = Counter(executor.running_by_tenant)
    blocks = dict.fromkeys(executor.running_by_tenant, 0)
    for s in executor.running:
        blocks[s.tenant] += len(s.table) + s.reserved
    for tenant, sequences, reserved in joining:
        counts[tenant] += sequences
        blocks[tenant] = blocks.get(tenant, 0) + reserved
    return {
        tenant
        for tenant, count in counts.items()
        if (count > 1 and count * tenants > executor.pool.slots)
        or blocks[tenant] * tenants > executor.pool.blocks
    }


def preempt(state: State, executor: Executor, victim: Sequence, why: str, candidates: list[Sequence]) -> None:
    """Move a sequence from its executor to the queue, with the choices that wait for its prompt."""
    children = [s for s in executor.running if s.parent is victim]
    costs = RecomputeCost.of(executor)
    named = ", ".join(_describe(executor, s, costs) for s in candidates[:MAX_LISTED])
    for sequence in (victim, *children):
        sequence.turn.preemptions += 1
        sequence.turn.pinned = (
            sequence.turn.preemptions - sequence.turn.ceded >= PIN_AFTER_PREEMPTIONS
            and not state.limits.policy.greedy
        )
        state.counters.preemptions += 1
        sequence.record_decision(
            state.now_us,
            "preempt",
            f"{why}; {state.limits.policy.victim} of {len(candidates)}: {named}",
            blocks=len(sequence.table),
            freed_blocks=executor.pool.held_only_by([sequence.table]),
            below_blocks=sum(block in executor.pool.clean for block in sequence.table),
            reload_us=_reload_us(executor, sequence),
            recompute_us=costs.tokens_us(0, min(sequence.computed, len(sequence.tokens))),
            computed=min(sequence.computed, len(sequence.tokens)),
            preemptions=sequence.turn.preemptions,
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
        requeue(state, sequence)


def _stable_blocks(executor: Executor, sequence: Sequence) -> int:
    """How many blocks of the table acknowledged steps have filled, once a token has been sampled.

    These are the full blocks before the last known token. Steps in flight write into the next block, and a
    step that fails may spoil it: that block is copied after they end.
    """
    if len(sequence.tokens) <= sequence.opened_length:
        return 0
    return (len(sequence.tokens) - 1) // executor.hello.block_tokens


def _candidates(state: State, executor: Executor, running: list[Sequence]) -> list[Sequence]:
    """The preemptible ones of `running`: if possible those that free a block and did not just resume."""
    all_of = [s for s in running if is_preemptible(s)]
    unspared = [s for s in all_of if s.turn.protected_until_us <= state.now_us]
    refs = executor.pool.refs
    frees = [s for s in unspared if s.reserved or (s.table and refs[s.table[-1]] == 1)]
    return frees or unspared or all_of


def is_preemptible(s: Sequence) -> bool:
    """A choice that waits for its parent's prompt is preempted with the parent. A sequence with a load job
    would waste the load."""
    return not s.turn.pinned and s.parent is None and not s.copies.load_job


def _describe(executor: Executor, s: Sequence, costs: RecomputeCost) -> str:
    pool = executor.pool
    slo_class, blocks, times = s.request.tokenized.slo_class, len(s.table), s.turn.preemptions
    text = f"seq {s.seq} ({slo_class}, {blocks} blocks, {times} preemptions"
    if not pool.write_back:
        return text + ")"
    below = sum(block in pool.clean for block in s.table)
    reload_us, again_us = _reload_us(executor, s), costs.tokens_us(0, min(s.computed, len(s.tokens)))
    return f"{text}, {below} in a tier, {reload_us / 1e3:.1f} ms to load, {again_us / 1e3:.1f} to recompute)"


def _reload_us(executor: Executor, s: Sequence) -> int:
    """Predicted time to load all its blocks from the tier below."""
    return executor.up.predict_us(len(s.table) * executor.hello.bytes_per_block)


def requeue(state: State, sequence: Sequence) -> None:
    """Queue a sequence that has left its executor, before those that never ran."""
    sequence.phase = Phase.WAITING
    sequence.group = sequence.seq
    state.waiting.add(SequenceGroup(sequence.request, [sequence], sequence.group, resumes=True), state.now_us)


CHUNK_TOKENS = 256  # until chunks have been planned
MANY_CHUNKS = 8

PROTECTED_US = 2_000_000  # at least: a sequence that is preempted again at once has resumed for nothing
PROTECTED_TIMES = 4  # times its recompute cost


@dataclass(slots=True)  # not frozen: setting the fields would take three times as long
class RecomputeCost:
    """Predicts the device time of prompt chunks in steps with the present decodes."""

    costs: CostModel
    base: StepShape
    base_us: int
    block_tokens: int
    chunk_tokens: int

    @classmethod
    def of(cls, executor: Executor) -> RecomputeCost:
        """With the executor's present decodes."""
        base, sums = decode_shape(executor), executor.row_sums()
        if sums.base_us < 0:
            sums.base_us = executor.cost_model.predict_us(base) if base.rows else 0
        return cls._with_base(executor, base, sums.base_us)

    @classmethod
    def after_admission(cls, executor: Executor, sequence: Sequence) -> RecomputeCost:
        """For a sequence that has just been admitted: the sequences before it decode by then."""
        before = [s for s in executor.running if s is not sequence and not s.copies.load_job]
        cached = sum(max(s.computed, s.opened_length) for s in before)
        base = StepShape(len(before), len(before), cached + len(before), cached)
        return cls._with_base(executor, base, executor.cost_model.predict_us(base) if base.rows else 0)

    @classmethod
    def _with_base(cls, executor: Executor, base: StepShape, base_us: int) -> RecomputeCost:
        chunk_tokens = executor.chunk_tokens or CHUNK_TOKENS
        return cls(executor.cost_model, base, base_us, executor.hello.block_tokens, chunk_tokens)

    @property
    def is_known(self) -> bool:
        return self.costs.seen >= MIN_SEEN

    def tokens_us(self, start: int, tokens: int) -> int:
        """Time to compute `tokens` tokens from position `start`; 0 while the cost model has seen too
        little."""
        if not self.is_known or tokens <= 0:
            return 0
        end, total, chunk = start + tokens, 0, self.chunk_tokens
        if tokens > MANY_CHUNKS * chunk:  # the cost is a polynomial of degree two: Simpson's rule is exact
            ends = (start, start + (tokens - chunk) // 2, end - chunk)
            first, middle, last = (self._chunk_us(at, chunk) for at in ends)
            return (first + 4 * middle + last) * tokens // (6 * chunk)
        while start < end:
            count = min(chunk, end - start)
            total += self._chunk_us(start, count)
            start += count
        return total

    def steps_us(self, prompts: StepShape, step_tokens: int) -> tuple[int, int]:
        """Time of the equal steps, of at most `step_tokens` prompt tokens, that compute these prompts beside
        the present decodes, and how much longer they take than the decodes alone; (0, 0) without prompts."""
        if not prompts.tokens:
            return 0, 0
        base, steps = self.base, -(-prompts.tokens // step_tokens)
        tokens = prompts.tokens // steps
        shape = StepShape(
            base.rows + prompts.rows,
            base.tokens + tokens,
            base.kv_tokens + prompts.kv_tokens - (prompts.tokens - tokens) // 2,  # on average
            base.attention + prompts.attention // steps,
        )
        us = steps * self.costs.predict_us(shape)
        return us, max(us - steps * self.base_us, 0)

    def block_us(self, at: int) -> int:
        """Time to compute the `at`-th block of a sequence, as part of a larger chunk."""
        if not self.is_known:
            return 0
        chunk_us = self._chunk_us(at * self.block_tokens, self.chunk_tokens)
        return chunk_us * self.block_tokens // self.chunk_tokens

    def _chunk_us(self, start: int, tokens: int) -> int:
        return max(self.costs.predict_us(self.base.with_chunk(start, tokens)) - self.base_us, 0)


def backlog_us(executor: Executor, sequence: Sequence | None, costs: RecomputeCost) -> int:
    """Time of the device's work before this sequence: the steps in flight and the prompts before it. A load
    does not wait for them."""
    sums = executor.row_sums()
    tokens, prompts = sums.backlog_tokens, sums.backlog_prompts
    if sequence is not None and (own := sequence.backlog_tokens(executor.hello.block_tokens)):
        tokens, prompts = tokens - own, prompts - 1
    us = prompts * costs.tokens_us(0, tokens // prompts) if prompts else 0  # as prompts of one length
    return sum(flight.predicted_us for flight in executor.in_flight) + us


def decode_shape(executor: Executor) -> StepShape:
    """The shape of a step of the rows that decode now."""
    sums = executor.row_sums()
    if sums.base is None:
        rows, cached = sums.decodes, sums.decode_tokens
        sums.base = StepShape(rows, rows, cached + rows, cached)
    return sums.base


def on_resume(state: State, executor: Executor, sequence: Sequence, group: SequenceGroup) -> None:
    """Protect a resumed sequence, and set its turn and its recompute debt."""
    if not group.resumes:
        return
    lost = max(0, min(sequence.most_computed, len(sequence.tokens) - 1) - sequence.computed)
    sequence.turn.until_us = 2 * state.now_us - group.queued_us
    sequence.turn.tokens = sequence.most_computed + max(lost, 1)
    cost_us = RecomputeCost.of(executor).tokens_us(sequence.computed, lost)
    if not state.limits.policy.greedy:
        sequence.turn.protected_until_us = state.now_us + max(PROTECTED_US, PROTECTED_TIMES * cost_us)
    if not sequence.copies.load_job:
        start_debt(executor, sequence)


def start_debt(executor: Executor, sequence: Sequence) -> None:
    """Predict the time to recompute the lost tokens. Not tracked for a sequence preempted during prefill: its
    next chunks mix recomputed and new tokens."""
    lost = len(sequence.tokens) - 1 - sequence.computed
    if 0 < lost <= sequence.most_computed - sequence.computed:
        costs = RecomputeCost.after_admission(executor, sequence)
        # one more: the last token, from which the next is sampled
        sequence.debt.owed_us = costs.tokens_us(sequence.computed, lost + 1)
        sequence.debt.paid_us = 0


def pay_debt(state: State, executor: Executor, flight: InFlight, took_us: int) -> None:
    """Charge a step's time beyond its decodes to its chunks, by their tokens. The chunk that reaches the
    sequence's last known token closes the debt."""
    plan, first = flight.plan, len(flight.plan.slots) - len(flight.chunks)
    indebted = [
        (s, row)
        for row, (s, _) in enumerate(flight.chunks, first)
        if s.debt.owed_us and s.opened_after < flight.step
    ]
    if not indebted:
        return
    chunk_tokens = sum(plan.counts[first:])
    price_us = max(0, took_us - without_chunks_us(executor, flight))
    for sequence, row in indebted:
        sequence.debt.paid_us += price_us * plan.counts[row] // max(chunk_tokens, 1)
        if plan.starts[row] + plan.counts[row] >= sequence.opened_length:
            _close_debt(state, sequence)


def _close_debt(state: State, sequence: Sequence) -> None:
    state.counters.add_recompute(sequence.debt.paid_us, sequence.debt.owed_us)
    sequence.record_decision(
        state.now_us,
        "recomputed",
        "its lost tokens are computed again",
        predicted_us=sequence.debt.owed_us,
        took_us=sequence.debt.paid_us,
    )
    sequence.debt.owed_us = 0


def without_chunks_us(executor: Executor, flight: InFlight) -> int:
    """Predicted time of a step's decodes alone; 0 if it had none."""
    plan, rows = flight.plan, len(flight.plan.slots) - len(flight.chunks)
    if not rows:
        return 0
    cached, tokens = sum(plan.starts[:rows]), sum(plan.counts[:rows])
    return executor.cost_model.predict_us(StepShape(tokens, tokens, cached + tokens, cached))
