"""How requests go on when executors, detokenizers, kv_offloads and other schedulers join, leave or die.

`core` calls it. State that an executor or a detokenizer held is rebuilt from what this scheduler has. The
requests of another scheduler that has died arrive from their detokenizers (`on_takeover`). Copies and lookups
of a lost kv_offload end at once. A host has one in use, others stand by.
"""

from __future__ import annotations

import dataclasses

from services.scheduler import admission, lifecycle, load_shedding
from services.scheduler.executors import sleep
from services.scheduler.kv_tiers import lookups, store
from services.scheduler.load_shedding import DIGEST_CHARS, serving, shown_kind
from services.scheduler.preemption import requeue
from services.scheduler.state import requests
from services.scheduler.state.requests import (
    Request,
    Sequence,
)
from services.scheduler.state.state import Executor, ModelKind, Sleeper, State
from services.scheduler.state.transfers import JobPhase, Offload
from services.scheduler.state.waiting_queue import SequenceGroup
from shared import messages
from shared.errors import rejection
from shared.messages import ExecHello, Tokenized

MAX_ACQUITTALS = 8  # then a request that silences executors counts as one that kills them


def on_executor_hello(state: State, source: str, message: messages.ExecHello) -> None:
    """An executor with empty slots joins. A repeated hello of a known incarnation is only welcomed. An
    executor of another kind is refused with the reason (load_shedding.py)."""
    if source != f"executor.{message.executor}":
        return  # sent in another executor's name
    known, epoch = state.executors.get(message.executor), message.exec_epoch
    if known is None or known.epoch != epoch:
        if known is not None:
            drop_executor(state, message.executor, "the executor restarted")
        state.dropped.pop(message.executor, None)
        if why := kind_refusal(state, message):
            state.excluded[message.executor] = message
            state.send(source, messages.ExecRefused(exec_epoch=epoch, why=why))
            return
        on_executor_joined(state, message)
        if message.asleep:
            sleep.on_asleep(state, message)
            state.send(source, messages.ExecWelcome(exec_epoch=epoch))
            return
        state.asleep.pop(message.executor, None)
        connect_offload(state, state.add_executor(message))
        state.waiting.unpark(state.now_us)
        state.blocked_on = ()  # a new incarnation may have the same numbers as the old one
        lifecycle.on_executors_changed(state)
    state.send(source, messages.ExecWelcome(exec_epoch=epoch))


def put_to_sleep(state: State, executor: Executor) -> None:
    name = executor.hello.executor
    state.send(executor.source, messages.ExecSleep(exec_epoch=executor.epoch))
    state.asleep[name] = Sleeper(executor.hello)
    drop_executor(state, name, "it goes to sleep")
    del state.dropped[name]  # it is not lost


def on_executor_back(state: State, executor_id: str, started_us: int) -> None:
    """An executor that counted as dead sends heartbeats again: its slots are stale, so it is reset. If it is
    the same process it was only silent, so the requests that were blamed for its death are acquitted."""
    if (dropped := state.dropped.get(executor_id)) is None:
        return
    state.send(
        f"executor.{executor_id}",
        messages.ExecReset(
            exec_epoch=dropped.epoch, why="its heartbeats stopped: its sequences are queued again"
        ),
    )
    if started_us > dropped.epoch:
        return
    for request in map(state.requests.get, dropped.blamed):
        if request is not None and request.acquittals < MAX_ACQUITTALS:
            request.acquittals += 1
            request.executor_deaths -= 1
    dropped.blamed.clear()


def on_executor_leaving(state: State, executor_id: str) -> None:
    """An executor is gone or drains. If it was the last of its kind, another kind takes over."""
    for waiting in on_executor_left(state, executor_id):
        on_executor_hello(state, f"executor.{waiting.executor}", waiting)
    lifecycle.on_executors_changed(state)


def drop_executor(state: State, executor_id: str, why: str, *, died: bool = False) -> None:
    """The executor's memory is gone: queue its sequences again, with all their tokens. `died`: it crashed,
    and one of its requests may be the cause."""
    executor = state.pop_executor(executor_id)
    if executor is None:
        return
    _end_copies(state, executor)
    blamed = _blame(state, executor) if died and not executor.draining else []
    state.note_dropped(executor_id, executor.epoch, [request.key for request in blamed])
    for sequence in executor.running:
        sequence.leave()
        sequence.record_decision(state.now_us, "requeue", why, tokens=len(sequence.tokens))
        requeue(state, sequence)
    lifecycle.on_executors_changed(state)
    for request in blamed:
        if (count := request.executor_deaths) >= admission.MOST_DEATHS:
            message = f"{count} executors have died while they computed this request, {executor_id} last"
            lifecycle.fail(state, request, 500, f"{message}: it is not tried again; see their logs")


