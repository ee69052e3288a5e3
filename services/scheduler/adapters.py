"""Decides which adapters executors hold in their places. A request waits for its adapter, others go on.

    arrives ──▶ an executor has its adapter: admission, as any request
            └─▶ none has it: parked ──AdapterLoad──▶ a free place, or one that nothing uses ──AdapterLoaded──▶

Steps go on during a load. A place is used while a sequence with its adapter runs: it keeps the adapter with
which it began, also where the name means another one by now, since a digest names the weights. So a step
never has more adapters than places. Where all places are used, the one with the fewest sequences takes no
more once a request has waited for PATIENCE_US: it empties, and the oldest request gets it.

The adapter goes that was unused for longest, for the time that its load takes.
admission.py and core.py find this module by a table.
"""

from __future__ import annotations

from collections import Counter

from services.scheduler import admission, headroom, lifecycle, load_shedding
from services.scheduler.state.requests import Request
from services.scheduler.state.state import Executor, PlacedAdapter, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.errors import Unavailable
from shared.messages import AdapterLoad, AdapterLoaded, Tokenized
from shared.telemetry.traces import LOAD_DECISION

PATIENCE_US = 500_000
LEAST_LOAD_US = 100


class Adapters:
    """The decisions, as functions of the state."""

    @staticmethod
    def refusal(executors: list[Executor], tokenized: Tokenized) -> str:
        """Why none of the executors can ever compute a request with an adapter; empty if one can."""
        if any(executor.hello.adapter_places for executor in executors):
            return ""
        return (
            f"`model`: the executors of {tokenized.model!r} have no place for the adapter "
            f"{tokenized.adapter_name!r}: start them with --lora-places"
        )

    @staticmethod
    def must_wait(state: State, group: SequenceGroup) -> bool:
        """Whether a group waits for a load or a place. Where another executor has room, and those with its
        adapter have none, that one loads it, too."""
        able = _able(state, group)
        having = [executor for executor in able if Adapters.is_placed(state, executor, group.request)]
        if able and not any(executor.pool.free_slots for executor in having):
            _load(state, [e for e in able if e.pool.free_slots or not having], group)
        return bool(able) and not having

    @staticmethod
    def is_placed(state: State, executor: Executor, request: Request) -> bool:
        """Whether an executor has the adapter of a request, and takes this one with it."""
        placed = _placed(executor, request.tokenized.adapter)
        if placed is None or not placed.loaded:
            return False
        yielding, before = _yielding(state) or (None, request)
        return placed is not yielding or request.arrival_us <= before.arrival_us

    @staticmethod
    def place(state: State, executor: Executor, request: Request) -> int:
        """The place of a request's adapter; 0: the request has none."""
        for place, placed in executor.adapters.items():
            if placed.digest == request.tokenized.adapter:
                placed.used_us = state.now_us
                return place
        return 0

    @staticmethod
    def shown(executor: Executor) -> dict[str, dict[str, object]]:
        """What is in the places of an executor, for people."""
        users = _users(executor)
        return {
            str(place): {
                "name": placed.name,
                "digest": placed.digest,
                "state": "loaded" if placed.loaded else "loading",
                "sequences": users[placed.digest],
                "bytes": placed.bytes,
                "load_ms": placed.took_us / 1000,
            }
            for place, placed in sorted(executor.adapters.items())
        }

    @staticmethod
    def review(state: State) -> None:
        """Queue the groups whose adapter is there, and load for those that wait, the oldest first."""
        ready = [
            group
            for group in _waiting(state)
            if any(Adapters.is_placed(state, executor, group.request) for executor in _able(state, group))
        ]
        if ready:
            state.waiting.unpark(state.now_us, ready)
            state.blocked_on = ()
        for group in _waiting(state):
            _load(state, _able(state, group), group)

    @staticmethod
    def prepare(state: State, group: SequenceGroup, others: list[Executor]) -> None:
        """Load the adapter of a sequence where it may move to, if none of these executors has it."""
        able = [executor for executor in _able(state, group) if executor in others]
        if not any(_placed(executor, group.request.tokenized.adapter) for executor in able):
            _load(state, able, group)

    @staticmethod
    def on_loaded(state: State, source: str, message: AdapterLoaded) -> None:
        """An adapter is in its place, or cannot be there: then the requests that wait for it fail."""
        executor = state.executors.get(source.removeprefix("executor."))
        placed = executor.adapters.get(message.place) if executor is not None else None
        if executor is None or placed is None or placed.digest != message.digest:
            return
        placed.loaded, placed.bytes, placed.took_us = not message.error, message.bytes, message.took_us
        placed.used_us, state.blocked_on = state.now_us, ()
        if message.error:
            del executor.adapters[message.place]
        state.counters.adapter_loads += not message.error
        for group in [g for g in _waiting(state) if g.request.tokenized.adapter == message.digest]:
            for sequence in group.sequences:
                sequence.record_decision(
                    state.now_us,
                    LOAD_DECISION,
                    message.error or f"{placed.name} is in place {message.place} of {source}",
                    took_us=message.took_us,
                    bytes=message.bytes,
                )
            if message.error:
                why = f"the adapter {placed.name!r} is not loaded: {message.error}"
                lifecycle.fail(state, group.request, Unavailable.code, why, load_shedding.RETRY_AFTER_MS)


