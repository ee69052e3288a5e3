"""Accepts requests: opens them at a detokenizer and queues them. Handles cancel and detach, too.

`core` calls it with messages of tokenizers, detokenizers and clients, and with requests to open again.
A detokenizer has a copy of each request before its first token: if this scheduler dies, it passes the request
to another one (services/detokenizer/failover.py).

Ends sequences: their blocks are free at once, their entry stays until the detokenizer sends Ended.

`results`, `arrival` and `core` call it. A sequence ends once: after that it is not live.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import accumulate

from services.scheduler import headroom, load_shedding, prefix_cache
from services.scheduler.kv_tiers import lookups
from services.scheduler.load_shedding import no_executor
from services.scheduler.state import requests
from services.scheduler.state.state import State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared import messages
from shared.codec import open_of
from shared.errors import drain_over
from shared.kv_blocks import choice_seed, rendezvous
from shared.telemetry.traces import Reply

CLIENT = "client"  # source of messages that come from no service
MAX_TOMBSTONES = 10_000  # then the oldest go: a client may cancel requests that never existed


def on_request(
    state: State, source: str, tokenized: messages.Tokenized, trace: str, transit_us: int = 0
) -> None:
    """Accept a request and open its text at a detokenizer, or refuse it."""
    key = (tokenized.tenant, tokenized.request)
    if _is_resend(state, tokenized):
        accept(state, source, tokenized)
        return
    tokenized = load_shedding.with_possible_max_tokens(state, tokenized)
    rejected = load_shedding.refuse(state, tokenized)
    if rejected is not None:
        state.send(source, rejected, trace)
        return
    request = requests.Request(
        tokenized=tokenized,
        trace=trace,
        tokenizer=source,
        arrival_us=state.now_us,
        deadline_us=state.now_us + tokenized.timeout_us,
        level=requests.level_of(tokenized.slo_class),
        unchecked=not load_shedding.serving(state, tokenized.model),
        transit_us=transit_us,
        attempt=tokenized.attempt,
        model_digest=load_shedding.expected_kind(state, tokenized.model),
    )
    set_start_deadline(state, request)
    request.sequences = [new_sequence(state, request, choice) for choice in range(tokenized.n)]
    state.requests[key] = request
    state.sessions.on_request(state, request)
    state.quotas.charge(tokenized.tenant, state.now_us, requests=1, tokens=len(tokenized.tokens))
    for executor in state.executors.values():  # hash the prompt now, not while a step waits for the plan
        if executor.hello.model == tokenized.model:
            prefix_cache.extend_keys(executor, request.sequences[0])
            break
    group = SequenceGroup(request, list(request.sequences), request.sequences[0].seq)
    for sequence in request.sequences:
        sequence.group = group.number
        state.watch(sequence.due_us, sequence.seq)
    state.waiting.add(group, state.now_us)
    lookups.on_request(state, group)
    accept(state, source, tokenized)
    assign_shard(state, request)


def set_start_deadline(state: State, request: requests.Request) -> None:
    """From now on a request that has not begun waits for an executor, or for its turn. The wait for an
    executor does not count against its class's limit."""
    if not load_shedding.serving(state, request.tokenized.model):
        request.executor_deadline_us = state.now_us + load_shedding.executor_wait_us(state)
        return
    limit_us = state.limits.classes[request.level].ttft_us
    request.start_deadline_us = state.now_us + limit_us if limit_us else 0
    request.executor_deadline_us = 0


def on_executors_changed(state: State) -> None:
    """Executors have joined, left or begun to drain: requests begin or end their wait for one. One that
    came before an executor, and fits none, is refused."""
    may_wait = load_shedding.executor_wait_us(state) > 0  # if not, requests keep their time limit alone
    for request in list(state.requests.values()):
        tokenized = request.tokenized
        waits, serves = bool(request.executor_deadline_us), load_shedding.serving(state, tokenized.model)
        if waits != bool(serves) or any(s.admitted_us or not s.is_live for s in request.sequences):
            continue
        if not (serves or may_wait):
            continue
        set_start_deadline(state, request)
        for sequence in request.sequences:
            state.watch(sequence.due_us, sequence.seq)
        if serves and request.unchecked:
            request.unchecked = False
            request.tokenized = tokenized = load_shedding.with_possible_max_tokens(state, tokenized)
            for sequence in request.sequences:
                sequence.max_length = sequence.prompt_tokens + tokenized.max_tokens
            if (why := load_shedding.unfit(state, tokenized, len(tokenized.tokens))) is not None:
                state.counters.count_rejected(why[0])
                fail(state, request, *why)


