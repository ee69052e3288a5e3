"""Puts executors to sleep and wakes them. `core` calls it.

    serves ──SleepSet──▶ drains ──empty, or DRAIN_US later──▶ ExecSleep ──ExecHello(asleep)──▶ asleep
       ▲                                                                                         │
       └───── ExecHello: a new incarnation with empty blocks ◀── ExecWake ◀── SleepSet, or requests wait

Its last sequences end, or move (moves.py), or are preempted after DRAIN_US; if these would wake it at once,
it waits for their end. Blocks that are worth a copy go to the tier below. A sleeping executor keeps its
place: in the kind of its model, and with its scheduler. Requests of its model wait for it.
"""

from __future__ import annotations

from services.scheduler import lifecycle, load_shedding, preemption
from services.scheduler.state.requests import Sequence, SleepSet
from services.scheduler.state.state import Executor, Sleeper, State
from shared.errors import SetupError
from shared.messages import ExecHello, ExecWake

DRAIN_US = 10_000_000  # most answers end within it; the others are preempted
PRIORITIES = (4, 2, 1)  # of the classes; a request that waits rises, see SloClass.age_us
COPY_US = 5_000_000  # after it: for the last copies to the tier below


def parse(text: str) -> SleepSet:
    """The text `sleep` or `wake`, then ids of executors, none for all. Raises SetupError."""
    what, *executors = text.split() or [""]
    if what not in ("sleep", "wake"):
        raise SetupError(f"{text!r:.80} is neither `sleep` nor `wake`, then ids of executors")
    return SleepSet(what == "sleep", tuple(executors))


def states(state: State) -> dict[str, str]:
    """The state of each executor in a word."""
    found = {name: "draining" if e.sleep_by_us else "loaded" for name, e in state.executors.items()}
    for name, sleeper in state.asleep.items():
        found[name] = "waking" if sleeper.waking else "asleep" if sleeper.hello.asleep else "falling asleep"
    return dict(sorted(found.items()))


def work(state: State) -> tuple[int, int]:
    """The work that waits and runs, in tokens times the priority of its class, and how long the oldest
    waiting request has waited, in us. Executors that share memory are woken by it."""
    mean, found, oldest_us = state.mean_output_tokens, 0, state.now_us
    for group in state.waiting:
        found += PRIORITIES[group.level] * (len(group.sequences[0].tokens) + len(group.sequences) * mean)
        oldest_us = min(oldest_us, group.request.arrival_us)
    for s in (s for executor in state.executors.values() for s in executor.running):
        found += PRIORITIES[s.level] * min(mean, s.max_length - len(s.tokens))
    return found, state.now_us - oldest_us


def on_sleep_set(state: State, event: SleepSet) -> None:
    """Begin to put executors to sleep, or wake them. One that drains for its end is left alone."""
    names = event.executors or (*state.executors, *state.asleep)
    if not event.asleep:
        _wake(state, [name for name in names if name in state.asleep])
    for executor in (state.executors[name] for name in names if name in state.executors):
        if event.asleep and not executor.draining:
            state.begin_drain(executor)
            executor.sleep_by_us = state.now_us + DRAIN_US
        elif executor.sleep_by_us and not event.asleep:
            executor.draining, executor.sleep_by_us = False, 0
            state.waiting.unpark(state.now_us)
            state.blocked_on = ()
    lifecycle.on_executors_changed(state)


def on_asleep(state: State, hello: ExecHello) -> None:
    """An executor is asleep. One that was asked to wake meanwhile wakes by its next turn."""
    known = state.asleep.get(hello.executor)
    if known is None or known.hello != hello:
        state.asleep[hello.executor] = Sleeper(hello)


def wake_and_drain(state: State) -> list[Executor]:
    """Wake executors for which requests wait, preempt what has run for too long on those that drain, and
    return those that may sleep now."""
    if state.asleep and not state.limits.shares_memory:
        _wake(state, [name for name, sleeper in state.asleep.items() if _is_needed(state, sleeper)])
    if not state.some_leave:
        return []
    draining = [executor for executor in state.executors.values() if executor.sleep_by_us]
    for executor in draining:
        if state.now_us >= executor.sleep_by_us and not _must_wake_again(state, executor):
            for sequence in [s for s in executor.running if s.parent is None and not s.copies.load_job]:
                _preempt(state, executor, sequence)
    return [executor for executor in draining if _may_sleep(state, executor)]


def _is_needed(state: State, sleeper: Sleeper) -> bool:
    model = sleeper.hello.model
    if load_shedding.serving(state, model):
        return False
    return any(group.request.tokenized.model == model for group in state.waiting)


def _must_wake_again(state: State, executor: Executor) -> bool:
    """Whether a sequence that is preempted here would wake this executor again."""
    return not state.limits.shares_memory and not load_shedding.serving(state, executor.hello.model)


def _preempt(state: State, executor: Executor, sequence: Sequence) -> None:
    for s in executor.running:
        s.turn.ceded += s is sequence or s.parent is sequence  # not for want of blocks
    why = f"seq {sequence.seq} runs on an executor that goes to sleep"
    preemption.preempt(state, executor, sequence, why, [sequence])


def _may_sleep(state: State, executor: Executor) -> bool:
    """True once nothing runs and everything worth it is copied, or the time for that is over."""
    if executor.running or executor.in_flight:
        return False
    copies = any(job.executor == executor.hello.executor for job in state.tiers.jobs.values())
    unsaved = copies or (executor.pool.write_back and executor.pool.dirty_blocks)
    return not unsaved or state.now_us >= executor.sleep_by_us + COPY_US


def _wake(state: State, names: list[str]) -> None:
    for name in names:
        sleeper = state.asleep[name]
        if sleeper.hello.asleep and not sleeper.waking:
            sleeper.waking = True
            state.send(f"executor.{name}", ExecWake(exec_epoch=sleeper.hello.exec_epoch))
