"""The scheduler's decisions: events in, commands out. No await, no clock, no socket, no randomness.

handle(event): apply it -> admit what fits -> plan while a window is open -> commands

`actor.py` calls it with messages and timers, `loadtest/simulator` with simulated ones. A replay of the same
events at the same times gives the same commands.

After the class: how requests go on when executors, detokenizers and other schedulers join, leave or die.
State that an executor or a detokenizer held is rebuilt from this scheduler's records. The requests of another
scheduler that has died arrive from their detokenizers (`_take_over`).
"""

from __future__ import annotations

import dataclasses

from services.scheduler import (
    admission,
    arrival,
    finish,
    load_shedding,
    model_kinds,
    policy_change,
    results,
    step_planner,
)
from services.scheduler.fleet import moves, roles, sleep
from services.scheduler.kv_tiers import hosts as tiers
from services.scheduler.kv_tiers import load, lookups, store
from services.scheduler.preemption import requeue
from services.scheduler.state import requests
from services.scheduler.state.requests import (
    Arrived,
    DrainRequested,
    DrainTimedOut,
    Event,
    PeerDraining,
    PeerLost,
    PeerReady,
    PolicySet,
    QuotasChanged,
    Request,
    Send,
    Sequence,
    SleepSet,
    StreamLost,
    Ticked,
    TierLost,
    TierReady,
)
from services.scheduler.state.state import Executor, Limits, Sleeper, State
from services.scheduler.state.transfers import Tier
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.messages import (
    MOVED,
    ArenaReleased,
    Cancel,
    Close,
    Detached,
    Ended,
    ExecHello,
    ExecRefused,
    ExecReset,
    ExecSleep,
    ExecWelcome,
    GrammarFailed,
    GrammarReady,
    KvCopied,
    KvFound,
    KvGone,
    KvReady,
    KvReserved,
    KvStored,
    Message,
    StepResult,
    StopFound,
    Tokenized,
    ints,
    rejection,
)

MAX_ACQUITTALS = 8  # then a request that silences executors counts as one that kills them


def decide(state: State) -> None:
    """Admit what fits, copy or drop dirty blocks for room, then fill every open window. A second call without
    an event in between changes nothing."""
    state.idle_since_us = 0 if state.requests else state.idle_since_us or state.now_us
    roles.review(state)
    moves.advance(state)
    for executor in sleep.turn(state):
        _put_to_sleep(state, executor)
    admission.admit(state)
    tiered: list[Executor] = []
    if state.tiers.by_host:
        tiered = [executor for executor in state.executors.values() if executor.pool.write_back]
    while tiered and sum([store.copy_dirty(state, executor) for executor in tiered]):
        moves.advance(state)  # `sum` calls each; some blocks are free now
        admission.admit(state)
    for executor in state.executors.values():
        if executor.settled == executor.changes and not tiered:
            continue  # most executors at most events
        _plan(state, executor)
        if executor.pool.stable_blocks:
            store.copy_dirty(state, executor)
        while executor.running and not executor.in_flight and store.copy_dirty(state, executor):
            # a preempted sequence left its blocks dirty, and no result will come and open the window
            _plan(state, executor)


def _plan(state: State, executor: Executor) -> None:
    while step_planner.plan_next(state, executor):
        pass


