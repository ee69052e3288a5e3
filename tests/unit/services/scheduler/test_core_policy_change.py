"""A change of the policy under load: what each kind keeps from one decision to the next, the same answers and
checks, a log that replays, and no executor that idles for it."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World
from support.scheduler.world_checks import ALL, Turns

from loadtest.simulator import world as virtual
from loadtest.simulator.engine import Machine
from loadtest.simulator.hops import Hop
from loadtest.simulator.replay.rerun import rerun_file
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from services.scheduler.core import asked_policy
from services.scheduler.reports.event_log import FileSink, Recorder
from services.scheduler.state import policies
from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import Arrived, Event, PolicySet, Send
from services.scheduler.state.state import Limits
from services.scheduler.state.waiting_queue import WaitingQueue
from shared.errors import SetupError
from shared.messages import StepPlan, StepResult
from shared.step_model import H200_8B

CHANGES = (
    "order=fcfs", "batching=prefill_first", "batching=decode_first", "batching=loadtest.policies:static",
    "reservation=reserve", "reservation=foreseen", "reservation=loadtest.policies:greedy",
    "victim=cheapest",
    "reservation=loadtest.policies:by_chunk", "victim=loadtest.policies:least_computed", "routing=room",
    "routing=loadtest.policies:prefix", "tier=loadtest.policies:swap", "tier=loadtest.policies:recompute",
    "tier=loadtest.policies:forget",
)  # fmt: skip
CLASSES = ("interactive", "standard", "standard", "batch")


def back(change: str) -> str:
    """The change that undoes this one."""
    kind = change.partition("=")[0]
    return f"{kind}={getattr(Policy(), kind)}"


def busy(world: World, requests: int = 24) -> World:
    """Two engines with memory for a few of the requests, a tier, three tenants, every class."""
    world.checks += [*ALL, Turns()]
    for name in ("e1", "e2"):
        world.add_engine(name, blocks=12, slots=4)
    world.add_tier(FakeTier(capacity=64))
    for i in range(requests):
        prompt = [i % 3 + 3] * 5 + [i + 20] * (i % 4)
        slo_class = CLASSES[i % len(CLASSES)]
        world.ask(f"r{i}", prompt, 14, tenant=f"t{i % 3}", slo_class=slo_class, stops=i % 2 == 0)
    return world


def some(world: World, rounds: int) -> None:
    for _ in range(rounds):
        world.now_us += 1_000
        for name in world.engines:
            world.deliver(name)
            world.deliver_copy(name)
        world.deliver_tier()


@pytest.mark.parametrize("change", CHANGES)
def test_each_kind_changes_under_load(change: str, tmp_path: Path) -> None:
    world = World(Limits(overlap="run_ahead"), took_us=1_000)
    recorder = Recorder(world.scheduler, FileSink(tmp_path / "events.log"), {})
    world.scheduler = recorder  # type: ignore[assignment]  # it stands in the place of the core
    busy(world)
    for rounds, policy in ((9, change), (5, back(change)), (6, change)):
        some(world, rounds)
        assert world.scheduler.state.waiting, "no load"
        world.set_policy(policy)
        assert world.scheduler.state.limits.policy == world.limits.policy
    world.finish()
    recorder.close()
    report = rerun_file(tmp_path / "events.log")
    assert report.difference is None
    assert report.events > 150


@pytest.mark.parametrize("order", ["fcfs", "vtc"])
def test_a_changed_order_holds_for_groups_that_wait(order: str) -> None:
    """Popped to the end, the queue has the order of one that had this policy from the start."""
    world = World(Limits(policy=Policy(order="vtc" if order == "fcfs" else "fcfs")))
    dice = random.Random(4)
    world.add_engine(slots=2)
    for i in range(60):
        tenant = f"t{min(dice.randrange(8), 3)}"
        world.ask(f"r{i}", [dice.randrange(3, 900) for _ in range(dice.randrange(1, 9))], 5, tenant=tenant)
        some(world, dice.randrange(3))
    queue = world.scheduler.state.waiting
    assert queue.first("m", {"t0"}) is not None  # some clients are `busy`
    world.set_policy(f"order={order}")
    fresh = WaitingQueue(world.limits.policy, queue.age_us)
    for group in sorted(queue, key=lambda group: group.order):
        assert not group.resumes
        fresh.add(replace(group, queue=None), world.now_us)
    assert len(fresh) > 20
    while len(fresh):
        for running in (None, {"t0"}, {"t1", "t2"}):
            mine, theirs = queue.first("m", running), fresh.first("m", running)
            assert mine is not None
            assert theirs is not None
            assert mine.number == theirs.number
        for waiting in (queue, fresh):
            group = waiting.groups[mine.number]
            waiting.remove(group)
            waiting.served.charge_input(group.client, 7)


def test_service_in_another_order_is_no_debt() -> None:
    """First come, first served, one tenant got nearly all; in turns it gets its half from now on."""
    world = World(Limits(policy=Policy(order="fcfs")))
    world.add_engine(slots=2, blocks=64)
    for i in range(60):
        world.ask(f"a{i}", [5] * 8, 8, tenant="a")
    while len(world.scheduler.state.waiting) > 20:
        world.deliver()
    for i in range(10):
        world.ask(f"b{i}", [6] * 8, 8, tenant="b")
    world.set_policy("order=vtc")
    while world.scheduler.state.waiting.tenants.keys() == {"a", "b"}:
        world.deliver()
    left = world.scheduler.state.waiting.tenants["a"].groups
    assert 7 <= 20 - left <= 13, "it starved, or the other one did"


def test_a_batch_that_was_closed_is_joined_at_once() -> None:
    world = World(Limits(policy=policies.parse("batching=loadtest.policies:static")))
    world.add_engine()
    world.ask("r0", [5] * 4, 9)
    world.deliver()
    world.ask("r1", [6] * 4, 9)
    assert len(world.scheduler.state.waiting) == 1
    world.set_policy("batching=mixed")
    assert not world.scheduler.state.waiting
    world.finish()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_tier_ends_and_comes_back_with_the_policy(restarts: bool) -> None:
    """Copies and lookups on their way end; nothing is leased for ever; afterwards blocks are loaded again."""
    world = busy(World(Limits(overlap="run_ahead"), took_us=1_000), requests=40)
    state = world.scheduler.state
    while not (state.tiers.jobs and state.tiers.lookups):
        some(world, 1)
    world.set_policy("tier=loadtest.policies:recompute")
    assert not state.tiers.by_host
    assert not state.tiers.lookups
    assert not any(executor.pool.write_back for executor in state.executors.values())
    some(world, 20)
    assert not state.tiers.jobs
    if restarts:  # news of a tier is kept for the policy after this one
        world.restart_tier()
    loads = state.counters.loads
    world.set_policy("tier=tiered")
    assert state.tiers.by_host["h"].generation == world.tier.arena.generation
    world.finish()
    assert state.counters.loads > loads


def test_a_name_that_does_not_exist_changes_nothing() -> None:
    world = busy(World())
    state = world.scheduler.state
    before, queue = state.limits, list(state.waiting)
    with pytest.raises(SetupError, match="'lifo' is none of vtc, fcfs"):
        world.scheduler.handle(PolicySet("batching=decode_first,order=lifo"), world.now_us)
    assert state.limits is before
    assert state.waiting.policy is before.policy
    assert list(state.waiting) == queue
    world.finish()


OWN = "victim=services.scheduler.state.policies:latest"


def test_code_is_loaded_at_the_start_only() -> None:
    """An operator's message names policies; what a process imports is its own setting."""
    plain, own = Policy(routing="room"), policies.parse(OWN)
    with pytest.raises(SetupError, match="loaded at the start only: setting policy"):
        asked_policy(f"order=fcfs, {OWN}", plain, plain)
    for now, at_start in ((own, plain), (plain, own)):
        assert asked_policy(OWN, now, at_start) == replace(now, victim=own.victim)
    baseline = "tier=loadtest.policies:swap"
    assert asked_policy(baseline, plain, plain) == policies.parse(baseline, plain)


