"""Chooses the next calls to L2, and applies their ends to L2's state. Pure. The core calls it after each
event.

A value of L1 is copied to L2 on its second use. When L1 is nearly full the coldest values are copied before
their eviction, used ones and those of preempted requests first. No copy starts while a preempted request is
being stored, since both use the same memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.kv_offload import events
from services.kv_offload.l1_cache import Entry
from services.kv_offload.state import L2, Call, State

IN_FLIGHT = 8
LOOKUPS_IN_FLIGHT = 2  # of IN_FLIGHT, only for lookups
PUTS_IN_FLIGHT = 3
PUT_BYTES_IN_FLIGHT = 16 << 20
LIMIT_US = {"has": 500_000, "get": 2_000_000, "put": 4_000_000, "delete": 1_000_000}  # timeouts
USES = 2  # of the coldest values, one used so often is copied first
FULL_PERCENT = 80  # of what ordinary stores may use: above it the coldest values are copied
REFUSED_US = 1_000_000  # between two puts to a full L2; gets continue
COLDEST = 64  # candidates for the next copy


def pump(state: State) -> None:
    """Send the calls that may start now."""
    l2 = state.l2
    if not l2.enabled:
        return
    if l2.breaker.open:
        if (l2.breaker.next_us() or 0) <= state.now_us:
            l2.serial += 1
            l2.breaker.probing(l2.serial, state.now_us)
            state.out.append(events.L2Probe(l2.serial))
        return
    while l2.wants and _running(l2, "has") < LOOKUPS_IN_FLIGHT:
        want = l2.wants.popleft()
        fingerprint = want.names[0][0]
        call = _begin(state, Call("has", want.names, lookup=want.lookup))
        keys = tuple(key for _, key in want.names)
        state.out.append(events.L2Has(call, fingerprint, keys, want_size=fingerprint not in l2.sizes))
    while len(l2.calls) - _running(l2, "has") < IN_FLIGHT - LOOKUPS_IN_FLIGHT:
        if not (_start_get(state) or _start_delete(state) or _start_put(state)):
            break


def end(state: State, event: events.L2Ended) -> Call | None:
    """End the call of `event` and return it; None if it was abandoned before. Only status `failed` counts
    for the breaker: absent, corrupt and refused are answers."""
    call = state.l2.calls.get(event.call)
    if call is None:
        return None
    _finish(state, event.call, call, moved=event.status == "ok")
    if event.status != "failed":
        state.l2.breaker.on_succeeded()
        if call.kind == "has":
            took_us = state.now_us - call.began_us
            state.l2.answer_us += (took_us - state.l2.answer_us) // (4 if state.l2.answer_us else 1)
    else:
        state.counters.l2_errors += 1
    if call.kind == "put":
        state.l2.refuses = event.status == "refused"
        if state.l2.refuses:
            state.counters.l2_refused += 1
            state.l2.puts_from_us = state.now_us + REFUSED_US
    return call


def give_up_late(state: State) -> Iterator[Call]:
    """Abandon the calls past their timeout, and yield them."""
    while (number := state.l2.deadlines.pop(state.now_us)) is not None:
        call = state.l2.calls[number]
        _finish(state, number, call, moved=False)
        state.counters.l2_timeouts += 1
        state.out.append(events.Abandon(number))
        yield call


def _finish(state: State, number: int, call: Call, *, moved: bool) -> None:
    l2, moved_bytes = state.l2, call.size_bytes if moved else 0
    del l2.calls[number]
    l2.deadlines.drop(number)
    if call.kind == "get":
        l2.getting.discard(call.names[0])
        l2.get_rate.on_ended(moved_bytes, state.now_us)
    if call.entry is not None:
        state.l1.set_sending(call.entry, on=False)
        l2.put_rate.on_ended(moved_bytes, state.now_us)


def _begin(state: State, call: Call) -> int:
    l2 = state.l2
    l2.serial += 1
    call.began_us = state.now_us
    l2.calls[l2.serial] = call
    l2.deadlines.set(l2.serial, state.now_us + LIMIT_US[call.kind])
    return l2.serial


def _running(l2: L2, kind: str) -> int:
    return sum(call.kind == kind for call in l2.calls.values())


def _start_get(state: State) -> bool:
    """Start the next get. False if none waits."""
    l2 = state.l2
    waiting = l2.urgent or l2.early
    if not waiting:
        return False
    name, _ = waiting.popitem(last=False)
    size_bytes = l2.sizes[name[0]]
    l2.getting.add(name)
    l2.get_rate.on_began(state.now_us)
    state.out.append(events.L2Get(_begin(state, Call("get", (name,), size_bytes)), name, size_bytes))
    return True


def _start_delete(state: State) -> bool:
    """Start the next delete. False if none waits."""
    if not state.l2.deletes:
        return False
    name, _ = state.l2.deletes.popitem(last=False)
    state.out.append(events.L2Delete(_begin(state, Call("delete", (name,))), name))
    return True


def _start_put(state: State) -> bool:
    """Start the next put. False if none may begin."""
    l2 = state.l2
    most = 1 if l2.refuses else PUTS_IN_FLIGHT
    if state.urgent_stores or state.now_us < l2.puts_from_us or _running(l2, "put") >= most:
        return False
    entry = _worth_a_copy(state)
    in_flight = sum(call.size_bytes for call in l2.calls.values() if call.entry is not None)
    if entry is None or (in_flight and in_flight + entry.range.size_bytes > PUT_BYTES_IN_FLIGHT):
        return False
    fingerprint, size_bytes = entry.name[0], entry.range.size_bytes
    l2.puts.pop(entry.name, None)
    state.l1.set_sending(entry, on=True)
    l2.put_rate.on_began(state.now_us)
    call = _begin(state, Call("put", (entry.name,), size_bytes, entry))
    announce = fingerprint not in l2.announced
    slot = entry.range.slot
    state.out.append(events.L2Put(call, entry.name, slot, size_bytes, entry.valid_tokens, announce))
    return True


def _worth_a_copy(state: State) -> Entry | None:
    l1, l2 = state.l1, state.l2
    lacks: Callable[[Entry], bool] = lambda entry: not entry.sending and entry.name not in l2.presence  # noqa: E731
    while l2.puts:
        name: events.Name = next(iter(l2.puts))
        entry = l1.entries.get(name)
        if entry is not None and lacks(entry):
            return entry
        del l2.puts[name]
    if l1.used_bytes * 100 <= l1.limit_bytes(urgent=False) * FULL_PERCENT:
        return None
    return min(
        filter(lacks, l1.coldest(COLDEST)), key=lambda e: not (e.uses >= USES or e.urgent), default=None
    )