def _blame(state: State, executor: Executor) -> list[Request]:
    """Count the death of an executor against the request on trial, or against all that ran if none was.
    Returns these requests."""
    tried = admission.request_on_trial(executor)
    running = {id(s.request): s.request for s in executor.running}
    blamed = list(running.values()) if tried is None else [tried]
    for request in blamed:
        request.executor_deaths += 1
        state.suspects.add(request.key)
        request.tokens_at_death = sum(s.generated for s in request.sequences)
    return blamed


def reset_executor(state: State, executor_id: str, why: str) -> None:
    """Make an executor start over as a new incarnation, because its state is in doubt."""
    executor = state.executors.get(executor_id)
    if executor is not None:
        state.send(executor.source, messages.ExecReset(exec_epoch=executor.epoch, why=why))
        drop_executor(state, executor_id, why)


def on_detokenizer_ready(state: State, shard: str, epoch: int) -> None:
    """A detokenizer joins, or a new incarnation of one: it gets the requests without a detokenizer, and its
    own again. One that counted as dead and still lives gets a Close for each sequence that has moved."""
    moved_epoch, moved = state.moved.pop(shard, (0, []))
    if moved_epoch == epoch:
        for seq in moved:
            state.send(f"detokenizer.{shard}", messages.Close(seq=seq, final=0, reason="moved"))
    state.draining_detokenizers.discard(shard)
    restarted = state.detokenizers.get(shard, epoch) != epoch
    state.detokenizers[shard] = epoch
    for request in list(state.requests.values()):
        if not request.shard or (restarted and request.shard == shard):
            _reopen(state, request.sequences)
        elif not request.backup_shard and request.shard != shard:
            lifecycle.send_to_backup(state, request)


def on_detokenizer_draining(state: State, shard: str) -> None:
    """A detokenizer drains: it gets no new request. Requests of a dead scheduler may continue there."""
    state.detokenizers.pop(shard, None)
    state.draining_detokenizers.add(shard)


def on_detokenizer_lost(state: State, shard: str) -> None:
    """A detokenizer is gone: open its sequences at another one with all their tokens, when there is one."""
    state.draining_detokenizers.discard(shard)
    epoch = state.detokenizers.pop(shard, 0)
    lost = [request for request in state.requests.values() if request.shard == shard]
    state.note_moved(shard, epoch, [s.seq for request in lost for s in request.sequences])
    for request in lost:
        _reopen(state, request.sequences)
    for request in state.requests.values():
        if request.backup_shard == shard:
            lifecycle.send_to_backup(state, request)


def on_messages_lost(state: State, source: str) -> None:
    """Messages to a detokenizer were lost. Its texts may have holes, and it may lack requests: all start a
    new attempt."""
    for request in list(state.requests.values()):
        if source == f"detokenizer.{request.shard}":
            request.attempt += 1
            lifecycle.open_at_shard(state, request)
            _fail_unscored(state, request)
            _close_again(state, request.sequences)


def _reopen(state: State, sequences: list[Sequence]) -> None:
    """Start a new attempt of the reply stream, from the first token."""
    request = sequences[0].request
    if state.detokenizers:
        request.attempt += 1
    lifecycle.assign_shard(state, request)
    _fail_unscored(state, request)
    _close_again(state, sequences)


def _fail_unscored(state: State, request: Request) -> None:
    """Fail a request that asks for log probabilities which only its lost detokenizer had, since another
    scheduler has generated the first tokens."""
    if not any(s.scores is not None and s.scores.first for s in request.sequences):
        return
    why = "its scheduler and then its detokenizer have gone, and log probabilities with them; send it again"
    for sequence in request.sequences:
        if sequence.close is not None:
            sequence.close = dataclasses.replace(sequence.close, reason="error", code=503, message=why)
    lifecycle.fail(state, request, 503, why)