def assign_shard(state: State, request: requests.Request) -> None:
    """Choose the request's detokenizer, if one is alive, and open its sequences there."""
    request.shard = rendezvous(request.tokenized.request, state.detokenizers) if state.detokenizers else ""
    if request.shard:
        open_at_shard(state, request)


def open_at_shard(state: State, request: requests.Request) -> None:
    """Open the sequences of a request at its detokenizer, and send it a copy of the request."""
    open_sequences(state, request)
    request.opened_us = state.now_us
    send_to_shard(state, request)


def send_to_shard(state: State, request: requests.Request) -> None:
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


def send_to_backup(state: State, request: requests.Request) -> None:
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


def open_sequences(state: State, request: requests.Request) -> None:
    """Open the sequences of a request at a detokenizer that has the request."""
    for sequence in request.sequences:
        held = min(sequence.generated, sequence.final) if not sequence.is_live else sequence.generated
        scores = sequence.scores
        apart = scores is not None and not scores.first  # tokens follow with their log probabilities
        state.send(f"detokenizer.{request.shard}", _open(sequence, 0 if apart else held), request.trace)
        if scores is not None and apart:
            for message in _scored_tokens(sequence, scores, held):
                state.send(f"detokenizer.{request.shard}", message)
    for piece in request.prompt_scores:
        state.send(f"detokenizer.{request.shard}", dataclasses.replace(piece, seq=request.sequences[0].seq))


def _scored_tokens(
    sequence: requests.Sequence, scores: requests.Scores, held: int
) -> Iterator[messages.Tokens]:
    """The first `held` generated tokens with their log probabilities."""
    starts = list(accumulate(scores.top_counts, initial=0))
    ids = sequence.tokens[sequence.prompt_tokens : sequence.prompt_tokens + held]
    for at in range(0, held, requests.MAX_IDS):
        piece = ids[at : at + requests.MAX_IDS]
        seqs, first, counts = messages.ints([sequence.seq]), messages.ints([at]), messages.ints([len(piece)])
        message = messages.Tokens(executor="", step=0, seqs=seqs, first=first, counts=counts, ids=piece)
        for index in range(at, at + len(piece)):
            requests.add_scores(message, scores, index, slice(starts[index], starts[index + 1]))
        yield message


def _open(sequence: requests.Sequence, held: int) -> messages.Open:
    """The Open of a sequence with its first `held` generated tokens."""
    request, tokenized = sequence.request, sequence.request.tokenized
    begin = sequence.prompt_tokens
    return open_of(
        tokenized,
        seq=sequence.seq,
        attempt=request.attempt,
        choice=sequence.choice,
        prompt_tokens=begin,
        tokens=sequence.tokens[begin : begin + held],
    )


def on_cancel(state: State, source: str, message: messages.Cancel) -> None:
    """Stop a request. An unknown id leaves a tombstone, since a client's cancel may overtake the request; the
    cancel of a service cannot. An ended or refused request leaves none: its id may be used again."""
    key = (message.tenant, message.request)
    request = state.requests.get(key)
    if request is not None:
        if message.code == messages.MOVED:  # its detokenizer, if it lives, must send nothing more
            for sequence in request.sequences:
                moved = messages.Close(seq=sequence.seq, final=0, reason="moved")
                state.send(f"detokenizer.{request.shard}", moved)
        code, why = (message.code, message.message) if message.code else (499, "cancelled by the client")
        fail(state, request, code, why)
    elif source == CLIENT and key not in state.ended.by_key and key not in state.refused:
        if len(state.tombstones) >= MAX_TOMBSTONES:
            del state.tombstones[next(iter(state.tombstones))]
        state.tombstones.pop(key, None)  # the oldest are first
        state.tombstones[key] = state.now_us


