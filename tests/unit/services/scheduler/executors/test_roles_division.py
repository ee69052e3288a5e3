"""Executors are divided among the schedulers of a model: evenly, one at a time, and never the last one."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.actor import scheduler_for
from services.scheduler.executors.roles import ARRIVE_US, DRAIN_US, Division, Drain, Give
from shared.actor.membership import Peers
from shared.messages import Heartbeat

BEAT = Heartbeat(kind="scheduler", actor="", host_id="h", state="ready", model="m")
BEAT_US = 1_000_000


class Fleet:
    """Schedulers, and the scheduler of each executor as its heartbeat names it; "" while it moves."""

    def __init__(self, schedulers: list[str], executors: dict[str, str]) -> None:
        self.homes = executors
        self.schedulers = {name: Division() for name in schedulers}
        self.running: Counter[str] = Counter()
        self.now_us = 0
        self.moves = 0
        self.arriving: dict[str, str] = {}

    @property
    def peers(self) -> Peers:
        peers = Peers()
        for name in self.schedulers:
            peers.update(1, dataclasses.replace(BEAT, actor=name), 0)
        for name, home in self.homes.items():
            peers.update(1, dataclasses.replace(BEAT, kind="executor", actor=name, scheduler=home), 0)
        return peers

    def turn(self, me: str) -> Drain | Give | None:
        running = {name: self.running[name] for name, home in self.homes.items() if home == me}
        return self.schedulers[me].decide(me, "m", self.peers, running, self.now_us)

    def beat(self) -> None:
        """All schedulers have their turn; an executor arrives a heartbeat after it was given."""
        self.now_us += BEAT_US
        self.homes |= self.arriving
        self.arriving = {}
        for me in list(self.schedulers):
            match self.turn(me):
                case Give(executor, scheduler):
                    self.homes[executor], self.arriving[executor] = "", scheduler
                    self.moves += 1
                    assert scheduler in self.schedulers

    def counts(self) -> dict[str, int]:
        homes = Counter(self.homes.values())
        return {name: homes[name] for name in self.schedulers}


@given(
    homes=st.lists(st.integers(0, 4), min_size=1, max_size=16),
    schedulers=st.integers(1, 5),
    busy=st.lists(st.integers(0, 15), max_size=4),
)
def test_every_scheduler_gets_its_share_in_few_moves(
    homes: list[int], schedulers: int, busy: list[int]
) -> None:
    """One has an executor if there are as many as schedulers, and no two differ by more than one."""
    names = [f"s{i}" for i in range(schedulers)]
    fleet = Fleet(names, {f"e{i}": names[home % schedulers] for i, home in enumerate(homes)})
    fleet.running.update(f"e{i}" for i in busy)
    share = len(homes) // schedulers
    needed = sum(max(0, share - count) for count in fleet.counts().values())
    for _ in range(30 * len(homes)):
        fleet.beat()
    counts = fleet.counts().values()
    assert sum(counts) == len(homes)
    assert max(counts) - min(counts) <= 1
    assert needed <= fleet.moves <= needed + 2 * schedulers
    settled = fleet.moves
    for _ in range(20):
        fleet.beat()
    assert fleet.moves == settled


@pytest.mark.parametrize(("executors", "schedulers"), [(4, 2), (9, 3), (16, 4)])
def test_one_that_joins_gets_its_nth_of_the_executors_and_no_other_moves(
    executors: int, schedulers: int
) -> None:
    names = [f"s{i}" for i in range(schedulers)]
    others = schedulers - 1
    fleet = Fleet(names[:-1], {f"e{i}": names[i % others] for i in range(executors)})
    fleet.beat()
    fleet.schedulers[names[-1]] = Division()
    for _ in range(10 * executors):
        fleet.beat()
    assert set(fleet.counts().values()) <= {executors // schedulers, -(-executors // schedulers)}
    assert fleet.moves <= -(-executors // schedulers)


def test_second_scheduler_stands_by_with_one_executor() -> None:
    fleet = Fleet(["s0", "s1"], {"e0": "s1"})
    assert [fleet.turn(me) for me in ("s0", "s1")] == [None, None]


def test_the_idlest_executor_drains_first() -> None:
    fleet = Fleet(["s0", "s1"], {"e0": "s0", "e1": "s0"})
    fleet.running.update({"e0": 5, "e1": 2})
    assert fleet.turn("s0") == Drain("e1")
    fleet.now_us = DRAIN_US - 1
    assert fleet.turn("s0") is None
    fleet.running["e1"] = 0
    assert fleet.turn("s0") == Give("e1", "s1")
    assert fleet.turn("s0") is None
    fleet.homes["e1"] = ""
    fleet.now_us += ARRIVE_US - 1
    assert fleet.turn("s0") is None, "one moves at a time"


def test_a_long_answer_does_not_hold_the_executor() -> None:
    fleet = Fleet(["s0", "s1"], {"e0": "s0", "e1": "s0"})
    fleet.running.update({"e0": 5, "e1": 2})
    assert fleet.turn("s0") == Drain("e1")
    fleet.now_us = DRAIN_US
    assert fleet.turn("s0") == Give("e1", "s1")


def test_executor_stays_if_the_other_scheduler_has_gone_meanwhile() -> None:
    """The executor drains, and must get sequences again."""
    fleet = Fleet(["s0", "s1"], {"e0": "s0", "e1": "s0"})
    fleet.running.update({"e0": 5, "e1": 2})
    assert fleet.turn("s0") == Drain("e1")
    del fleet.schedulers["s1"]
    assert fleet.turn("s0") == Give("e1", "s0")


def test_an_executor_that_dies_on_the_way_ends_the_move() -> None:
    fleet = Fleet(["s0", "s1"], {f"e{i}": "s0" for i in range(4)})
    fleet.running.update({"e0": 1})
    assert fleet.turn("s0") == Drain("e1")
    del fleet.homes["e1"]
    assert fleet.turn("s0") is None
    assert fleet.turn("s0") == Drain("e2")
    assert fleet.turn("s0") == Give("e2", "s1")
    del fleet.homes["e2"]
    assert fleet.turn("s0") is None


@given(st.integers(1, 12), st.integers(2, 5))
def test_the_executors_of_a_dead_scheduler_are_dealt_out_evenly(executors: int, schedulers: int) -> None:
    """Each computes its own scheduler, from the heartbeats that all of them have."""
    names = [f"s{i}" for i in range(schedulers)]
    homes = {f"o{name}": name for name in names[1:]} | {f"e{i}": "s0" for i in range(executors)}
    fleet = Fleet(names[1:], homes)
    joined = Counter(scheduler_for(fleet.peers, "m", f"e{i}") for i in range(executors))
    assert joined.total() == executors
    assert set(joined) <= set(names[1:])
    assert max(joined.values()) - min(joined[name] for name in names[1:]) <= 1


def test_a_new_executor_joins_the_scheduler_with_the_fewest_that_has_one() -> None:
    """A scheduler without executors is not chosen: it has no weights to compare with."""
    fleet = Fleet(["s0", "s1", "s2"], {"e0": "s0", "e1": "s0", "e2": "s1"})
    assert scheduler_for(fleet.peers, "m", "new") == "s1"
