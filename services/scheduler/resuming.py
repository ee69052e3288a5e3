"""Requests whose scheduler has died go on here.

The detokenizer of such a request knows what was asked and every token that its client may have read, and
asks for the rest (see services/detokenizer/orphans.py). To this scheduler its choices are what they would be
after the death of their executor: sequences that wait with all their tokens. Where a tier still holds their
blocks these are brought back, the others are computed again; the stream goes on behind its last token.
"""

from __future__ import annotations

import dataclasses

from services.scheduler import classes, closing, door, fleet, intake
from services.scheduler.leaving import wait_again
from services.scheduler.records import Request, Sequence
from services.scheduler.state import State
from services.scheduler.tiers import asking
from services.scheduler.waiting import Unit
from shared.messages import MOVED, Close, Tokenized, ints, rejection


def take(state: State, source: str, asked: Tokenized, trace: str) -> None:
    """Go on with a request at the detokenizer `source`, or refuse it; asked again, it is opened again."""
    key = (asked.tenant, asked.request)
    if state.tombstones.get(key, 0) < state.now_us - asked.age_us + intake.TOMBSTONE_US:
        state.tombstones.pop(key, None)  # of an earlier request with this id
    request = state.requests.get(key)
    if request is not None and request.detached and not any(s.live for s in request.sequences):
        for sequence in list(request.sequences):  # it had gone to another scheduler, and comes back
            closing.forget(state, sequence)
        request = None
    if request is not None and request.asked.inbox == asked.inbox:
        if source == f"detokenizer.{request.shard}":
            _open_again(state, request, asked)
        elif asked.attempt > request.attempt:  # what its client has seen last came from this one
            for sequence in request.sequences:
                state.send(f"detokenizer.{request.shard}", Close(seq=sequence.seq, final=0, reason="moved"))
            request.attempt, request.shard = asked.attempt, source.removeprefix("detokenizer.")
            _open_again(state, request, asked)
        else:
            state.send(source, rejection(asked, MOVED, ""), trace)
        return
    rejected = door.refused_again(state, source, asked)
    if rejected is not None:
        state.send(source, rejected, trace)
        return
    request = _request(state, source, asked, trace)
    state.requests[request.key] = request
    intake.accept(state, source, asked)
    intake.open_sequences(state, request)
    _go_on(state, request, asked.reasons)


def _open_again(state: State, request: Request, asked: Tokenized) -> None:
    source = f"detokenizer.{request.shard}"
    intake.accept(state, source, asked)
    intake.open_sequences(state, request)
    fleet.close_again(state, request.sequences)


def _request(state: State, source: str, asked: Tokenized, trace: str) -> Request:
    """The request with its choices, as far as they had come."""
    arrival_us, at = state.now_us - asked.age_us, door.prompt_length(asked)
    request = Request(
        asked=dataclasses.replace(
            asked, tokens=asked.tokens[:at], generated=ints(), reasons=(), age_us=0, first_us=0
        ),
        trace=trace,
        tokenizer=source,
        arrival_us=arrival_us,
        deadline_us=arrival_us + asked.timeout_us,
        level=classes.level_of(asked.slo_class),
        attempt=asked.attempt,
        shard=source.removeprefix("detokenizer."),
    )
    for choice, count in enumerate(asked.generated):
        sequence = intake.new_sequence(state, request, choice)
        request.sequences.append(sequence)
        if not count:
            continue
        sequence.tokens += asked.tokens[at : at + count]
        at += count
        sequence.charged = count
        sequence.reach = len(sequence.tokens) - 1  # the device never computed the last one
        sequence.admitted_us = arrival_us  # when it was is not known: its wait counts as prefill
        sequence.first_token_us = arrival_us + asked.first_us
    return request


def _go_on(state: State, request: Request, reasons: tuple[str, ...]) -> None:
    """Queue what is not over; choices that have not begun share their prompt, as at first."""
    live: list[Sequence] = []
    for sequence, reason in zip(request.sequences, reasons, strict=True):
        if reason := reason or _over(sequence):
            closing.end(state, sequence, sequence.generated, reason)
        else:
            live.append(sequence)
            state.due.watch(closing.due_at_us(sequence), sequence.seq)
            why = "its scheduler is gone: this one has its tokens from the detokenizer"
            sequence.decide(state.now_us, "resume", why, tokens=len(sequence.tokens))
    if live and not any(sequence.generated for sequence in request.sequences):
        unit = Unit(request, live, live[0].seq)
        for sequence in live:
            sequence.unit = unit.number
        state.waiting.add(unit, state.now_us)
        asking.arrived(state, unit)
        return
    for sequence in live:
        wait_again(state, sequence)


def _over(sequence: Sequence) -> str:
    """Why a sequence had ended before its Close could be sent; empty where it goes on."""
    if sequence.generated and sequence.tokens[-1] in sequence.stop_ids:
        return "stop"
    return "length" if len(sequence.tokens) >= sequence.max_length else ""
