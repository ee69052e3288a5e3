"""How a sequence ends: memory goes back at once, the record stays until the detokenizer has spoken."""

from __future__ import annotations

import dataclasses

from services.scheduler.recent import Trace
from services.scheduler.records import Phase, Request, Sequence, close_of
from services.scheduler.state import NEVER_US, State
from services.scheduler.traces import facts_of
from shared.messages import Ended, SlotClose, StopFound
from shared.request_spans import Reply

ENDED_WITHIN_US = 5_000_000  # longer than a dead detokenizer goes unnoticed: until then another may
# have to tell the client. After that the record closes without its word; memory is long free.


def finish(state: State, sequence: Sequence, final: int, reason: str) -> None:
    """End a live sequence normally after `final` generated tokens."""
    _close(state, sequence, final, reason, 0, "")


def fail(state: State, request: Request, code: int, message: str) -> None:
    """End the live choices of a request with a typed error for its client."""
    for sequence in request.sequences:
        if sequence.live:
            _close(state, sequence, sequence.generated, "error", code, message)


def stop_found(state: State, found: StopFound) -> None:
    """A stop string ends at `found.index`, whatever was generated since."""
    sequence = state.sequences.get(found.seq)
    if sequence is not None and sequence.live and 0 < found.index <= sequence.generated:
        finish(state, sequence, found.index, "stop")


def ended(state: State, source: str, message: Ended) -> None:
    """The detokenizer's last word: index and reason are final. Another one's than the present owner's
    says nothing: a new incarnation answers so for sequences it has never seen."""
    sequence = state.sequences.get(message.seq)
    if sequence is None or sequence.phase is not Phase.CLOSING:
        return
    if source != f"detokenizer.{sequence.request.shard}":
        return
    sequence.final, sequence.reason = min(message.index, sequence.final), message.reason
    if message.sent_wall_us:
        sequence.request.reply = Reply(
            first_us=message.first_wall_us, built_us=message.built_wall_us, sent_us=message.sent_wall_us
        )
    forget(state, sequence)


def expire(state: State) -> None:
    """Close what is past its time: running requests, records without an Ended, tombstones. Called
    every 10 ms, so it looks at them only when one can be due."""
    if state.now_us < state.due_us:
        return
    for sequence in list(state.sequences.values()):
        if state.now_us < due_at_us(sequence):
            continue
        if sequence.live:
            fail(state, sequence.request, 408, _late(sequence.request))
        else:
            forget(state, sequence)
    state.tombstones = {key: until for key, until in state.tombstones.items() if until > state.now_us}
    state.refused = {key: kept for key, kept in state.refused.items() if kept[0] > state.now_us}
    due_us = [due_at_us(sequence) for sequence in state.sequences.values()]
    due_us += [until for until, _ in state.refused.values()]
    state.due_us = min([*due_us, *state.tombstones.values()], default=NEVER_US)


def due_at_us(sequence: Sequence) -> int:
    """When a live sequence is late, or a closing one is no longer waited for."""
    late_us, silent_us = sequence.request.deadline_us, sequence.close_deadline_us
    if sequence.live:
        return late_us
    return silent_us if sequence.request.shard else max(silent_us, late_us)  # nobody has told the client yet


def forget(state: State, sequence: Sequence) -> None:
    """The record is final; the request goes when its last choice has."""
    sequence.phase = Phase.ENDED
    state.sequences.pop(sequence.seq, None)
    request = sequence.request
    if all(s.phase is Phase.ENDED for s in request.sequences):
        state.requests.pop(request.key, None)
        state.recent.add(
            request.key, Trace(request.asked.inbox, request.trace, facts_of(request, state.now_us))
        )


def withdraw(state: State, sequence: Sequence) -> None:
    """Take a sequence off its executor: blocks and slot go back behind the fence."""
    executor = state.executors.get(sequence.executor)
    if executor is not None and sequence in executor.running:
        executor.running.remove(sequence)
        executor.copies = [copy for copy in executor.copies if copy[1] not in sequence.table]
        executor.ledger.unreserve(sequence.reserved)
        executor.ledger.release(sequence.table, [sequence.slot], executor.step)
        closed = SlotClose(slot=sequence.slot, generation=sequence.generation, last_step=executor.step)
        state.send(executor.source, closed)
    sequence.leave()


def _close(state: State, sequence: Sequence, final: int, reason: str, code: int, message: str) -> None:
    if sequence.phase is Phase.RUNNING:
        withdraw(state, sequence)
    else:
        for unit in state.waiting:
            if sequence in unit.sequences:
                unit.sequences.remove(sequence)
                if not unit.sequences:
                    state.waiting.remove(unit)
                break
    sequence.phase, sequence.final, sequence.reason = Phase.CLOSING, final, reason
    close = close_of(sequence, state.now_us, final, reason)
    sequence.close = dataclasses.replace(close, code=code, message=message) if code else close
    send_close(state, sequence)


def send_close(state: State, sequence: Sequence) -> None:
    """(Re)send the Close of a sequence to its shard, and wait for its Ended."""
    request = sequence.request
    sequence.close_deadline_us = state.now_us + ENDED_WITHIN_US
    state.wake(sequence.close_deadline_us)
    if request.shard and sequence.close is not None:
        state.send(f"detokenizer.{request.shard}", sequence.close, request.trace)


def _late(request: Request) -> str:
    seconds, generated = request.asked.timeout_us / 1e6, sum(s.generated for s in request.sequences)
    return (
        f"not done within its {seconds:g} s: {generated} tokens generated; "
        "raise timeout_s or ask for fewer tokens"
    )
