"""Executors, detokenizers and other schedulers come and go; their requests go on here.

What an executor or a detokenizer held is rebuilt from this scheduler's record. The requests of another
scheduler that has died come with `take`, from their detokenizers.
"""

from __future__ import annotations

import dataclasses

from services.scheduler import admission, arrival, finish, load_shedding, model_kinds, results
from services.scheduler.kv_tiers import hosts as tiers
from services.scheduler.kv_tiers import lookups
from services.scheduler.preemption import requeue
from services.scheduler.state import requests
from services.scheduler.state.block_pool import BlockPool
from services.scheduler.state.requests import Request, Sequence
from services.scheduler.state.state import Executor, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.messages import (
    MOVED,
    Close,
    ExecHello,
    ExecRefused,
    ExecReset,
    ExecWelcome,
    StepResult,
    Tokenized,
    ints,
    rejection,
)


def hello(state: State, source: str, message: ExecHello) -> None:
    """An executor with empty slots. A repeated hello of a known incarnation is only welcomed. One that
    does not compute as the others do stays out, and is told why."""
    if source != f"executor.{message.executor}":
        return  # it speaks for another
    known, epoch = state.executors.get(message.executor), message.exec_epoch
    if known is None or known.epoch != epoch:
        if known is not None:
            drop_executor(state, message.executor, "the executor restarted")
        state.dropped.pop(message.executor, None)
        if why := model_kinds.refusal(state, message):
            state.excluded[message.executor] = message
            state.send(source, ExecRefused(exec_epoch=epoch, why=why))
            return
        model_kinds.joined(state, message)
        pool = BlockPool(blocks=message.blocks, slots=message.slots, block_tokens=message.block_tokens)
        state.executors[message.executor] = executor = Executor(message, epoch, pool)
        tiers.joined(state, executor)
        state.waiting.unpark(state.now_us)
        state.blocked_on = ()  # the new one may have the same numbers as the old
    state.send(source, ExecWelcome(exec_epoch=epoch))


def step_result(state: State, source: str, result: StepResult) -> None:
    """Apply a result of a known incarnation; a forgotten one is told to start over."""
    executor = state.executors.get(source.removeprefix("executor."))
    if executor is not None and executor.epoch == result.exec_epoch:
        if results.matches_plan(executor, result):
            results.apply_result(state, executor, result)
        else:
            reset_executor(state, executor.hello.executor, "its result does not fit its plan")
    elif executor is None:
        state.send(source, ExecReset(exec_epoch=result.exec_epoch, why="the scheduler has forgotten it"))


def executor_back(state: State, executor_id: str) -> None:
    """An executor that had been given up heartbeats again: its slots are stale, it must start over."""
    epoch = state.dropped.get(executor_id)
    if epoch is not None:
        state.send(f"executor.{executor_id}", ExecReset(exec_epoch=epoch, why="it was given up for dead"))


def executor_leaves(state: State, executor_id: str) -> None:
    """It is gone, or gets nothing new. If it was the last of its kind another one takes over."""
    for waiting in model_kinds.left(state, executor_id):
        hello(state, f"executor.{waiting.executor}", waiting)


def drop_executor(state: State, executor_id: str, why: str, *, died: bool = False) -> None:
    """The executor's memory is gone: its sequences wait again, with all their tokens. `died`: of something,
    which may be what it computed."""
    executor = state.executors.pop(executor_id, None)
    if executor is None:
        return
    state.note_dropped(executor_id, executor.epoch)
    tiers.executor_gone(state, executor)
    culprits = _blame(executor) if died and not executor.draining else []
    for sequence in executor.running:
        sequence.leave()
        sequence.record_decision(state.now_us, "requeue", why, tokens=len(sequence.tokens))
        requeue(state, sequence)
    for request in culprits:
        count = request.executor_deaths
        message = f"{count} executors have died while they computed this request, {executor_id} last"
        finish.fail(state, request, 500, f"{message}: it is not tried again; their logs may say why")