class Scheduler:
    """Owns the tokens of every sequence, and every block and slot."""

    def __init__(self, limits: Limits) -> None:
        self.state = State(limits)

    def handle(self, event: Event, now_us: int) -> list[Send]:
        """Apply one event at `now_us` and return what to send. Plans to executors come first: the next step
        is on its way before any token leaves for a client."""
        self.apply(event, now_us)
        decide(self.state)
        return self.taken()

    def apply(self, event: Event, now_us: int) -> None:
        """Update the state with one event, without decisions."""
        self.state.now_us = now_us
        self._apply(event)

    def taken(self) -> list[Send]:
        """The commands since the last call, those to executors first."""
        commands, self.state.commands = self.state.commands, []
        return sorted(commands, key=lambda command: not command.to.startswith("executor."))

    @property
    def idle(self) -> bool:
        """No request is waiting, running or closing, and nothing is being copied."""
        return not self.state.requests and not self.state.tiers.jobs

    @property
    def waits(self) -> bool:
        """A sequence group waits for admission or for a tier: milliseconds matter."""
        state = self.state
        return bool(state.waiting or state.tiers.jobs or state.tiers.lookups or state.draining)

    def _apply(self, event: Event) -> None:
        state = self.state
        match event:
            case Arrived(source, Tokenized() as tokenized, trace) if tokenized.generated:
                _take_over(state, source, tokenized, trace)
            case Arrived(source, Tokenized() as tokenized, trace, transit_us):
                arrival.arrive(state, source, tokenized, trace, transit_us)
            case Arrived(source, message):
                self._apply_message(source, message)
            case PeerReady("detokenizer", actor, epoch):
                _detokenizer_ready(state, actor, epoch)
            case PeerDraining("detokenizer", actor):
                _detokenizer_leaves(state, actor)
            case PeerDraining("executor", actor):
                executor = state.executors.get(actor)
                if executor is not None and not executor.draining:
                    executor.draining, executor.drains_since_us = True, state.now_us
                    state.some_leave = True
                _executor_leaves(state, actor)
            case PeerLost("detokenizer", actor):
                _detokenizer_lost(state, actor)
            case PeerReady("executor", actor, epoch, generation):
                if generation >= 0:
                    tiers.on_arena_mapped(state, actor, generation)
                _executor_back(state, actor, epoch)
            case PeerLost("executor", actor, died):
                why = "the executor is gone" if died else "the executor belongs to another scheduler now"
                _drop_executor(state, actor, why, died=died)
                state.asleep.pop(actor, None)
                _executor_leaves(state, actor)
                state.tiers.mapped.pop(actor, None)
            case TierReady():
                tier = Tier(event.actor, event.epoch, event.host_id, event.generation)
                tiers.ready(state, tier)
            case TierLost(actor):
                tiers.lost(state, actor)
            case StreamLost(source) if source.startswith("executor."):
                _reset_executor(state, source.removeprefix("executor."), "its results were lost")
            case StreamLost(source):
                _detokenizer_missed(state, source)  # a Detached without sequences may be among the lost
            case Ticked():
                finish.expire(state)
                tiers.expire(state)
            case DrainRequested():
                state.draining = True
            case DrainTimedOut():
                finish.fail_all(state)
            case QuotasChanged(quotas):
                state.quotas.set(quotas)
            case PolicySet(policy):
                policy_change.apply(state, policy)
            case SleepSet():
                sleep.ask(state, event)

    def _apply_message(self, source: str, message: Message) -> None:
        state = self.state
        match message:
            case StepResult():
                _step_result(state, source, message)
            case GrammarReady() | GrammarFailed():
                results.grammar_ended(state, source, message)
            case StopFound():
                finish.stop_found(state, message)
            case Ended():
                finish.ended(state, source, message)
            case Cancel():
                arrival.cancel(state, source, message)
            case Detached(seqs=seqs) if not seqs:
                _detokenizer_missed(state, source)
            case Detached():
                arrival.detach(state, source, message)
            case ExecHello():
                _executor_hello(state, source, message)
            case ArenaReleased():
                tiers.on_arena_released(state, source, message)
            case KvFound():
                lookups.on_found(state, source, message)
            case KvReserved():
                store.reserved(state, source, message)
            case KvStored():
                store.stored(state, source, message)
            case KvReady():
                load.ready(state, source, message)
            case KvCopied():
                tiers.copied(state, source, message)
            case KvGone():
                tiers.on_evicted(state, source, message)


def _executor_hello(state: State, source: str, message: ExecHello) -> None:
    """An executor with empty slots joins. A repeated hello of a known incarnation is only welcomed. An
    executor of another kind is refused with the reason (model_kinds.py)."""
    if source != f"executor.{message.executor}":
        return  # sent in another executor's name
    known, epoch = state.executors.get(message.executor), message.exec_epoch
    if known is None or known.epoch != epoch:
        if known is not None:
            _drop_executor(state, message.executor, "the executor restarted")
        state.dropped.pop(message.executor, None)
        if why := model_kinds.refusal(state, message):
            state.excluded[message.executor] = message
            state.send(source, ExecRefused(exec_epoch=epoch, why=why))
            return
        model_kinds.joined(state, message)
        if message.asleep:
            sleep.joined(state, message)
            state.send(source, ExecWelcome(exec_epoch=epoch))
            return
        state.asleep.pop(message.executor, None)
        tiers.joined(state, state.add_executor(message))
        state.waiting.unpark(state.now_us)
        state.blocked_on = ()  # a new incarnation may have the same numbers as the old one
        arrival.executors_changed(state)
    state.send(source, ExecWelcome(exec_epoch=epoch))