def on_detached(state: State, source: str, message: messages.Detached) -> None:
    """Stop sequences without a reader, unless the request asks to be finished anyway. Ignores sequences that
    have moved to another detokenizer since."""
    for seq in message.seqs:
        sequence = state.sequences.get(seq)
        if sequence is None or source != f"detokenizer.{sequence.request.shard}":
            continue
        sequence.request.detached = True
        if message.moved or not sequence.request.tokenized.finish_detached:
            why = "another scheduler has it" if message.moved else "the client has gone"
            fail(state, sequence.request, 499, why)


def _is_resend(state: State, tokenized: messages.Tokenized) -> bool:
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
    if tokenized.received_wall_us == ended.facts.received_wall_us:
        return True
    taken_over = tokenized.attempt > messages.ATTEMPTS  # perhaps the same submission, from a second tokenizer
    margin_us = load_shedding.OVERTAKE_US if taken_over else 0
    return load_shedding.received_us(state, tokenized) <= ended.ended_us + margin_us


def accept(state: State, source: str, tokenized: messages.Tokenized) -> None:
    """Confirm a request to its sender."""
    accepted = messages.Accepted(
        tenant=tokenized.tenant, request=tokenized.request, attempt=tokenized.attempt
    )
    state.send(source, accepted)


def new_sequence(state: State, request: requests.Request, choice: int) -> requests.Sequence:
    """A sequence for a choice of a request, with its prompt. Its number is unique among live ones."""
    tokenized = request.tokenized
    sequence = requests.Sequence(
        seq=state.next_seq,
        request=request,
        choice=choice,
        seed=choice_seed(tokenized.seed, choice),
        tokens=tokenized.tokens[:],
        prompt_tokens=len(tokenized.tokens),
        max_length=len(tokenized.tokens) + tokenized.max_tokens,
        stop_ids=frozenset(tokenized.stop_ids),
        host_fed=bool(tokenized.processors),
        scores=requests.Scores() if tokenized.logprobs else None,
    )
    state.next_seq = state.next_seq % 0x7FFFFFFF + 1
    state.sequences[sequence.seq] = sequence
    return sequence


TOMBSTONE_US = 60_000_000


def finish(state: State, sequence: requests.Sequence, final: int, reason: str) -> None:
    """End a live sequence normally after `final` generated tokens."""
    if not sequence.vector:
        headroom.observe_output(state, final)
    first_us, last_us = sequence.first_token_us, sequence.last_token_us
    state.counters.add_ended(
        state.now_us - sequence.request.arrival_us, last_us - first_us, sequence.generated
    )
    end(state, sequence, final, reason)


def end(state: State, sequence: requests.Sequence, final: int, reason: str) -> None:
    """End a live sequence after `final` generated tokens, without counting it in the statistics."""
    sequence.close = _close(state, sequence, final, reason)
    send_close(state, sequence)


def fail(state: State, request: requests.Request, code: int, message: str, retry_after_ms: int = 0) -> None:
    """End the live choices of a request with a typed error for its client."""
    for sequence in request.sequences:
        if sequence.is_live:
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


def on_stop_found(state: State, found: messages.StopFound) -> None:
    """End a sequence at `found.index` generated tokens, where a stop string ends."""
    sequence = state.sequences.get(found.seq)
    if sequence is not None and sequence.is_live and 0 < found.index <= sequence.generated:
        finish(state, sequence, found.index, "stop")


def on_ended(state: State, source: str, message: messages.Ended) -> None:
    """Take the final index and reason from the detokenizer that owns the sequence. Others are ignored: a new
    incarnation also sends Ended for sequences that it never had."""
    sequence = state.sequences.get(message.seq)
    if sequence is None or sequence.phase is not requests.Phase.CLOSING:
        return
    if source != f"detokenizer.{sequence.request.shard}":
        return
    sequence.final, sequence.reason = min(message.index, sequence.final), message.reason
    sequence.request.calls += message.calls
    if message.sent_wall_us:
        sequence.request.reply = Reply(
            first_us=message.first_wall_us, built_us=message.built_wall_us, sent_us=message.sent_wall_us
        )
    forget(state, sequence)