class Gaps:
    """Stands in the place of a core: how long each executor has no step while a request waits or runs."""

    def __init__(self, core: Recorder) -> None:
        self._core, self.state = core, core.state
        self.flights: dict[str, set[int]] = defaultdict(set)
        self.idle_since_us: dict[str, int] = {}
        self.gaps: list[tuple[int, int]] = []  # when it ended, how long it was
        self.took_us: list[int] = []

    @property
    def is_idle(self) -> bool:
        return self._core.is_idle

    def handle(self, event: Event, now_us: int) -> list[Send]:
        if isinstance(event, Arrived) and isinstance(event.message, StepResult):
            self.flights[event.source].discard(event.message.step)
            self.took_us.append(event.message.forward_us)
            if not self.flights[event.source]:
                self.idle_since_us[event.source] = now_us
        commands = self._core.handle(event, now_us)
        for command in commands:
            if isinstance(command.message, StepPlan):
                self.flights[command.to].add(command.message.step)
                if (since := self.idle_since_us.pop(command.to, None)) is not None:
                    self.gaps.append((now_us, now_us - since))
        return commands


EVERY_US = 100_000


def test_no_executor_idles_for_a_change(tmp_path: Path) -> None:
    """Two virtual H200 under load; a policy changes each 100 ms, and back. No executor idles for more than
    three steps meanwhile, and every event of the log comes out the same."""
    dice, asked, at_us = random.Random(1), [], 0
    for i in range(170):
        at_us += int(dice.expovariate(1 / 15_000))
        output = dice.randrange(20, 200)
        prompt = plain_prompt(i, dice.choice([100, 400, 2_000]))
        slo_class, tenant = CLASSES[i % len(CLASSES)], f"t{i % 3}"
        asked.append(
            SimRequest(f"r{i}", at_us, prompt, output, max_tokens=500, slo_class=slo_class, tenant=tenant)
        )
    texts = [text for change in CHANGES if change[:4] != "tier" for text in (change, back(change))]
    changes = tuple(((4 + number) * EVERY_US, text) for number, text in enumerate(texts))
    machine = Machine(model=H200_8B, slots=32, blocks=1_200, hop=Hop(delay_us=700))
    world = virtual.World(virtual.Setup((machine, machine), policies=changes), Workload(tuple(asked)))
    recorder = Recorder(world.scheduler, FileSink(tmp_path / "events.log"), {})
    world.scheduler = gaps = Gaps(recorder)  # type: ignore[assignment]  # as above
    readers = world.run()
    recorder.close()
    assert [record.served for record in readers.records] == [True] * 170
    first_us, last_us = (virtual.FIRST_US + changes[at][0] for at in (0, -1))
    near = [gap for at_us, gap in gaps.gaps if first_us <= at_us <= last_us + EVERY_US]
    assert len(gaps.flights) == 2
    assert max(near, default=0) <= 3 * median(gaps.took_us)
    report = rerun_file(tmp_path / "events.log")
    assert report.difference is None
    assert report.events > 1_000
