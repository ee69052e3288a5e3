"""Frozen states: equal states have equal bytes, a snapshot comes back whole, what is foreign is refused."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler.world import World

from loadtest.simulator.replay.compare import differences
from services.scheduler.reports.event_log import FreezeError, freeze, restore, snapshot, state_hash, thaw
from services.scheduler.state.counters import Histogram
from services.scheduler.state.requests import Phase, Sequence
from services.scheduler.state.state import State
from shared.errors import Overloaded
from shared.kv_blocks import blocks_for
from shared.messages import Sampling, ints


def again(value: Any) -> Any:
    """Through the bytes and back."""
    return thaw(msgpack.unpackb(msgpack.packb(freeze(value))))


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
)
TUPLES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
VALUES = st.recursive(
    TUPLES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(TUPLES, inner, max_size=4),
        st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=7)),
        st.lists(st.tuples(st.text(), inner), max_size=3).map(OrderedDict),
        st.sets(st.integers()).map(frozenset).map(lambda s: frozenset(v % 100 for v in s)),
        st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda v: array("i", v)),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=20,
)


@given(VALUES)
def test_any_value_comes_back(value: Any) -> None:
    made = again([value])[0]
    assert made == value
    assert type(made) is type(value)
    if isinstance(value, deque):
        assert made.maxlen == 7


def test_shared_parts_stay_shared_and_cycles_close() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    twice = {"a": ring, "b": ring}
    made = again(twice)
    assert made["a"] is made["b"]
    assert made["a"][1] is made["a"]
    assert made["a"][0] == 1


def test_instances_come_back_without_their_constructor() -> None:
    pool = busy().scheduler.state.executors["e1"].pool
    made = again(pool)
    assert type(made) is type(pool)
    assert freeze(made) == freeze(pool)
    assert made is not pool


def test_enums_functions_errors_and_records_come_back() -> None:
    error = Overloaded("full", retry_after_ms=7)
    phase, function, made, sampling = again([Phase.CLOSING, blocks_for, error, Sampling(top_k=3)])
    assert phase is Phase.CLOSING
    assert function is blocks_for
    assert (type(made), made.message, made.retry_after_ms) == (Overloaded, "full", 7)
    assert sampling == Sampling(top_k=3)


def test_a_set_has_the_same_bytes_in_any_order() -> None:
    names = [f"name {i}" for i in range(40)]
    backwards: set[str] = set()
    for name in reversed(names):
        backwards.add(name)
    assert freeze([set(names)]) == freeze([backwards])
    assert again([set(names)]) == [set(names)]


def test_a_shared_value_hashes_as_its_copy() -> None:
    column = ints([1, 2])
    assert freeze([column, column]) == freeze([ints([1, 2]), ints([1, 2])])


@dataclass
class Foreign:
    """Not of the scheduler."""

    value: int = 0


@dataclass
class Holder:
    """Neither."""

    parts: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    "value", [Foreign(), Holder(), object(), 1j, lambda: 0, [Foreign], {Phase.WAITING, 1}]
)
def test_object_without_a_frozen_form_is_refused(value: Any) -> None:
    with pytest.raises(FreezeError):
        freeze([value])


def test_a_number_over_64_bits_is_refused() -> None:
    state = World().scheduler.state
    state.now_us = 2**64
    with pytest.raises(FreezeError, match="64 bits"):
        snapshot(state)


def classes(*named: list[Any]) -> bytes:
    return bytes(msgpack.packb([list(named), [[9, 0, []]]]))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x93", "not a snapshot"),
        (msgpack.packb([[], [[0, []]]]), "not of a list"),
        (classes(["os:system", []]), "os:system is not known here"),
        (classes(["services.scheduler.state.requests:Nothing", []]), "not known here"),
        (classes(["services.scheduler.state.requests:MAX_CHUNKS", []]), "not known here"),
        (
            classes(["services.scheduler.state.requests:ChunkRecord", ["tokens", "older"]]),
            "has other fields now",
        ),
        (msgpack.packb([[], [[7, "services.scheduler.reports.event_log:subprocess"]]]), "not known here"),
        (msgpack.packb([[], [[99]]]), "kind 99"),
    ],
)
def test_damaged_snapshot_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(FreezeError, match=why):
        restore(data)


def busy() -> World:
    """Requests in every phase: running, waiting, ended."""
    world = World()
    world.add_engine(slots=4)
    world.ask("done", [1, 2, 3], 3)
    world.run()
    for i in range(6):
        world.ask(f"r{i}", list(range(20 + i)), 8, n=1 + i % 2)
    for _ in range(5):
        world.deliver()
    return world


def test_a_snapshot_restores_the_whole_state() -> None:
    state = busy().scheduler.state
    made = restore(snapshot(state))
    assert type(made) is State
    assert snapshot(made) == snapshot(state)
    assert state_hash(made) == state_hash(state)
    sequence = next(s for s in made.sequences.values() if s.phase is Phase.RUNNING)
    assert type(sequence) is Sequence
    assert any(sequence is other for other in sequence.request.sequences)
    assert len(made.waiting) == len(state.waiting)


def test_a_restored_scheduler_goes_on_as_the_other() -> None:
    world = busy()
    world.scheduler.state = restore(snapshot(world.scheduler.state))
    world.run()
    for request in ["done", *(f"r{i}" for i in range(6))]:
        world.assert_answers(request)
    world.assert_idle()


def test_hash_changes_with_what_decides_and_not_with_reports() -> None:
    state = busy().scheduler.state
    before = state_hash(state)
    state.step_log.ring.clear()
    state.ended.by_key.clear()
    assert state_hash(state) == before
    next(iter(state.sequences.values())).tokens.append(5)
    assert state_hash(state) != before


def test_a_difference_is_named_by_its_path() -> None:
    state = busy().scheduler.state
    other = restore(snapshot(state))
    assert differences(freeze(state), freeze(other)) == []
    request = next(iter(other.requests.values()))
    request.attempt += 2
    other.draining = True
    key = tuple(request.key)
    assert differences(freeze(state), freeze(other)) == [
        "state.draining: False, now True",
        f"state.requests[{key}].attempt: 1, now 3",
    ]


def test_a_histogram_comes_back_with_its_counts() -> None:
    histogram = Histogram((10, 20))
    histogram.add(15)
    assert again(histogram).counts == [0, 1, 0]