def expire(state: State) -> None:
    """End or forget what is overdue: waiting and running requests, entries without an Ended, tombstones."""
    while (seq := state.deadlines.pop(state.now_us)) is not None:
        sequence = state.sequences.get(seq)
        if sequence is None:
            continue
        if (at_us := sequence.due_us) > state.now_us:
            state.watch(at_us, seq)
        elif not sequence.is_live and sequence.request.shard and state.now_us < sequence.request.deadline_us:
            send_close(state, sequence)  # its detokenizer lives, and may still miss messages
        elif not sequence.is_live:
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


def forget(state: State, sequence: requests.Sequence) -> None:
    """Remove a sequence with its final count; with its last choice, remove the request."""
    sequence.phase = requests.Phase.ENDED
    state.sequences.pop(sequence.seq, None)
    request = sequence.request
    if all(s.phase is requests.Phase.ENDED for s in request.sequences):
        state.requests.pop(request.key, None)
        state.suspects.discard(request.key)
        _count_usage(state, request)
        state.sessions.on_ended(state, request)
        state.ended.add(
            request.key,
            requests.EndedRequest(
                request.tokenized.inbox,
                request.trace,
                requests.request_facts(request, state.now_us),
                state.now_us,
            ),
        )
        request.sequences = []  # breaks the reference cycle, so that it is freed now


def _count_usage(state: State, request: requests.Request) -> None:
    """Count an ended request of its tenant. The choices of a request share one prompt."""
    first = request.sequences[0]
    usage = messages.Usage(
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        completion_tokens=sum(sequence.final for sequence in request.sequences),
    )
    state.counters.add_usage(request.tokenized.tenant, usage)


def _close(state: State, sequence: requests.Sequence, final: int, reason: str) -> messages.Close:
    """Free a sequence's blocks and build its Close. The device ends a row itself at a stop id: the KV of the
    last token is never computed."""
    request = sequence.request
    state.waiting.served.charge_output(request.client, max(sequence.generated - sequence.charged_tokens, 0))
    state.quotas.charge(request.tokenized.tenant, state.now_us, requests=0, tokens=sequence.generated)
    if sequence.phase is requests.Phase.RUNNING:
        if (executor := state.executors.get(sequence.executor)) is not None:
            state.sessions.on_closed(state, executor, sequence)
        headroom.withdraw(state, sequence, len(sequence.tokens) - 1)
    else:
        state.waiting.drop(sequence)
    state.counters.count_finished(reason)
    sequence.phase, sequence.final, sequence.reason = requests.Phase.CLOSING, final, reason
    return requests.close_of(sequence, state.now_us, final, reason)


def send_close(state: State, sequence: requests.Sequence) -> None:
    """(Re)send the Close of a sequence to its shard, and wait for its Ended."""
    request = sequence.request
    sequence.close_deadline_us = state.now_us + state.limits.ended_within_us
    state.watch(sequence.due_us, sequence.seq)
    if request.shard and sequence.close is not None:
        state.send(f"detokenizer.{request.shard}", sequence.close, request.trace)


def _late(request: requests.Request) -> str:
    seconds, generated = request.tokenized.timeout_us / 1e6, sum(s.generated for s in request.sequences)
    return (
        f"not done within its {seconds:g} s: {generated} tokens generated; "
        "raise timeout_s or ask for fewer tokens"
    )


def _kept_waiting(state: State, request: requests.Request) -> tuple[str, int]:
    """The message for a request that did not start in time, and when to retry, ms."""
    waited_s = (state.now_us - request.arrival_us) / 1e6
    message = (
        f"waited {waited_s:.1f} s in the queue, the limit of class {request.tokenized.slo_class}: nothing "
        "was computed; try again later, or ask in class batch"
    )
    return message, max(1_000, int(waited_s * 500))
