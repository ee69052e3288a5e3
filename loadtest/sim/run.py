"""Runs the arms of a scenario, one after the other, and averages over its seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from loadtest.sim.arms import limits_of
from loadtest.sim.real_tier import RealTier
from loadtest.sim.scenarios import Arm, Options, Scenario
from loadtest.simulator.report import Figures, figures
from loadtest.simulator.world import Setup, World

Row = tuple[Arm, Figures]


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
