"""The scheduler's decisions: events in, commands out. No await, no clock, no socket, no randomness.

handle(event): apply it -> admit what fits -> plan while a window is open -> commands

`actor.py` calls it with messages and timers, `loadtest/simulator` with simulated ones. A replay of the same
events at the same times gives the same commands.

Changes the policy between two steps: `PolicySet`, which `core` applies, and the operator's request for it.

Each decision reads its policy again, so a change needs no more than what is kept between decisions: the heaps
and counters of `order`, the tiers in use, and what admission saw when the first group had to wait. A running
sequence keeps the blocks that its `reservation` gave it, as a pinned one does under any policy.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pkgutil import resolve_name

from services.scheduler import admission, lifecycle, load_shedding, recovery, results, step_planner
from services.scheduler.executors import moves, roles, sleep
from services.scheduler.kv_tiers import load, lookups, store
from services.scheduler.state import policies, requests
from services.scheduler.state.policies import BASELINES, Policy
from services.scheduler.state.state import Executor, Limits, NoSessions, SessionEvents, State
from services.scheduler.state.transfers import Offload
from shared import messages
from shared.errors import SetupError

SESSIONS = {  # the part that follows sessions
    "learned": "services.scheduler.sessions.events:Sessions",
}


_CUTS = (requests.PeerLost, requests.StreamLost, requests.BrokerBack)  # pauses across them teach nothing


@cache
def session_parts() -> list[type[SessionEvents]]:
    """The parts that follow sessions, whose modules are loaded by this call."""
    return [resolve_name(name) for name in SESSIONS.values()]


def decide(state: State) -> None:
    """Admit what fits, copy or drop dirty blocks for room, then fill every open window. A sequence that is
    preempted for the plan of another one waits for the next event, also where another executor has room."""
    state.idle_since_us = 0 if state.requests else state.idle_since_us or state.now_us
    roles.review(state)
    moves.advance(state)
    for executor in sleep.wake_and_drain(state):
        recovery.put_to_sleep(state, executor)
    if state.waiting.parked and (part := load_shedding.adapting()) is not None:
        part.review(state)
    admission.admit(state)
    tiered: list[Executor] = []
    if state.tiers.by_host:
        tiered = [executor for executor in state.executors.values() if executor.pool.write_back]
    while _copy_dirty(state, tiered):
        moves.advance(state)  # some blocks are free now
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


def _copy_dirty(state: State, executors: list[Executor]) -> bool:
    """Start the copies of each executor. True if blocks of one have become free."""
    freed = [store.copy_dirty(state, executor) for executor in executors]
    return any(freed)


def _plan(state: State, executor: Executor) -> None:
    while step_planner.plan_next(state, executor):
        pass


class Scheduler:
    """Owns the tokens of every sequence, and every block and slot."""

    def __init__(self, limits: Limits) -> None:
        self.state = State(limits)
        _follow_sessions(self.state)

    def handle(self, event: requests.Event, now_us: int) -> list[requests.Send]:
        """Apply one event at `now_us` and return what to send. Plans to executors come first: the next step
        is on its way before any token leaves for a client."""
        self.apply(event, now_us)
        decide(self.state)
        return self.take_commands()

    def apply(self, event: requests.Event, now_us: int) -> None:
        """Update the state with one event, without decisions."""
        self.state.now_us = now_us
        self._apply(event)
        self.state.sessions.on_event(self.state)

    def take_commands(self) -> list[requests.Send]:
        """The commands since the last call, those to executors first."""
        commands, self.state.commands = self.state.commands, []
        return sorted(commands, key=lambda command: not command.to.startswith("executor."))

    @property
    def is_idle(self) -> bool:
        """No request is waiting, running or closing, and nothing is being copied."""
        return not self.state.requests and not self.state.tiers.jobs

    @property
    def has_waiting(self) -> bool:
        """A sequence group waits for admission or for a tier: milliseconds matter."""
        state = self.state
        return bool(state.waiting or state.tiers.jobs or state.tiers.lookups or state.draining)

    def _apply(self, event: requests.Event) -> None:
        state = self.state
        if isinstance(event, _CUTS):
            state.sessions.on_cut(state)
        match event:
            case requests.Arrived(source, messages.Tokenized() as tokenized, trace) if tokenized.generated:
                recovery.on_takeover(state, source, tokenized, trace)
            case requests.Arrived(source, messages.Tokenized() as tokenized, trace, transit_us):
                lifecycle.on_request(state, source, tokenized, trace, transit_us)
            case requests.Arrived(source, message):
                self._apply_message(source, message)
            case requests.PeerReady("detokenizer", actor, epoch):
                recovery.on_detokenizer_ready(state, actor, epoch)
            case requests.PeerDraining("detokenizer", actor):
                recovery.on_detokenizer_draining(state, actor)
            case requests.PeerDraining("executor", actor):
                executor = state.executors.get(actor)
                if executor is not None and not executor.draining:
                    state.begin_drain(executor)
                recovery.on_executor_leaving(state, actor)
            case requests.PeerLost("detokenizer", actor):
                recovery.on_detokenizer_lost(state, actor)
            case requests.PeerReady("executor", actor, epoch, generation):
                if generation >= 0:
                    recovery.on_arena_mapped(state, actor, generation)
                recovery.on_executor_back(state, actor, epoch)
            case requests.PeerLost("executor", actor, died):
                why = "the executor is gone" if died else "the executor belongs to another scheduler now"
                recovery.drop_executor(state, actor, why, died=died)
                state.asleep.pop(actor, None)
                recovery.on_executor_leaving(state, actor)
                state.tiers.mapped.pop(actor, None)
            case requests.OffloadReady():
                offload = Offload(event.actor, event.epoch, event.host_id, event.generation)
                recovery.on_offload_ready(state, offload)
            case requests.OffloadLost(actor):
                recovery.on_offload_lost(state, actor)
            case requests.StreamLost(source) if source.startswith("executor."):
                recovery.reset_executor(state, source.removeprefix("executor."), "its results were lost")
            case requests.StreamLost(source):
                recovery.on_messages_lost(state, source)  # a Detached without sequences may be among the lost
            case requests.Ticked():
                lifecycle.expire(state)
                store.expire(state)
            case requests.DrainRequested():
                state.draining = True
            case requests.DrainTimedOut():
                lifecycle.fail_all(state)
            case requests.QuotasChanged(quotas):
                state.quotas.set(quotas)
            case requests.PolicySet(policy):
                change_policy(state, policy)
            case requests.SleepSet():
                sleep.on_sleep_set(state, event)

    def _apply_message(self, source: str, message: messages.Message) -> None:
        state = self.state
        match message:
            case messages.StepResult():
                _on_step_result(state, source, message)
            case messages.GrammarReady() | messages.GrammarFailed():
                results.on_grammar_ended(state, source, message)
            case messages.StopFound():
                lifecycle.on_stop_found(state, message)
            case messages.Ended():
                lifecycle.on_ended(state, source, message)
            case messages.Cancel():
                lifecycle.on_cancel(state, source, message)
            case messages.SessionVerb():
                state.send(source, state.sessions.on_verb(state, message))
            case messages.Detached(seqs=seqs) if not seqs:
                recovery.on_messages_lost(state, source)
            case messages.Detached():
                lifecycle.on_detached(state, source, message)
            case messages.ExecHello():
                recovery.on_executor_hello(state, source, message)
            case messages.ArenaReleased():
                recovery.on_arena_released(state, source, message)
            case messages.AdapterLoaded() if (part := load_shedding.adapting()) is not None:
                part.on_loaded(state, source, message)
            case messages.KvFound():
                lookups.on_found(state, source, message)
            case messages.KvReserved():
                store.on_reserved(state, source, message)
            case messages.KvStored():
                store.on_stored(state, source, message)
            case messages.KvReady():
                load.on_ready(state, source, message)
            case messages.KvCopied():
                store.on_copied(state, source, message)
            case messages.KvGone():
                state.sessions.on_evicted(state)
                store.on_evicted(state, source, message)


def _on_step_result(state: State, source: str, result: messages.StepResult) -> None:
    """Apply a result of a known incarnation; reset an unknown one."""
    executor = state.executors.get(source.removeprefix("executor."))
    if executor is not None and executor.epoch == result.exec_epoch:
        if results.is_as_planned(executor, result):
            results.apply_result(state, executor, result)
        else:
            recovery.reset_executor(state, executor.hello.executor, "its result does not fit its plan")
    elif executor is None:
        state.send(
            source, messages.ExecReset(exec_epoch=result.exec_epoch, why="the scheduler has no record of it")
        )


def change_policy(state: State, text: str) -> None:
    """Put `kind=name,...` in force; kinds that are not named stay. Raises SetupError before any change."""
    before, policy = state.limits.policy, policies.parse(text, state.limits.policy)
    state.limits = replace(state.limits, policy=policy)
    state.waiting.set_policy(policy)
    state.blocked_on = ()
    if policy.no_sessions != before.no_sessions:
        _follow_sessions(state)
    if policy.no_tiers != before.no_tiers:
        recovery.use_tiers(state, not policy.no_tiers)


def _follow_sessions(state: State) -> None:
    """Follow sessions from now on, or no longer: what was learned is forgotten."""
    parts = [] if state.limits.policy.no_sessions else session_parts()
    state.sessions = parts[0]() if parts else NoSessions()


def asked_policy(text: str, now: Policy, at_start: Policy) -> Policy:
    """The policy after the change `text` that an operator requests. Raises SetupError for a kind or name that
    does not exist, and for a function of your own that the setting `policy` has not loaded: a message must
    not choose the code that a scheduler imports."""
    for part in (part.strip() for part in text.split(",")):
        _, _, name = part.partition("=")
        own = ":" in name and not name.startswith(f"{BASELINES}:")
        if own and part not in f"{now},{at_start}".split(","):
            raise SetupError(f"{part}: a function of your own is loaded at the start only: setting policy")
    return policies.parse(text, now)
