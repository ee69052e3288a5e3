"""Moves running sequences from one executor to another. `core.decide` calls `advance`.

    runs on A ──copy──▶ its full blocks are in L1 ──leave──▶ front of its queue ──admission──▶ runs on B

The sequence runs while its blocks are copied. It leaves A only if an executor has room for it now, and one
sequence after the other, so a move takes the time of a restore: B loads the blocks and computes the tokens
after them. A tier that is late, full or absent changes only the time: what B does not find it computes.

A sequence moves between two of its decodes: a prompt, with the choices that wait for it, is computed to its
end where it started, and so is what a resumed sequence has lost. So each move follows at least one token.

The sequences of a draining executor move once it has drained for `Limits.move_after_us`: most answers end
within it. Without another executor for them, they stay.
"""

from __future__ import annotations

from services.scheduler import admission, headroom, load_shedding
from services.scheduler.kv_tiers import store
from services.scheduler.preemption import RecomputeCost, backlog_us, requeue
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import DECODE, PREFILL, Executor, State
from services.scheduler.state.waiting_queue import SequenceGroup

BACKLOG_US = 250_000  # of prompts on an executor: with more a sequence that moves there would stall


def advance(state: State) -> None:
    """Go on with the moves from all draining executors, and from those that only prefill."""
    if not state.some_leave:
        return  # at most events
    leaving = [e for e in state.executors.values() if e.draining or e.role == PREFILL]
    state.some_leave = bool(leaving)
    for executor in leaving:
        if not executor.running:
            continue
        due_us = executor.drains_since_us + state.limits.move_after_us if executor.draining else 0
        if state.now_us >= due_us and _others(state, executor):
            why = "its executor drains" if executor.draining else "its executor only prefills"
            move_all(state, executor, [s for s in executor.running if may_leave(s)], why)
            _copy_ahead(state, executor)


def move_all(state: State, executor: Executor, sequences: list[Sequence], why: str) -> None:
    """Copy the blocks of these sequences below, higher classes first, and start each elsewhere once they are
    there. The first one without room waits for it, and the others wait for that one."""
    room = True
    for sequence in sorted(sequences, key=lambda s: s.request.level):
        if state.executors.get(sequence.executor) is not executor:
            continue  # `admit` has preempted it: the numbers of its blocks mean others here
        if not store.keep_below(state, executor, sequence):
            if executor.down.pending_jobs >= store.MAX_JOBS:
                return
        elif room and has_room(state, executor, sequence):
            leave(state, executor, sequence, why)
            admission.admit(state)
        elif room:
            room = False
            _await_blocks(state, executor, sequence)


def _copy_ahead(state: State, executor: Executor) -> None:
    """Copy what is computed of the prompts: so little is left to copy after the first token."""
    for sequence in executor.running:
        if executor.down.pending_jobs >= store.MAX_JOBS:
            return
        if sequence.is_prefilling and sequence.parent is None and not sequence.copies.load_job:
            store.keep_below(state, executor, sequence)


def may_leave(sequence: Sequence) -> bool:
    """Whether the sequence is between two decodes, and has a token from this executor."""
    return (
        not sequence.is_prefilling
        and len(sequence.tokens) > sequence.opened_length
        and not sequence.copies.load_job
    )


def has_room(state: State, executor: Executor, sequence: Sequence) -> bool:
    """Whether another executor can start the sequence now, and no other one is on its way or goes first."""
    model, level = executor.hello.model, sequence.request.level
    queues = [state.waiting.queues.get((model, above)) for above in range(level + 1)]
    prompts = executor.role != PREFILL  # else those that wait are not for the others
    if any(q is not None and (q.preempted or (prompts and q.groups and q.level < level)) for q in queues):
        return False
    group = _alone(sequence)
    if sequence.request.tokenized.adapter:
        load_shedding.adapting().prepare(state, group, _others(state, executor))
    return any(
        admission.can_start(state, other, group)
        and backlog_us(other, None, RecomputeCost.of(other)) <= BACKLOG_US
        for other in _others(state, executor)
    )


def _await_blocks(state: State, executor: Executor, sequence: Sequence) -> None:
    """Let the executor that lacks least for the sequence free as many blocks: those of ended sequences, which
    it keeps until they are needed, are no room. See ../kv_tiers/store.py."""
    group = _alone(sequence)
    able = [
        e
        for e in _others(state, executor)
        if admission.may_join(state, e, group) and headroom.can_fit(e, group)
    ]
    if able:
        goal = max(able, key=lambda e: (e.pool.unreserved_blocks + e.pool.coming_blocks, e.source))
        goal.awaited_blocks = sum(headroom.reservations(state, goal, group))
        goal.awaited_blocks += headroom.headroom_blocks(state, goal, group.sequences)


def _alone(sequence: Sequence) -> SequenceGroup:
    return SequenceGroup(sequence.request, [sequence], sequence.seq, resumes=True)


def leave(state: State, executor: Executor, sequence: Sequence, why: str) -> None:
    """Close the sequence's slot, and queue it with all its tokens."""
    sequence.record_decision(
        state.now_us,
        "move",
        f"{why}: {executor.source}",
        tokens=len(sequence.tokens),
        below_blocks=sum(block in executor.pool.clean for block in sequence.table),
    )
    state.counters.moves += 1
    headroom.withdraw(state, sequence, len(sequence.tokens) - 1)
    requeue(state, sequence)


def _others(state: State, executor: Executor) -> list[Executor]:
    """The other executors of the model that take sequences. One that only prefills would send those of
    another one back after each token."""
    model, roles = executor.hello.model, ("", DECODE, PREFILL) if executor.draining else ("", DECODE)
    return [
        e
        for e in state.executors.values()
        if e is not executor and not e.draining and e.hello.model == model and e.role in roles
    ]