def _blame(executor: Executor) -> list[Request]:
    """An executor has died: it may be of the request that was on trial, or else of any that ran. Those that
    it is certain enough of."""
    tried = admission.request_on_trial(executor)
    suspects = (
        [tried] if tried is not None else list({id(s.request): s.request for s in executor.running}.values())
    )
    for request in suspects:
        request.executor_deaths += 1
        request.tokens_at_death = sum(s.generated for s in request.sequences)
    return [] if tried is None else suspects


def reset_executor(state: State, executor_id: str, why: str) -> None:
    """Make an executor that cannot be trusted start over as a new incarnation."""
    executor = state.executors.get(executor_id)
    if executor is not None:
        state.send(executor.source, ExecReset(exec_epoch=executor.epoch, why=why))
        drop_executor(state, executor_id, why)


def detokenizer_ready(state: State, shard: str, epoch: int) -> None:
    """A detokenizer, or a new incarnation of one: it gets the orphans, and its own back. One that
    had been given up and still lives is told which sequences are no longer its own."""
    moved_epoch, moved = state.moved.pop(shard, (0, []))
    if moved_epoch == epoch:
        for seq in moved:
            state.send(f"detokenizer.{shard}", Close(seq=seq, final=0, reason="moved"))
    state.draining_detokenizers.discard(shard)
    restarted = state.detokenizers.get(shard, epoch) != epoch
    state.detokenizers[shard] = epoch
    for request in list(state.requests.values()):
        if not request.shard or (restarted and request.shard == shard):
            _reopen(state, request.sequences)
        elif not request.backup_shard and request.shard != shard:
            arrival.send_to_backup(state, request)


def detokenizer_leaves(state: State, shard: str) -> None:
    """It gets no new request; those whose scheduler has died may go on there."""
    state.detokenizers.pop(shard, None)
    state.draining_detokenizers.add(shard)


def detokenizer_lost(state: State, shard: str) -> None:
    """Its sequences are opened at another one with all their tokens, or wait for one."""
    state.draining_detokenizers.discard(shard)
    epoch = state.detokenizers.pop(shard, 0)
    lost = [request for request in state.requests.values() if request.shard == shard]
    state.note_moved(shard, epoch, [s.seq for request in lost for s in request.sequences])
    for request in lost:
        _reopen(state, request.sequences)
    for request in state.requests.values():
        if request.backup_shard == shard:
            arrival.send_to_backup(state, request)


def detokenizer_missed(state: State, source: str) -> None:
    """Messages to a detokenizer were lost. What it has open may have a hole, and of some requests it may
    never have heard: all begin a new attempt."""
    for request in list(state.requests.values()):
        if source == f"detokenizer.{request.shard}":
            request.attempt += 1
            arrival.open_at_shard(state, request)
            close_again(state, request.sequences)


def _reopen(state: State, sequences: list[Sequence]) -> None:
    """A new attempt of the reply stream, from the first token on."""
    request = sequences[0].request
    if state.detokenizers:
        request.attempt += 1
    arrival.assign_shard(state, request)
    close_again(state, sequences)


def close_again(state: State, sequences: list[Sequence]) -> None:
    """Sequences that have been opened again, and are over: send their Close again, too."""
    for sequence in sequences:
        if not sequence.live:
            finish.send_close(state, sequence)


