"""Runs the arms of a scenario, one after the other, and averages over its seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from loadtest.scenarios.definitions import Arm, Options, Scenario
from loadtest.scenarios.real_tier import RealTier
from loadtest.simulator.report import Figures, figures
from loadtest.simulator.world import Setup, World
from services.scheduler.state import policies, requests
from services.scheduler.state.state import Limits

Row = tuple[Arm, Figures]


def limits_of(arm: Arm) -> Limits:
    """The scheduler's limits that an arm asks for: the defaults, but for what it names. Raises SetupError for
    a policy or class that does not exist."""
    policy, classes = policies.parse(arm.policy), requests.parse(arm.slo)
    more: dict[str, Any] = dict(arm.limits)
    return Limits(overlap=arm.overlap, policy=policy, classes=classes, **more)


def run(scenario: Scenario, options: Options) -> Iterator[Row]:
    """A row of figures for each arm."""
    for arm in scenario.arms:
        yield arm, run_arm(scenario, arm, options)


def run_arm(scenario: Scenario, arm: Arm, options: Options) -> Figures:
    """The mean of each figure over the seeds."""
    rows = []
    for seed in range(options.seed, options.seed + scenario.seeds):
        machines, tier = (*(scenario.machine,) * scenario.replicas, *scenario.others), scenario.tier
        made = partial(RealTier, tier, scenario.machine.block_bytes) if tier is not None else None
        setup = Setup(machines, limits_of(arm), seed, scenario.until_us, made)
        world = World(setup, scenario.workload(replace(options, seed=seed)))
        world.run()
        row = figures(world, scenario.bounds)
        rows.append(row | (scenario.extra(world) if scenario.extra else {}))
    return {name: round(sum(row[name] for row in rows) / len(rows), 3) for name in rows[0]}