def _waiting(state: State) -> list[SequenceGroup]:
    """The groups that wait for an adapter, the oldest first."""
    waiting = [group for group in state.waiting.parked if group.request.tokenized.adapter]
    return sorted(waiting, key=lambda group: group.order)


def _able(state: State, group: SequenceGroup) -> list[Executor]:
    """The executors on which a group may start once they have its adapter."""
    return [
        e
        for e in state.executors.values()
        if e.hello.adapter_places
        and load_shedding.may_run(e, group.request)
        and headroom.can_fit(e, group.first_choice())
        and (not e.role or admission.is_suitable(state, e, group))
    ]


def _placed(executor: Executor, digest: str) -> PlacedAdapter | None:
    return next((placed for placed in executor.adapters.values() if placed.digest == digest), None)


def _users(executor: Executor) -> Counter[str]:
    return Counter(sequence.request.tokenized.adapter for sequence in executor.running)


def _yielding(state: State) -> tuple[PlacedAdapter, Request] | None:
    """The place that takes no more sequences, so that the oldest request which waits gets it, and that
    request: those before it may still begin there."""
    oldest = next(iter(_waiting(state)), None) if state.waiting.parked else None
    if oldest is None or state.now_us - oldest.queued_us < PATIENCE_US:
        return None
    able = _able(state, oldest)
    if any(_placed(executor, oldest.request.tokenized.adapter) for executor in able):
        return None
    every = [
        (users[placed.digest], executor.source, place, placed)
        for executor in able
        for users in (_users(executor),)
        for place, placed in executor.adapters.items()
        if placed.loaded
    ]
    fewest = min(every, key=lambda each: each[:3], default=None)
    return (fewest[3], oldest.request) if fewest is not None else None


def _load(state: State, executors: list[Executor], group: SequenceGroup) -> None:
    """Begin to load a group's adapter on one of the executors, if none of them has it or is loading it, and
    one has a place that nothing uses."""
    tokenized = group.request.tokenized
    if any(_placed(executor, tokenized.adapter) for executor in executors):
        return
    for executor in sorted(executors, key=lambda e: (len(e.running), e.source)):
        if (place := _free_place(state, executor)) == 0:
            continue
        executor.adapters[place] = PlacedAdapter(tokenized.adapter, tokenized.adapter_name, state.now_us)
        load = AdapterLoad(place=place, digest=tokenized.adapter, path=tokenized.adapter_path)
        state.send(executor.source, load, group.request.trace)
        return


def _free_place(state: State, executor: Executor) -> int:
    """An empty place, or the one whose adapter was unused for longest, for the time of its load; 0: none."""
    for place in range(1, executor.hello.adapter_places + 1):
        if place not in executor.adapters:
            return place
    wanted = {group.request.tokenized.adapter for group in state.waiting if not group.parked}
    wanted |= {sequence.request.tokenized.adapter for sequence in executor.running}
    unused = [
        ((state.now_us - placed.used_us) // max(placed.took_us, LEAST_LOAD_US), -place)
        for place, placed in executor.adapters.items()
        if placed.loaded and placed.digest not in wanted
    ]
    return -max(unused)[1] if unused else 0
