"""Accepts requests: opens them at a detokenizer and queues them. Handles cancel and detach, too.

`core` calls it with messages of tokenizers, detokenizers and clients, and with requests to open again.
A detokenizer has a copy of each request before its first token: if this scheduler dies, it passes the request
to another one (services/detokenizer/failover.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import accumulate

from services.scheduler import finish, load_shedding, model_kinds, prefix_cache
from services.scheduler.kv_tiers import lookups
from services.scheduler.state import requests
from services.scheduler.state.requests import MAX_IDS, Request, Scores, Sequence, add_scores
from services.scheduler.state.state import State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.kv_blocks import choice_seed, rendezvous
from shared.messages import ATTEMPTS, MOVED, Accepted, Cancel, Close, Detached, Open, Tokenized, Tokens, ints

CLIENT = "client"  # source of messages that come from no service
MAX_TOMBSTONES = 10_000  # then the oldest go: a client may cancel requests that never existed


def arrive(state: State, source: str, tokenized: Tokenized, trace: str, transit_us: int = 0) -> None:
    """Accept a request and open its text at a detokenizer, or refuse it."""
    key = (tokenized.tenant, tokenized.request)
    if _known(state, tokenized):
        accept(state, source, tokenized)
        return
    tokenized = load_shedding.with_possible_max_tokens(state, tokenized)
    rejected = load_shedding.refuse(state, tokenized)
    if rejected is not None:
        state.send(source, rejected, trace)
        return
    request = Request(
        tokenized=tokenized,
        trace=trace,
        tokenizer=source,
        arrival_us=state.now_us,
        deadline_us=state.now_us + tokenized.timeout_us,
        level=requests.level_of(tokenized.slo_class),
        unchecked=not load_shedding.serving(state, tokenized.model),
        transit_us=transit_us,
        attempt=tokenized.attempt,
        model_digest=model_kinds.expected(state, tokenized.model),
    )
    set_start_deadline(state, request)
    request.sequences = [new_sequence(state, request, choice) for choice in range(tokenized.n)]
    state.requests[key] = request
    state.quotas.charge(tokenized.tenant, state.now_us, requests=1, tokens=len(tokenized.tokens))
    for executor in state.executors.values():  # hash the prompt now, not while a step waits for the plan
        if executor.hello.model == tokenized.model:
            prefix_cache.extend_keys(executor, request.sequences[0])
            break
    group = SequenceGroup(request, list(request.sequences), request.sequences[0].seq)
    for sequence in request.sequences:
        sequence.group = group.number
        state.watch(finish.due_at_us(sequence), sequence.seq)
    state.waiting.add(group, state.now_us)
    lookups.arrived(state, group)
    accept(state, source, tokenized)
    assign_shard(state, request)


def set_start_deadline(state: State, request: Request) -> None:
    """From now on a request that has not begun waits for an executor, or for its turn. The wait for an
    executor does not count against its class's limit."""
    if not load_shedding.serving(state, request.tokenized.model):
        request.executor_deadline_us = state.now_us + load_shedding.executor_wait_us(state)
        return
    limit_us = state.limits.classes[request.level].ttft_us
    request.start_deadline_us = state.now_us + limit_us if limit_us else 0
    request.executor_deadline_us = 0


def executors_changed(state: State) -> None:
    """Executors have joined, left or begun to drain: requests begin or end their wait for one. One that
    came before an executor, and fits none, is refused."""
    may_wait = load_shedding.executor_wait_us(state) > 0  # if not, requests keep their time limit alone
    for request in list(state.requests.values()):
        tokenized = request.tokenized
        waits, serves = bool(request.executor_deadline_us), load_shedding.serving(state, tokenized.model)
        if waits != bool(serves) or any(s.admitted_us or not s.live for s in request.sequences):
            continue
        if not (serves or may_wait):
            continue
        set_start_deadline(state, request)
        for sequence in request.sequences:
            state.watch(finish.due_at_us(sequence), sequence.seq)
        if serves and request.unchecked:
            request.unchecked = False
            request.tokenized = tokenized = load_shedding.with_possible_max_tokens(state, tokenized)
            for sequence in request.sequences:
                sequence.max_length = sequence.prompt_tokens + tokenized.max_tokens
            if (why := load_shedding.unfit(state, tokenized, len(tokenized.tokens))) is not None:
                state.counters.count_rejected(why[0])
                finish.fail(state, request, *why)