def _step_result(state: State, source: str, result: StepResult) -> None:
    """Apply a result of a known incarnation; reset an unknown one."""
    executor = state.executors.get(source.removeprefix("executor."))
    if executor is not None and executor.epoch == result.exec_epoch:
        if results.matches_plan(executor, result):
            results.apply_result(state, executor, result)
        else:
            _reset_executor(state, executor.hello.executor, "its result does not fit its plan")
    elif executor is None:
        state.send(source, ExecReset(exec_epoch=result.exec_epoch, why="the scheduler has no record of it"))


def _put_to_sleep(state: State, executor: Executor) -> None:
    name = executor.hello.executor
    state.send(executor.source, ExecSleep(exec_epoch=executor.epoch))
    state.asleep[name] = Sleeper(executor.hello)
    _drop_executor(state, name, "it goes to sleep")
    del state.dropped[name]  # it is not lost


def _executor_back(state: State, executor_id: str, started_us: int) -> None:
    """An executor that counted as dead sends heartbeats again: its slots are stale, so it is reset. If it is
    the same process it was only silent, so the requests that were blamed for its death are acquitted."""
    if (dropped := state.dropped.get(executor_id)) is None:
        return
    state.send(
        f"executor.{executor_id}",
        ExecReset(exec_epoch=dropped.epoch, why="its heartbeats stopped: its sequences are queued again"),
    )
    if started_us > dropped.epoch:
        return
    for request in map(state.requests.get, dropped.blamed):
        if request is not None and request.acquittals < MAX_ACQUITTALS:
            request.acquittals += 1
            request.executor_deaths -= 1
    dropped.blamed.clear()


def _executor_leaves(state: State, executor_id: str) -> None:
    """An executor is gone or drains. If it was the last of its kind, another kind takes over."""
    for waiting in model_kinds.left(state, executor_id):
        _executor_hello(state, f"executor.{waiting.executor}", waiting)
    arrival.executors_changed(state)


def _drop_executor(state: State, executor_id: str, why: str, *, died: bool = False) -> None:
    """The executor's memory is gone: queue its sequences again, with all their tokens. `died`: it crashed,
    and one of its requests may be the cause."""
    executor = state.pop_executor(executor_id)
    if executor is None:
        return
    tiers.executor_gone(state, executor)
    blamed = _blame(state, executor) if died and not executor.draining else []
    state.note_dropped(executor_id, executor.epoch, [request.key for request in blamed])
    for sequence in executor.running:
        sequence.leave()
        sequence.record_decision(state.now_us, "requeue", why, tokens=len(sequence.tokens))
        requeue(state, sequence)
    arrival.executors_changed(state)
    for request in blamed:
        if (count := request.executor_deaths) >= admission.MOST_DEATHS:
            message = f"{count} executors have died while they computed this request, {executor_id} last"
            finish.fail(state, request, 500, f"{message}: it is not tried again; see their logs")


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


def _reset_executor(state: State, executor_id: str, why: str) -> None:
    """Make an executor start over as a new incarnation, because its state is in doubt."""
    executor = state.executors.get(executor_id)
    if executor is not None:
        state.send(executor.source, ExecReset(exec_epoch=executor.epoch, why=why))
        _drop_executor(state, executor_id, why)


def _detokenizer_ready(state: State, shard: str, epoch: int) -> None:
    """A detokenizer joins, or a new incarnation of one: it gets the requests without a detokenizer, and its
    own again. One that counted as dead and still lives gets a Close for each sequence that has moved."""
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


def _detokenizer_leaves(state: State, shard: str) -> None:
    """A detokenizer drains: it gets no new request. Requests of a dead scheduler may continue there."""
    state.detokenizers.pop(shard, None)
    state.draining_detokenizers.add(shard)


def _detokenizer_lost(state: State, shard: str) -> None:
    """A detokenizer is gone: open its sequences at another one with all their tokens, when there is one."""
    state.draining_detokenizers.discard(shard)
    epoch = state.detokenizers.pop(shard, 0)
    lost = [request for request in state.requests.values() if request.shard == shard]
    state.note_moved(shard, epoch, [s.seq for request in lost for s in request.sequences])
    for request in lost:
        _reopen(state, request.sequences)
    for request in state.requests.values():
        if request.backup_shard == shard:
            arrival.send_to_backup(state, request)