def _close_again(state: State, sequences: list[Sequence]) -> None:
    """Send the Close of ended sequences again, after they were opened again."""
    for sequence in sequences:
        if not sequence.is_live:
            lifecycle.send_close(state, sequence)


def on_takeover(state: State, source: str, tokenized: messages.Tokenized, trace: str) -> None:
    """Continue a request of a dead scheduler at the detokenizer `source`, or refuse it.

    The detokenizer has the request and every token that its client may have read
    (services/detokenizer/failover.py). Its choices are queued as after the death of their executor: with all
    their tokens. Blocks that a tier holds are loaded, others are computed again, and the stream goes on after
    its last token. A repeated message opens the request again.
    """
    key = (tokenized.tenant, tokenized.request)
    if state.tombstones.get(key, 0) < load_shedding.received_us(state, tokenized):
        state.tombstones.pop(key, None)  # left by an earlier request with this id
    request = state.requests.get(key)
    if request is not None and request.detached and not any(s.is_live for s in request.sequences):
        for sequence in list(request.sequences):  # it had moved to another scheduler, and comes back
            lifecycle.forget(state, sequence)
        request = None
    if request is not None and request.tokenized.inbox == tokenized.inbox:
        if source == f"detokenizer.{request.shard}":
            _open(state, request, tokenized)
        elif tokenized.attempt > request.attempt:  # `source` was the last to send to the client
            for sequence in request.sequences:
                state.send(
                    f"detokenizer.{request.shard}", messages.Close(seq=sequence.seq, final=0, reason="moved")
                )
            request.attempt, request.shard = tokenized.attempt, source.removeprefix("detokenizer.")
            _open(state, request, tokenized)
        else:
            state.send(source, rejection(tokenized, messages.MOVED, ""), trace)
        return
    tokenized = load_shedding.with_possible_max_tokens(state, tokenized)
    rejected = load_shedding.refuse_takeover(state, source, tokenized)
    if rejected is not None:
        state.send(source, rejected, trace)
        return
    over = bool(tokenized.savepoints) and has_changed_kind(state, tokenized)
    if over:
        tokenized = _from_the_start(tokenized)
    request = _taken_request(state, source, tokenized, trace)
    state.requests[request.key] = request
    _open(state, request, tokenized)
    if over:  # its detokenizer drops the text with the request
        lifecycle.send_to_shard(state, request)
    _go_on(state, request, tokenized.reasons)


def _from_the_start(tokenized: messages.Tokenized) -> messages.Tokenized:
    """The request without its generated tokens, as the next attempt."""
    return dataclasses.replace(
        tokenized,
        attempt=tokenized.attempt + 1,
        run=tokenized.run and tokenized.run + 1,
        tokens=tokenized.tokens[: load_shedding.prompt_length(tokenized)],
        generated=messages.ints([0] * tokenized.n),
        reasons=("",) * tokenized.n,
        first_us=0,
    )


def _open(state: State, request: Request, tokenized: messages.Tokenized) -> None:
    """Confirm a request to its detokenizer, and open its sequences there."""
    lifecycle.accept(state, f"detokenizer.{request.shard}", tokenized)
    lifecycle.open_sequences(state, request)
    lifecycle.send_to_backup(state, request)
    _close_again(state, request.sequences)