def assign_shard(state: State, request: Request) -> None:
    """Choose the request's detokenizer, if one is alive, and open its sequences there."""
    request.shard = rendezvous(request.tokenized.request, state.detokenizers) if state.detokenizers else ""
    if request.shard:
        open_at_shard(state, request)


def open_at_shard(state: State, request: Request) -> None:
    """Open the sequences of a request at its detokenizer, and send it a copy of the request."""
    open_sequences(state, request)
    request.opened_us = state.now_us
    send_to_shard(state, request)


def send_to_shard(state: State, request: Request) -> None:
    """Send the request and its model digest to its detokenizer, if it has one: if this scheduler dies, the
    detokenizer passes the request to another one."""
    if not request.shard:
        return
    tokenized = request.tokenized
    if request.model_digest != tokenized.model_digest:
        tokenized = dataclasses.replace(tokenized, model_digest=request.model_digest)
    if (age_us := request.opened_us - request.arrival_us) > 0:  # not the first time
        began_us = [s.first_token_us - request.arrival_us for s in request.sequences if s.first_token_us]
        tokenized = dataclasses.replace(tokenized, age_us=age_us, first_us=min(began_us, default=0))
    state.send(f"detokenizer.{request.shard}", tokenized, request.trace)
    send_to_backup(state, request)


def send_to_backup(state: State, request: Request) -> None:
    """Send the request to a second detokenizer, if there is one: if this scheduler and the first detokenizer
    die, it passes the request to another scheduler, which starts over."""
    others = [shard for shard in state.detokenizers if shard != request.shard]
    request.backup_shard = rendezvous(request.tokenized.request, others) if others else ""
    if request.backup_shard:
        copy = dataclasses.replace(
            request.tokenized,
            shard=request.shard,
            attempt=request.attempt,
            age_us=max(state.now_us - request.arrival_us, 0),
        )
        state.send(f"detokenizer.{request.backup_shard}", copy, request.trace)


def open_sequences(state: State, request: Request) -> None:
    """Open the sequences of a request at a detokenizer that has the request."""
    for sequence in request.sequences:
        held = min(sequence.generated, sequence.final) if not sequence.live else sequence.generated
        scores = sequence.scores
        apart = scores is not None and not scores.first  # tokens follow with their log probabilities
        state.send(f"detokenizer.{request.shard}", _open(sequence, 0 if apart else held), request.trace)
        if scores is not None and apart:
            for message in _scored_tokens(sequence, scores, held):
                state.send(f"detokenizer.{request.shard}", message)


def _scored_tokens(sequence: Sequence, scores: Scores, held: int) -> Iterator[Tokens]:
    """The first `held` generated tokens with their log probabilities."""
    starts = list(accumulate(scores.top_counts, initial=0))
    ids = sequence.tokens[sequence.prompt_tokens : sequence.prompt_tokens + held]
    for at in range(0, held, MAX_IDS):
        piece = ids[at : at + MAX_IDS]
        seqs, first, counts = ints([sequence.seq]), ints([at]), ints([len(piece)])
        message = Tokens(executor="", step=0, seqs=seqs, first=first, counts=counts, ids=piece)
        for index in range(at, at + len(piece)):
            add_scores(message, scores, index, slice(starts[index], starts[index + 1]))
        yield message


def _open(sequence: Sequence, held: int) -> Open:
    """The Open of a sequence with its first `held` generated tokens."""
    request, tokenized = sequence.request, sequence.request.tokenized
    return Open(
        seq=sequence.seq,
        request=tokenized.request,
        attempt=request.attempt,
        tenant=tokenized.tenant,
        model=tokenized.model,
        inbox=tokenized.inbox,
        choice=sequence.choice,
        choices=tokenized.n,
        stream=tokenized.stream,
        format=tokenized.format,
        stop=tokenized.stop,
        include_stop=tokenized.include_stop,
        logprobs=tokenized.logprobs,
        received_wall_us=tokenized.received_wall_us,
        prompt_tokens=sequence.prompt_tokens,
        tokens=sequence.tokens[sequence.prompt_tokens : sequence.prompt_tokens + held],
        include_usage=tokenized.include_usage,
        parent_span=tokenized.parent_span,
        stop_ids=tokenized.stop_ids,
        min_tokens=tokenized.min_tokens,
        answer_format=tokenized.answer_format,
        most_calls=tokenized.most_calls,
        run=tokenized.run,
    )