def _detokenizer_missed(state: State, source: str) -> None:
    """Messages to a detokenizer were lost. Its texts may have holes, and it may lack requests: all start a
    new attempt."""
    for request in list(state.requests.values()):
        if source == f"detokenizer.{request.shard}":
            request.attempt += 1
            arrival.open_at_shard(state, request)
            _fail_unscored(state, request)
            _close_again(state, request.sequences)


def _reopen(state: State, sequences: list[Sequence]) -> None:
    """Start a new attempt of the reply stream, from the first token."""
    request = sequences[0].request
    if state.detokenizers:
        request.attempt += 1
    arrival.assign_shard(state, request)
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
    finish.fail(state, request, 503, why)


def _close_again(state: State, sequences: list[Sequence]) -> None:
    """Send the Close of ended sequences again, after they were opened again."""
    for sequence in sequences:
        if not sequence.live:
            finish.send_close(state, sequence)


def _take_over(state: State, source: str, tokenized: Tokenized, trace: str) -> None:
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
    if request is not None and request.detached and not any(s.live for s in request.sequences):
        for sequence in list(request.sequences):  # it had moved to another scheduler, and comes back
            finish.forget(state, sequence)
        request = None
    if request is not None and request.tokenized.inbox == tokenized.inbox:
        if source == f"detokenizer.{request.shard}":
            _open(state, request, tokenized)
        elif tokenized.attempt > request.attempt:  # `source` was the last to send to the client
            for sequence in request.sequences:
                state.send(f"detokenizer.{request.shard}", Close(seq=sequence.seq, final=0, reason="moved"))
            request.attempt, request.shard = tokenized.attempt, source.removeprefix("detokenizer.")
            _open(state, request, tokenized)
        else:
            state.send(source, rejection(tokenized, MOVED, ""), trace)
        return
    tokenized = load_shedding.with_possible_max_tokens(state, tokenized)
    rejected = load_shedding.refuse_takeover(state, source, tokenized)
    if rejected is not None:
        state.send(source, rejected, trace)
        return
    over = bool(tokenized.checkpoints) and model_kinds.has_changed(state, tokenized)
    if over:
        tokenized = _from_the_start(tokenized)
    request = _taken_request(state, source, tokenized, trace)
    state.requests[request.key] = request
    _open(state, request, tokenized)
    if over:  # its detokenizer drops the text with the request
        arrival.send_to_shard(state, request)
    _go_on(state, request, tokenized.reasons)


def _from_the_start(tokenized: Tokenized) -> Tokenized:
    """The request without its generated tokens, as the next attempt."""
    return dataclasses.replace(
        tokenized,
        attempt=tokenized.attempt + 1,
        run=tokenized.run and tokenized.run + 1,
        tokens=tokenized.tokens[: load_shedding.prompt_length(tokenized)],
        generated=ints([0] * tokenized.n),
        reasons=("",) * tokenized.n,
        first_us=0,
    )


def _open(state: State, request: Request, tokenized: Tokenized) -> None:
    """Confirm a request to its detokenizer, and open its sequences there."""
    arrival.accept(state, f"detokenizer.{request.shard}", tokenized)
    arrival.open_sequences(state, request)
    arrival.send_to_backup(state, request)
    _close_again(state, request.sequences)


def _taken_request(state: State, source: str, tokenized: Tokenized, trace: str) -> Request:
    """The request with its choices and their generated tokens."""
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
    if not load_shedding.serving(state, tokenized.model):
        request.unchecked = True
        arrival.set_start_deadline(state, request)
    for choice, count in enumerate(tokenized.generated):
        sequence = arrival.new_sequence(state, request, choice)
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
            finish.end(state, sequence, sequence.generated, reason)
        else:
            live.append(sequence)
            state.watch(finish.due_at_us(sequence), sequence.seq)
            why = "its scheduler is gone; its tokens come from the detokenizer"
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
    """Why a sequence has ended although no Close was sent; empty if it has not."""
    if sequence.generated and sequence.tokens[-1] in sequence.stop_ids:
        return "stop"
    return "length" if len(sequence.tokens) >= sequence.max_length else ""
