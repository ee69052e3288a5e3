"""What is over leaves nothing that grows: deadlines, deaths, the marks of those that waited."""

from __future__ import annotations

import pytest
from support.scheduler.world import World

from services.scheduler.state import requests, state
from services.scheduler.state.requests import Deadlines, PeerLost, PeerReady, Ticked
from services.scheduler.state.state import Limits
from shared.messages import ExecReset

DAY_US = 86_400_000_000


def test_the_deadlines_of_ended_requests_go() -> None:
    """A day each, of class batch."""
    world = World()
    world.add_engine()
    for i in range(200):
        world.ask(f"r{i}", [5, 6], 3, timeout_us=DAY_US, slo_class="batch")
        world.run()
    world.assert_idle()
    assert len(world.scheduler.state.deadlines.heap) <= 70


def test_no_deadline_that_counts_is_lost() -> None:
    due, live = Deadlines(), dict.fromkeys(range(0, 500, 10))
    for at in range(500):
        due.watch(1_000 + at, at, live)
        due.watch(2_000 + at, at, live)
    found = [due.pop(10_000) for _ in range(len(due.heap))]
    assert [seq for seq in dict.fromkeys(found) if seq in live] == list(live)


def test_deaths_of_executors_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_DROPPED", 3)
    world = World()
    for i in range(10):
        world.add_engine(f"e{i}")
        world.crash(f"e{i}")
    assert list(world.scheduler.state.dropped) == ["e7", "e8", "e9"]
    (command,) = world.scheduler.handle(PeerReady("executor", "e9", 1), world.now_us)
    assert isinstance(command.message, ExecReset)


def test_deaths_of_detokenizers_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_MOVED", 2)
    world = World(shards=("d0",))
    world.add_engine()
    world.ask("a", [5, 6], 30)
    for i in range(6):
        world.handle(PeerReady("detokenizer", f"d{i + 1}", 1))
        world.handle(PeerReady("detokenizer", f"idle{i}", 1))
        shard = world.scheduler.state.requests["public", "a"].shard
        idle = next(s for s in world.scheduler.state.detokenizers if s != shard)
        world.handle(PeerLost("detokenizer", idle))
        world.handle(PeerLost("detokenizer", shard))
    kept = world.scheduler.state.moved
    assert [len(seqs) for _, seqs in kept.values()] == [1, 1], "and those that had nothing not at all"


def test_marks_of_waiting_groups_go_with_them() -> None:
    world = World(Limits(classes=requests.parse("standard=0/100/20000")))
    world.add_engine(slots=1)
    world.ask("runs", [5, 6], 40)
    world.ask("first", [5, 6], 3)  # the line is never empty
    for i in range(300):
        world.ask(f"r{i}", [5, 6], 3, timeout_us=1_000)
        world.tick(2_000)
        world.handle(Ticked())
    lines = world.scheduler.state.waiting.queues.values()
    assert [(queue.groups, len(queue.promotions) <= 66) for queue in lines] == [(1, True)]