def cancel(state: State, source: str, message: Cancel) -> None:
    """Stop a request. An unknown id leaves a tombstone, since a client's cancel may overtake the request; the
    cancel of a service cannot. An ended or refused request leaves none: its id may be used again."""
    key = (message.tenant, message.request)
    request = state.requests.get(key)
    if request is not None:
        if message.code == MOVED:  # its detokenizer, if it lives, must send nothing more
            for sequence in request.sequences:
                moved = Close(seq=sequence.seq, final=0, reason="moved")
                state.send(f"detokenizer.{request.shard}", moved)
        code, why = (message.code, message.message) if message.code else (499, "cancelled by the client")
        finish.fail(state, request, code, why)
    elif source == CLIENT and key not in state.ended.by_key and key not in state.refused:
        if len(state.tombstones) >= MAX_TOMBSTONES:
            del state.tombstones[next(iter(state.tombstones))]
        state.tombstones.pop(key, None)  # the oldest are first
        state.tombstones[key] = state.now_us


def detach(state: State, source: str, message: Detached) -> None:
    """Stop sequences without a reader, unless the request asks to be finished anyway. Ignores sequences that
    have moved to another detokenizer since."""
    for seq in message.seqs:
        sequence = state.sequences.get(seq)
        if sequence is None or source != f"detokenizer.{sequence.request.shard}":
            continue
        sequence.request.detached = True
        if message.moved or not sequence.request.tokenized.finish_detached:
            why = "another scheduler has it" if message.moved else "the client has gone"
            finish.fail(state, sequence.request, 499, why)


def _known(state: State, tokenized: Tokenized) -> bool:
    """True for a resend of a running or ended request: the same id and inbox. A request that a tokenizer
    received after that one's end is new: its client has lost the answer.

    The stamp of the tokenizer's wall clock names a submission and is compared for equality alone. Which of
    two submissions came first is a question of ages, by this scheduler's clock."""
    key = (tokenized.tenant, tokenized.request)
    request = state.requests.get(key)
    if request is not None:
        return request.tokenized.inbox == tokenized.inbox
    ended = state.ended.by_key.get(key)
    if ended is None or ended.inbox != tokenized.inbox:
        return False
    if tokenized.received_wall_us == ended.record.received_wall_us:
        return True
    taken_over = tokenized.attempt > ATTEMPTS  # perhaps the same submission, from a second tokenizer
    margin_us = load_shedding.OVERTAKE_US if taken_over else 0
    return load_shedding.received_us(state, tokenized) <= ended.ended_us + margin_us


def accept(state: State, source: str, tokenized: Tokenized) -> None:
    """Confirm a request to its sender."""
    accepted = Accepted(tenant=tokenized.tenant, request=tokenized.request, attempt=tokenized.attempt)
    state.send(source, accepted)


def new_sequence(state: State, request: Request, choice: int) -> Sequence:
    """A sequence for a choice of a request, with its prompt. Its number is unique among live ones."""
    tokenized = request.tokenized
    sequence = Sequence(
        seq=state.next_seq,
        request=request,
        choice=choice,
        seed=choice_seed(tokenized.seed, choice),
        tokens=tokenized.tokens[:],
        prompt_tokens=len(tokenized.tokens),
        max_length=len(tokenized.tokens) + tokenized.max_tokens,
        stop_ids=frozenset(tokenized.stop_ids),
        host_fed=bool(tokenized.processors),
        scores=Scores() if tokenized.logprobs else None,
    )
    state.next_seq = state.next_seq % 0x7FFFFFFF + 1
    state.sequences[sequence.seq] = sequence
    return sequence
