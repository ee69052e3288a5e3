"""How a sequence ends: memory goes back at once, the record stays until the detokenizer has spoken."""

from __future__ import annotations

from services.scheduler.recent import Trace
from services.scheduler.records import Phase, Request, Sequence, timings_of
from services.scheduler.state import State
from shared.messages import Close, Ended, SlotClose, StopFound, Usage

ENDED_WITHIN_US = 1_000_000  # after that the record closes without the detokenizer's word


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
    if sequence is not None and sequence.live and found.index <= sequence.generated:
        finish(state, sequence, found.index, "stop")


def ended(state: State, message: Ended) -> None:
    """The detokenizer's last word: index and reason are final."""
    sequence = state.sequences.get(message.seq)
    if sequence is None or sequence.phase is not Phase.CLOSING:
        return
    sequence.final, sequence.reason = min(message.index, sequence.final), message.reason
    forget(state, sequence)


def expire(state: State) -> None:
    """Close what is past its time: running requests, records without an Ended, tombstones."""
    for request in list(state.requests.values()):
        if state.now_us >= request.deadline_us:
            fail(state, request, 408, _late(request))
        for sequence in request.sequences:
            if sequence.phase is Phase.CLOSING and state.now_us >= sequence.close_deadline_us:
                forget(state, sequence)
    state.tombstones = {key: until for key, until in state.tombstones.items() if until > state.now_us}


def forget(state: State, sequence: Sequence) -> None:
    """The record is final; the request goes when its last choice has."""
    sequence.phase = Phase.ENDED
    state.sequences.pop(sequence.seq, None)
    request = sequence.request
    if all(s.phase is Phase.ENDED for s in request.sequences):
        state.requests.pop(request.key, None)
        choices = tuple(_summary(s) for s in request.sequences)
        state.recent.add(request.key, Trace(request.asked.inbox, choices))


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
        state.waiting = [unit for unit in state.waiting if unit.sequences]
    sequence.phase, sequence.final, sequence.reason = Phase.CLOSING, final, reason
    sequence.close_deadline_us = state.now_us + ENDED_WITHIN_US
    sequence.close = Close(
        seq=sequence.seq,
        final=final,
        reason=reason,
        usage=Usage(
            prompt_tokens=sequence.prompt_tokens,
            completion_tokens=final,
            cached_tokens=sequence.cached_tokens,
        ),
        timings=timings_of(sequence),
        decisions=tuple(sequence.decisions),
        code=code,
        message=message,
    )
    send_close(state, sequence)


def send_close(state: State, sequence: Sequence) -> None:
    """(Re)send the Close of a sequence to its shard."""
    request = sequence.request
    if request.shard and sequence.close is not None:
        state.send(f"detokenizer.{request.shard}", sequence.close, request.trace)


def _late(request: Request) -> str:
    seconds, generated = request.asked.timeout_us / 1e6, sum(s.generated for s in request.sequences)
    return (
        f"not done within its {seconds:g} s: {generated} tokens generated; "
        "raise timeout_s or ask for fewer tokens"
    )


def _summary(sequence: Sequence) -> dict[str, object]:
    timings = timings_of(sequence)
    return {
        "choice": sequence.choice,
        "final": sequence.final,
        "reason": sequence.reason,
        "prompt_tokens": sequence.prompt_tokens,
        "timings": {name: getattr(timings, name) for name in timings.__slots__},
        "decisions": [
            {"at_us": d.at_us, "what": d.what, "why": d.why, **dict(d.numbers)} for d in sequence.decisions
        ],
    }
