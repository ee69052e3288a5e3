"""The core's cost of a step hardly grows with the number of executors. No decision differs from those of the
slow forms, which walk all running sequences of all executors each time."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import sys
from typing import Any

import pytest

from loadtest.scenarios.scheduler_cpu import Load, measured, world_of
from loadtest.simulator.engine import Machine
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.world import Setup, World
from services.scheduler import admission, headroom, load_shedding, preemption
from services.scheduler.reports.event_log import digest_of
from services.scheduler.state import policies, requests
from services.scheduler.state.requests import Event, Send
from services.scheduler.state.state import Executor, Limits, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.kv_blocks import blocks_for
from shared.messages import Tokenized
from shared.step_model import PRESETS, StepShape

MOST_GROWTH = 1.5  # of walks over all rows at each arrival: 2.5 to 3.1
LIMITS = "interactive=800/50/0,standard=3000/100/2000,batch=0/500/4000"
ENOUGH = {"preempted": 100, "refused": 200, "served": 1_000}


def slow_ttft_us(state: State, tokenized: Tokenized, level: int, limit_us: int = 0) -> int:
    """The forecast from all rows, and the wait of each executor from all of its rows."""
    executors = load_shedding.serving(state, tokenized.model)
    if not executors or any(e.cost_model.seen < load_shedding.MIN_STEPS_SEEN for e in executors):
        return 0
    groups, tokens = state.waiting.ahead(tokenized.model, (tokenized.tenant, level))
    ahead, speed = tokens + len(tokenized.tokens), 0
    for e in executors:
        cached, chunk = [s.computed for s in e.running if not s.is_prefilling], load_shedding.CHUNK_TOKENS
        prompts = [s for s in e.running if s.is_prefilling and s.parent is None and s.level <= level]
        ahead += sum(s.opened_length - s.computed for s in prompts)
        rows, kv_tokens = len(cached), sum(cached)
        shape = StepShape(rows + 1, rows + chunk, kv_tokens + chunk, kv_tokens + chunk * chunk // 2)
        speed += 1_000_000_000_000 // max(e.cost_model.predict_us(shape) * 1000 // chunk, 1)
    slots, tokens = groups // len(executors) + 1, tokens // len(executors) + len(tokenized.tokens)
    waits = [
        group.request.tokenized.max_tokens
        for group in state.waiting
        if group.queue is not None
        and group.level <= level
        and group.request.tokenized.model == tokenized.model
    ]
    mean = state.mean_output_tokens
    output = max(min(mean, sum(waits) // len(waits)), 1) if waits else mean
    wait_us = min(slow_wait_us(state, e, level, slots, tokens, output) for e in executors)
    return ahead * 1_000_000_000 // max(speed, 1) + wait_us + min(e.cost_model.loop_us for e in executors)


def slow_wait_us(state: State, executor: Executor, level: int, slots: int, tokens: int, output: int) -> int:
    pool, mean = executor.pool, state.mean_output_tokens
    stay = [s for s in executor.running if s.level <= level or s.turn.pinned]
    slots -= len(pool.free_slots) + pool.fenced_slots + len(executor.running) - len(stay)
    blocks = blocks_for(tokens, pool.block_tokens) - pool.unreserved_blocks - pool.coming_blocks
    blocks -= sum(len(s.table) for s in executor.running if s not in stay)
    if slots <= 0 and blocks <= 0:
        return 0
    steps, lefts = 0, [max(min(mean, s.max_length - s.prompt_tokens) - s.generated, 1) for s in stay]
    for left, held in sorted(zip(lefts, [len(s.table) for s in stay], strict=True)):
        if slots <= 0 and blocks <= 0:
            break
        slots, blocks, steps = slots - 1, blocks - held, left
    used = len(executor.running) + pool.fenced_slots
    steps += -(-max(slots, 0) // max(used, 1)) * output
    return steps * executor.pace.step_us


def slow_blocking_state(state: State, group: SequenceGroup) -> tuple[int, ...]:
    """Each step of each executor is a reason to try again."""
    seen = [group.number, group.level, state.next_seq if len(state.executors) > 1 else 0]
    seen += admission._others_above(state, group)
    for e in state.executors.values():
        seen += e.step, e.pool.free_blocks, e.pool.reserved, len(e.pool.free_slots), e.draining
    return tuple(seen)


def slow_least_short(state: State, able: list[Executor], group: SequenceGroup) -> str:
    return min((admission._shortfall(state, e, group), e.source) for e in able)[1]


def slow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(load_shedding, "ttft_us", slow_ttft_us)
    patch.setattr(admission, "_blocking_state", slow_blocking_state)
    patch.setattr(admission, "_least_short", slow_least_short)
    patch.setattr(preemption, "victims_by", lambda state, group: (True, preemption_comes(state, group)))
    patch.setattr(headroom, "headroom_bound", lambda state, executor, *joining: executor.pool.blocks * 99)


def preemption_comes(state: State, group: SequenceGroup) -> bool:
    tenants = {tenant for e in state.executors.values() if not e.draining for tenant in e.running_by_tenant}
    return not group.resumes and group.level < 2 and group.client[0] not in tenants


def traffic(dice: random.Random) -> Workload:
    """Bursts of requests with lengths, classes and tenants at random; some share a prompt, some end early."""
    made, at_us, gap_us = [], 0, dice.choice((5_000, 30_000, 80_000))
    tenants, classes = dice.choice((1, 2, 5)), dice.choice((("standard",), requests.CLASS_NAMES))
    for number in range(1, 400):
        at_us += int(dice.expovariate(1 / gap_us)) if dice.random() < 0.3 else 0
        answer = dice.randint(5, 200)
        made.append(
            SimRequest(
                request=f"r{number}",
                arrival_us=at_us,
                prompt=plain_prompt(dice.choice((number, dice.randint(1, 20))), dice.randint(8, 600)),
                output_tokens=answer,
                max_tokens=answer + dice.choice((0, 200)),
                slo_class=dice.choice(classes),
                tenant=f"t{dice.randint(1, tenants)}",
                n=dice.choice((1, 1, 1, 2)),
                host_fed=dice.random() < 0.05,
            )
        )
    return Workload(tuple(made))


def decisions(seed: int, *, each_event_plans: bool) -> tuple[bytes, dict[str, int]]:
    """A digest of all commands of a run, and what happened in it."""
    dice = random.Random(seed)
    machine = Machine(PRESETS["h200-8b"])
    machines = tuple(
        dataclasses.replace(machine, blocks=dice.choice((400, 1_200)), slots=dice.choice((8, 24)))
        for _ in range(dice.choice((1, 2, 5)))
    )
    limits = Limits(
        overlap=dice.choice(("auto", "auto", "run_ahead", "two_batch")),
        policy=policies.parse(dice.choice(("", "", "reservation=foreseen", "routing=room"))),
        classes=requests.parse(LIMITS),
    )
    world = World(Setup(machines, limits, seed), traffic(dice))
    handle, digest = world.scheduler.handle, hashlib.blake2b(digest_size=8)

    def handled(event: Event, now_us: int) -> list[Send]:
        if each_event_plans:
            for executor in world.scheduler.state.executors.values():
                executor.settled = -1
        commands = handle(event, now_us)
        digest.update(digest_of(commands))
        return commands

    world.scheduler.handle = handled  # type: ignore[method-assign]  # a tap
    records = world.run().records
    served = sum(record.served for record in records)
    preempted = world.scheduler.state.counters.preemptions
    return digest.digest(), {"preempted": preempted, "refused": len(records) - served, "served": served}


def test_decisions_equal_the_decisions_of_the_slow_forms() -> None:
    total = dict.fromkeys(ENOUGH, 0)
    for seed in (0, 3, 5):  # on two executors, one, and five
        found = decisions(seed, each_event_plans=False)
        with pytest.MonkeyPatch.context() as patch:
            slow(patch)
            assert decisions(seed, each_event_plans=True) == found
        total = {name: total[name] + count for name, count in found[1].items()}
    assert all(total[name] >= least for name, least in ENOUGH.items()), total


@pytest.mark.parametrize(
    "load", [Load("together", 32, 100, 1), Load("apart", 32, 100, 1, spread=True), Load("long", 600, 100, 1)]
)
def test_a_step_takes_about_as_many_calls_beside_seven_other_executors(load: Load) -> None:
    """Calls of functions, since times depend on the machine."""
    assert calls_a_step(load, 8) <= MOST_GROWTH * calls_a_step(load, 1)


def calls_a_step(load: Load, executors: int) -> float:
    world, count = world_of(load, executors), 0
    handle = world.scheduler.handle

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    def handled(event: Event, now_us: int) -> list[Send]:
        sys.setprofile(profile)
        commands = handle(event, now_us)
        sys.setprofile(None)
        return commands

    world.scheduler.handle = handled  # type: ignore[method-assign]  # a tap
    world.run()
    return count / sum(engine.totals.steps for engine in world.engines.values())


def test_the_figures_of_a_run_are_of_its_steps() -> None:
    row = measured(Load("tiny", 8, 10, 1), (1, 2))
    assert row["steps"] > 20
    assert 0 < row["rows_a_step"] <= 64
    assert row["ms_a_step"] > 0
