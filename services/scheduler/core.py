"""The scheduler's decisions: events in, commands out. No await, no clock, no socket, no randomness.

handle(event): apply it -> admit what fits -> plan while a window is open -> commands

`actor.py` calls it with messages and timers, `loadtest/simulator` with simulated ones. A replay of the same
events at the same times gives the same commands.
"""

from __future__ import annotations

from services.scheduler import admission, arrival, finish, recovery, results, step_planner
from services.scheduler.kv_tiers import hosts as tiers
from services.scheduler.kv_tiers import load, lookups, store
from services.scheduler.state.requests import (
    Arrived,
    DrainRequested,
    DrainTimedOut,
    Event,
    PeerDraining,
    PeerLost,
    PeerReady,
    QuotasChanged,
    Send,
    StreamLost,
    Ticked,
    TierLost,
    TierReady,
)
from services.scheduler.state.state import Executor, Limits, State
from services.scheduler.state.transfers import Tier
from shared.messages import (
    ArenaReleased,
    Cancel,
    Detached,
    Ended,
    ExecHello,
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
)


def decide(state: State) -> None:
    """Admit what fits, copy or drop dirty blocks for room, then fill every open window. A second call without
    an event in between changes nothing."""
    state.idle_since_us = 0 if state.requests else state.idle_since_us or state.now_us
    admission.admit(state)
    while sum(store.copy_dirty(state, executor) for executor in state.executors.values()):
        admission.admit(state)  # `sum` calls each; some blocks are free now
    for executor in state.executors.values():
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
                recovery.take_over(state, source, tokenized, trace)
            case Arrived(source, Tokenized() as tokenized, trace, transit_us):
                arrival.arrive(state, source, tokenized, trace, transit_us)
            case Arrived(source, message):
                self._apply_message(source, message)
            case PeerReady("detokenizer", actor, epoch):
                recovery.detokenizer_ready(state, actor, epoch)
            case PeerDraining("detokenizer", actor):
                recovery.detokenizer_leaves(state, actor)
            case PeerDraining("executor", actor):
                if actor in state.executors:
                    state.executors[actor].draining = True
                recovery.executor_leaves(state, actor)
            case PeerLost("detokenizer", actor):
                recovery.detokenizer_lost(state, actor)
            case PeerReady("executor", actor, _, generation):
                if generation >= 0:
                    tiers.on_arena_mapped(state, actor, generation)
                recovery.executor_back(state, actor)
            case PeerLost("executor", actor, died):
                why = "the executor is gone" if died else "the executor belongs to another scheduler now"
                recovery.drop_executor(state, actor, why, died=died)
                recovery.executor_leaves(state, actor)
                state.tiers.mapped.pop(actor, None)
            case TierReady():
                tier = Tier(event.actor, event.epoch, event.host_id, event.generation)
                tiers.ready(state, tier)
            case TierLost(actor):
                tiers.lost(state, actor)
            case StreamLost(source) if source.startswith("executor."):
                recovery.reset_executor(state, source.removeprefix("executor."), "its results were lost")
            case Ticked():
                finish.expire(state)
                tiers.expire(state)
            case DrainRequested():
                state.draining = True
            case DrainTimedOut():
                finish.fail_all(state)
            case QuotasChanged(quotas):
                state.quotas.set(quotas)

    def _apply_message(self, source: str, message: Message) -> None:
        state = self.state
        match message:
            case StepResult():
                recovery.step_result(state, source, message)
            case GrammarReady() | GrammarFailed():
                results.grammar_ended(state, source, message)
            case StopFound():
                finish.stop_found(state, message)
            case Ended():
                finish.ended(state, source, message)
            case Cancel():
                arrival.cancel(state, source, message)
            case Detached(seqs=seqs) if not seqs:
                recovery.detokenizer_missed(state, source)
            case Detached():
                arrival.detach(state, source, message)
            case ExecHello():
                recovery.hello(state, source, message)
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