def take_over(state: State, source: str, tokenized: Tokenized, trace: str) -> None:
    """Go on with a request at the detokenizer `source`, or refuse it; asked again, it is opened again.

    The scheduler of such a request has died. Its detokenizer knows what was asked and every token that its
    client may have read, and asks for the rest (see services/detokenizer/failover.py). To this scheduler its
    choices are what they would be after the death of their executor: sequences that wait with all their
    tokens. Where a tier still holds their blocks these are brought back, the others are computed again; the
    stream goes on behind its last token.
    """
    key = (tokenized.tenant, tokenized.request)
    if state.tombstones.get(key, 0) < load_shedding.received_us(state, tokenized):
        state.tombstones.pop(key, None)  # of an earlier request with this id
    request = state.requests.get(key)
    if request is not None and request.detached and not any(s.live for s in request.sequences):
        for sequence in list(request.sequences):  # it had gone to another scheduler, and comes back
            finish.forget(state, sequence)
        request = None
    if request is not None and request.tokenized.inbox == tokenized.inbox:
        if source == f"detokenizer.{request.shard}":
            _open_again(state, request, tokenized)
        elif tokenized.attempt > request.attempt:  # what its client has seen last came from this one
            for sequence in request.sequences:
                state.send(f"detokenizer.{request.shard}", Close(seq=sequence.seq, final=0, reason="moved"))
            request.attempt, request.shard = tokenized.attempt, source.removeprefix("detokenizer.")
            _open_again(state, request, tokenized)
        else:
            state.send(source, rejection(tokenized, MOVED, ""), trace)
        return
    tokenized = load_shedding.with_possible_max_tokens(state, tokenized)
    rejected = load_shedding.refuse_takeover(state, source, tokenized)
    if rejected is not None:
        state.send(source, rejected, trace)
        return
    request = _request(state, source, tokenized, trace)
    state.requests[request.key] = request
    arrival.accept(state, source, tokenized)
    arrival.open_sequences(state, request)
    arrival.send_to_backup(state, request)
    _go_on(state, request, tokenized.reasons)


def _open_again(state: State, request: Request, tokenized: Tokenized) -> None:
    source = f"detokenizer.{request.shard}"
    arrival.accept(state, source, tokenized)
    arrival.open_sequences(state, request)
    arrival.send_to_backup(state, request)
    close_again(state, request.sequences)


def _request(state: State, source: str, tokenized: Tokenized, trace: str) -> Request:
    """The request with its choices, as far as they had come."""
    arrival_us, at = state.now_us - tokenized.age_us, load_shedding.prompt_length(tokenized)
    request = Request(
        tokenized=dataclasses.replace(
            tokenized, tokens=tokenized.tokens[:at], generated=ints(), reasons=(), age_us=0, first_us=0
        ),
        trace=trace,
        tokenizer=source,
        arrival_us=arrival_us,
        deadline_us=arrival_us + tokenized.timeout_us,
        level=requests.level_of(tokenized.slo_class),
        attempt=tokenized.attempt,
        shard=source.removeprefix("detokenizer."),
        model_digest=tokenized.model_digest,
    )
    for choice, count in enumerate(tokenized.generated):
        sequence = arrival.new_sequence(state, request, choice)
        request.sequences.append(sequence)
        if not count:
            continue
        sequence.tokens += tokenized.tokens[at : at + count]
        at += count
        sequence.charged_tokens = count
        sequence.most_computed = len(sequence.tokens) - 1  # the device never computed the last one
        sequence.admitted_us = arrival_us  # when it was is not known: its wait counts as prefill
        sequence.first_token_us = arrival_us + tokenized.first_us
    return request


def _go_on(state: State, request: Request, reasons: tuple[str, ...]) -> None:
    """Queue what is not over; choices that have not begun share their prompt, as at first."""
    live: list[Sequence] = []
    for sequence, reason in zip(request.sequences, reasons, strict=True):
        if reason := reason or _over(sequence):
            finish.end(state, sequence, sequence.generated, reason)
        else:
            live.append(sequence)
            state.watch(finish.due_at_us(sequence), sequence.seq)
            why = "its scheduler is gone: this one has its tokens from the detokenizer"
            sequence.record_decision(state.now_us, "resume", why, tokens=len(sequence.tokens))
    if live and not any(sequence.generated for sequence in request.sequences):
        group = SequenceGroup(request, live, live[0].seq)
        for sequence in live:
            sequence.group = group.number
        state.waiting.add(group, state.now_us)
        lookups.arrived(state, group)
        return
    for sequence in live:
        requeue(state, sequence)


def _over(sequence: Sequence) -> str:
    """Why a sequence had ended before its Close could be sent; empty where it goes on."""
    if sequence.generated and sequence.tokens[-1] in sequence.stop_ids:
        return "stop"
    return "length" if len(sequence.tokens) >= sequence.max_length else ""
