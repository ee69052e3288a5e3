"""How a sequence leaves its executor: blocks and slot go back behind the fence, full blocks stay cached."""

from __future__ import annotations

from services.scheduler import prefix
from services.scheduler.records import Phase, Sequence
from services.scheduler.state import State
from services.scheduler.waiting import Unit
from shared.messages import SlotClose


def withdraw(state: State, sequence: Sequence, known_tokens: int) -> None:
    """Take a sequence off its executor. The KV of its first `known_tokens` tokens is, or is being, computed:
    full blocks of it can serve others, or the sequence itself when it comes back."""
    executor = state.executors.get(sequence.executor)
    if executor is not None and sequence in executor.running:
        prefix.register(executor, sequence, min(sequence.computed, known_tokens))
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
