"""Ends sequences: their blocks are free at once, their record stays until the detokenizer sends Ended.

`results`, `arrival` and `core` call it. A sequence ends once: after that it is not live.
"""

from __future__ import annotations

import dataclasses

from services.scheduler import headroom
from services.scheduler.load_shedding import no_executor
from services.scheduler.preemption import withdraw
from services.scheduler.state.requests import EndedRequest, Phase, Request, Sequence, close_of, request_record
from services.scheduler.state.state import State
from shared.errors import drain_over
from shared.messages import Close, Ended, StopFound, Usage
from shared.telemetry.traces import Reply

TOMBSTONE_US = 60_000_000


def finish(state: State, sequence: Sequence, final: int, reason: str) -> None:
    """End a live sequence normally after `final` generated tokens."""
    if not sequence.vector:
        headroom.observe_output(state, final)
    first_us, last_us = sequence.first_token_us, sequence.last_token_us
    state.counters.add_ended(
        state.now_us - sequence.request.arrival_us, last_us - first_us, sequence.generated
    )
    end(state, sequence, final, reason)


def end(state: State, sequence: Sequence, final: int, reason: str) -> None:
    """End a live sequence after `final` generated tokens, without counting it in the statistics."""
    sequence.close = _close(state, sequence, final, reason)
    send_close(state, sequence)


def fail(state: State, request: Request, code: int, message: str, retry_after_ms: int = 0) -> None:
    """End the live choices of a request with a typed error for its client."""
    for sequence in request.sequences:
        if sequence.live:
            close = _close(state, sequence, sequence.generated, "error")
            sequence.close = dataclasses.replace(
                close, code=code, message=message, retry_after_ms=retry_after_ms
            )
            send_close(state, sequence)


def fail_all(state: State) -> None:
    """End all requests: the drain's time is over."""
    error = drain_over("scheduler")
    for request in list(state.requests.values()):
        fail(state, request, error.code, error.message, error.retry_after_ms)


def stop_found(state: State, found: StopFound) -> None:
    """End a sequence at `found.index` generated tokens, where a stop string ends."""
    sequence = state.sequences.get(found.seq)
    if sequence is not None and sequence.live and 0 < found.index <= sequence.generated:
        finish(state, sequence, found.index, "stop")


def ended(state: State, source: str, message: Ended) -> None:
    """Take the final index and reason from the detokenizer that owns the sequence. Others are ignored: a new
    incarnation also sends Ended for sequences that it never had."""
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
    """End or forget what is overdue: waiting and running requests, records without an Ended, tombstones."""
    while (seq := state.deadlines.pop(state.now_us)) is not None:
        sequence = state.sequences.get(seq)
        if sequence is None:
            continue
        if (at_us := due_at_us(sequence)) > state.now_us:
            state.watch(at_us, seq)
        elif not sequence.live and sequence.request.shard and state.now_us < sequence.request.deadline_us:
            send_close(state, sequence)  # its detokenizer lives, and may still miss messages
        elif not sequence.live:
            forget(state, sequence)
        elif state.now_us >= sequence.request.deadline_us:
            fail(state, sequence.request, 408, _late(sequence.request))
        elif sequence.request.executor_deadline_us:
            state.counters.count_rejected(503)
            fail(state, sequence.request, *no_executor(sequence.request.tokenized))
        else:
            state.counters.count_rejected(429)
            fail(state, sequence.request, 429, *_kept_waiting(state, sequence.request))
    while state.tombstones and next(iter(state.tombstones.values())) <= state.now_us - TOMBSTONE_US:
        del state.tombstones[next(iter(state.tombstones))]
    while state.refused and (first := next(iter(state.refused.items())))[1][0] <= state.now_us:
        del state.refused[first[0]]


def due_at_us(sequence: Sequence) -> int:
    """When a live sequence is overdue, or the wait for a closing one's Ended is over."""
    request = sequence.request
    late_us, silent_us = request.deadline_us, sequence.close_deadline_us
    if sequence.live:
        begun = any(s.admitted_us for s in request.sequences)
        start_us = request.executor_deadline_us or request.start_deadline_us
        return late_us if begun or not start_us else min(late_us, start_us)
    return silent_us if request.shard else max(silent_us, late_us)  # no detokenizer has its Close yet


def forget(state: State, sequence: Sequence) -> None:
    """Remove a sequence with a final record; with its last choice, remove the request."""
    sequence.phase = Phase.ENDED
    state.sequences.pop(sequence.seq, None)
    request = sequence.request
    if all(s.phase is Phase.ENDED for s in request.sequences):
        state.requests.pop(request.key, None)
        state.suspects.discard(request.key)
        _count_usage(state, request)
        state.ended.add(
            request.key,
            EndedRequest(
                request.tokenized.inbox, request.trace, request_record(request, state.now_us), state.now_us
            ),
        )
        request.sequences = []  # breaks the reference cycle, so that it is freed now


def _count_usage(state: State, request: Request) -> None:
    """Count an ended request of its tenant. The choices of a request share one prompt."""
    first = request.sequences[0]
    usage = Usage(
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        completion_tokens=sum(sequence.final for sequence in request.sequences),
    )
    state.counters.add_usage(request.tokenized.tenant, usage)


def _close(state: State, sequence: Sequence, final: int, reason: str) -> Close:
    """Free a sequence's blocks and build its Close. The device ends a row itself at a stop id: the KV of the
    last token is never computed."""
    request = sequence.request
    state.waiting.served.charge_output(request.client, max(sequence.generated - sequence.charged_tokens, 0))
    state.quotas.charge(request.tokenized.tenant, state.now_us, requests=0, tokens=sequence.generated)
    if sequence.phase is Phase.RUNNING:
        withdraw(state, sequence, len(sequence.tokens) - 1)
    else:
        state.waiting.drop(sequence)
    state.counters.count_finished(reason)
    sequence.phase, sequence.final, sequence.reason = Phase.CLOSING, final, reason
    return close_of(sequence, state.now_us, final, reason)


def send_close(state: State, sequence: Sequence) -> None:
    """(Re)send the Close of a sequence to its shard, and wait for its Ended."""
    request = sequence.request
    sequence.close_deadline_us = state.now_us + state.limits.ended_within_us
    state.watch(due_at_us(sequence), sequence.seq)
    if request.shard and sequence.close is not None:
        state.send(f"detokenizer.{request.shard}", sequence.close, request.trace)


def _late(request: Request) -> str:
    seconds, generated = request.tokenized.timeout_us / 1e6, sum(s.generated for s in request.sequences)
    return (
        f"not done within its {seconds:g} s: {generated} tokens generated; "
        "raise timeout_s or ask for fewer tokens"
    )


def _kept_waiting(state: State, request: Request) -> tuple[str, int]:
    """The message for a request that did not start in time, and when to retry, ms."""
    waited_s = (state.now_us - request.arrival_us) / 1e6
    message = (
        f"waited {waited_s:.1f} s in the queue, the limit of class {request.tokenized.slo_class}: nothing "
        "was computed; try again later, or ask in class batch"
    )
    return message, max(1_000, int(waited_s * 500))