def _taken_request(state: State, source: str, tokenized: messages.Tokenized, trace: str) -> Request:
    """The request with its choices and their generated tokens."""
    arrival_us, at = state.now_us - tokenized.age_us, load_shedding.prompt_length(tokenized)
    request = Request(
        tokenized=dataclasses.replace(
            tokenized,
            tokens=tokenized.tokens[:at],
            generated=messages.ints(),
            reasons=(),
            age_us=0,
            first_us=0,
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
    if not load_shedding.serving(state, tokenized.model):
        request.unchecked = True
        lifecycle.set_start_deadline(state, request)
    for choice, count in enumerate(tokenized.generated):
        sequence = lifecycle.new_sequence(state, request, choice)
        request.sequences.append(sequence)
        if not count:
            continue
        sequence.tokens += tokenized.tokens[at : at + count]
        at += count
        if sequence.scores is not None:
            sequence.scores.first = count
        sequence.charged_tokens = count
        sequence.most_computed = len(sequence.tokens) - 1  # the device never computed the last one
        sequence.admitted_us = arrival_us  # not known: its wait counts as prefill
        sequence.first_token_us = arrival_us + tokenized.first_us
    return request


def _go_on(state: State, request: Request, reasons: tuple[str, ...]) -> None:
    """Queue the choices that have not ended. If none has started they share their prompt, in one group."""
    live: list[Sequence] = []
    for sequence, reason in zip(request.sequences, reasons, strict=True):
        if reason := reason or _over(sequence):
            lifecycle.end(state, sequence, sequence.generated, reason)
        else:
            live.append(sequence)
            state.watch(sequence.due_us, sequence.seq)
            why = "its scheduler is gone; its tokens come from the detokenizer"
            sequence.record_decision(state.now_us, "resume", why, tokens=len(sequence.tokens))
    if live and not any(sequence.generated for sequence in request.sequences):
        group = SequenceGroup(request, live, live[0].seq)
        for sequence in live:
            sequence.group = group.number
        state.waiting.add(group, state.now_us)
        lookups.on_request(state, group)
        return
    for sequence in live:
        requeue(state, sequence)


def _over(sequence: Sequence) -> str:
    """Why a sequence has ended although no Close was sent; empty if it has not."""
    if sequence.generated and sequence.tokens[-1] in sequence.stop_ids:
        return "stop"
    return "length" if len(sequence.tokens) >= sequence.max_length else ""


def on_offload_ready(state: State, offload: Offload) -> None:
    """A kv_offload with an arena is ready. A new generation has lost the content of the old one."""
    if state.limits.policy.no_tiers:
        state.tiers.standby[offload.actor] = offload  # another policy may use it: see use_tiers
        return
    known = state.tiers.by_host.get(offload.host_id)
    if known is not None and known.actor != offload.actor and known.epoch > offload.epoch:
        state.tiers.standby[offload.actor] = offload
        return  # of two on a host the later one is used: the executors map its arena
    if known is not None and (known.actor, known.generation) == (offload.actor, offload.generation):
        known.epoch = offload.epoch
        return
    if known is not None:
        _end_offload(state, known)
        if known.actor != offload.actor:
            state.tiers.standby[known.actor] = known
    state.tiers.standby.pop(offload.actor, None)
    state.tiers.by_host[offload.host_id] = offload
    for executor in state.executors.values():
        if executor.hello.host_id == offload.host_id:
            connect_offload(state, executor)


def on_offload_lost(state: State, actor: str) -> None:
    """A kv_offload is gone, with its content. Running copies end later. A standby of its host replaces it,
    even one that seemed older: a clock may have gone back."""
    state.tiers.standby.pop(actor, None)
    offload = next((offload for offload in state.tiers.by_host.values() if offload.actor == actor), None)
    if offload is None:
        return
    _end_offload(state, offload)
    others = [other for other in state.tiers.standby.values() if other.host_id == offload.host_id]
    if others:
        on_offload_ready(state, max(others, key=lambda other: (other.epoch, other.actor)))


def use_tiers(state: State, use: bool) -> None:
    """The policy has changed: use the tiers of all hosts, or none of them."""
    if use:
        latest_first = sorted(
            state.tiers.standby.values(), key=lambda offload: (offload.epoch, offload.actor)
        )[::-1]
        for offload in latest_first:
            on_offload_ready(state, offload)
    else:
        for offload in list(state.tiers.by_host.values()):
            _end_offload(state, offload)
            state.tiers.standby[offload.actor] = offload


def _end_offload(state: State, offload: Offload) -> None:
    actor = offload.actor
    del state.tiers.by_host[offload.host_id]
    state.tiers.lookups = {
        job: lookup for job, lookup in state.tiers.lookups.items() if lookup.offload != actor
    }
    for group in state.waiting:
        results = group.lookup_results
        group.lookup_results = {target: results[target] for target in results if target[0] != actor}
    for job in [job for job in state.tiers.jobs.values() if job.offload == actor]:
        if job.phase is not JobPhase.COPYING:
            store.expire_job(state, job)
    for executor in state.executors.values():
        if executor.hello.host_id == offload.host_id:
            executor.pool.set_tier(False)


def connect_offload(state: State, executor: Executor) -> None:
    """An executor or a kv_offload has joined: connect them if both are there."""
    hello = executor.hello
    if hello.bytes_per_block and hello.host_id in state.tiers.by_host:
        executor.pool.set_tier(True)


def _end_copies(state: State, executor: Executor) -> None:
    """An executor is gone, with its blocks. A copy that it may still make keeps its ranges of the arena until
    kv_offload frees them: the scheduler cannot see when it ends."""
    for job in [job for job in state.tiers.jobs.values() if job.executor == executor.hello.executor]:
        lookups.finish(state, job, release=job.up or job.phase is JobPhase.REQUESTED)


def on_arena_mapped(state: State, executor_id: str, generation: int) -> None:
    """Note which arena an executor maps, 0 for none: no copies before it is that of kv_offload."""
    state.tiers.mapped[executor_id] = generation


def on_arena_released(state: State, source: str, message: messages.ArenaReleased) -> None:
    """An executor has unmapped an arena: its kv_offload can free the ranges that it might have written."""
    if source != f"executor.{message.executor}":
        return
    for offload in state.tiers.by_host.values():
        if offload.generation == message.arena_generation:
            state.send(offload.source, message)


def kind_refusal(state: State, hello: ExecHello) -> str:
    """Why an executor stays out; empty if it may join."""
    if state.limits.accept_mixed:
        return ""
    wanted = state.limits.model_digest
    if wanted and hello.model_digest != wanted:
        return (
            f"its model digest is {shown_kind(hello)}, and {wanted[:DIGEST_CHARS]} is configured "
            f"(model_digest): {_differences(state, hello, wanted)}; or change the setting"
        )
    kind = state.model_kinds.get(hello.model)
    if kind is None or kind.digest == hello.model_digest or kind.members <= {hello.executor}:
        return ""
    return (
        f"its model digest is {shown_kind(hello)}, and {', '.join(sorted(kind.members))} of {hello.model!r} "
        f"has {kind.digest[:DIGEST_CHARS] or 'none'}: {_differences(state, hello, kind.digest)}; or start it "
        "with another --model-name, or the scheduler with --accept-mixed. It takes over when none of "
        "those is left"
    )


def _differences(state: State, hello: ExecHello, digest: str) -> str:
    """What differs between an executor and those with a model digest, and how to start it instead."""
    known = [*(e.hello for e in state.executors.values()), *(e.hello for e in state.asleep.values())]
    like = (each for each in known if (each.model, each.model_digest) == (hello.model, digest))
    if (theirs := next(like, hello)).flags == hello.flags and theirs.weights == hello.weights:
        return "start it with the same weights, dtype, KV format and deterministic mode"
    found = []
    if theirs.weights != hello.weights:
        shown = f"{hello.weights[:DIGEST_CHARS]} and theirs {theirs.weights[:DIGEST_CHARS]}"
        found.append(f"the digest of its weights is {shown}: start it with the same file")
    if other := [flag for flag in hello.flags if flag not in theirs.flags]:
        instead = [flag for flag in theirs.flags if flag not in hello.flags]
        found.append(f"it runs with {' '.join(other)}: start it with {' '.join(instead)}")
    return ", and ".join(found)


def on_executor_joined(state: State, hello: ExecHello) -> None:
    """Note that an executor serves. The first of a model decides its kind."""
    state.excluded.pop(hello.executor, None)
    kind = state.model_kinds.get(hello.model)
    if kind is None or kind.members <= {hello.executor}:
        kind = state.model_kinds[hello.model] = ModelKind(hello.model_digest)
    if kind.digest == hello.model_digest:
        kind.members.add(hello.executor)


def on_executor_left(state: State, executor_id: str) -> list[ExecHello]:
    """Note that an executor is gone or drains. Returns the excluded executors that may join now: all of the
    kind that has waited longest."""
    state.excluded.pop(executor_id, None)
    next_ones: list[ExecHello] = []
    for model, kind in list(state.model_kinds.items()):
        kind.members.discard(executor_id)
        if kind.members:
            continue
        del state.model_kinds[model]
        outside = [hello for hello in state.excluded.values() if hello.model == model]
        may = [hello for hello in outside if not kind_refusal(state, hello)]
        next_ones += [hello for hello in may if hello.model_digest == may[0].model_digest]
    return next_ones


def has_changed_kind(state: State, tokenized: Tokenized) -> bool:
    """Whether executors serve the model, and none of the kind that generated the tokens of a request."""
    digests = {e.hello.model_digest for e in serving(state, tokenized.model)}
    return bool(digests) and tokenized.model_digest not in digests
