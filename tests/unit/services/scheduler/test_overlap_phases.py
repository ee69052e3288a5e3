"""`auto` through changing workloads on a virtual machine, beside each mode that never changes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from itertools import accumulate

import pytest

from loadtest.simulator.engine import Machine
from loadtest.simulator.hops import Hop
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.world import Setup, World
from services.scheduler.state import requests
from services.scheduler.state.state import Limits
from shared.step_model import H200_8B

MACHINE = Machine(H200_8B, hop=Hop(900, 200))  # 2 ms from a step's end to the next plan's arrival
FIXED = ("single", "run_ahead", "two_batch")
PATIENT = requests.parse("standard=0/100/0")
MOST = 1.02  # of the time of the best mode


def asked(
    number: int, prompt: int, output: int, *, stops: bool = False, host_fed: bool = False
) -> SimRequest:
    most = output + 100 if stops else output
    return SimRequest(f"r{number}", 0, plain_prompt(number, prompt), output, most, host_fed=host_fed)


# each takes one to six seconds of the virtual machine: clients, requests, one of them
PHASES: dict[str, tuple[int, int, Callable[[int], SimRequest]]] = {
    "one token": (32, 900, lambda n: asked(n, 200, 1)),
    "one token, then a stop": (32, 700, lambda n: asked(n, 200, 1, stops=True)),
    "a few tokens, then a stop": (32, 600, lambda n: asked(n, 40, 4, stops=True)),
    "long answers": (32, 96, lambda n: asked(n, 64, 250)),
    "long answers of many": (128, 256, lambda n: asked(n, 64, 200)),
    "long answers, stopped": (32, 96, lambda n: asked(n, 64, 250, stops=True)),
    "one at a time": (1, 10, lambda n: asked(n, 64, 100)),
    "host-fed": (64, 128, lambda n: asked(n, 64, 200, host_fed=True)),
    "host-fed, few": (8, 32, lambda n: asked(n, 64, 150, host_fed=True)),
    "host-fed, many": (256, 512, lambda n: asked(n, 64, 60, host_fed=True)),
    "some host-fed": (64, 128, lambda n: asked(n, 64, 200, host_fed=n % 8 == 0)),
    "prompts alone": (16, 200, lambda n: asked(n, 1_024, 1)),
    "prompts and answers": (32, 160, lambda n: asked(n, 512, 64)),
}


@cache
def times_us(mode: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """How long each of these workloads took, one after the other, in one world: until nine tenths of its
    tokens were there. What is left at its end runs with fewer and fewer rows, and is another load."""
    limits = Limits(overlap=mode, classes=PATIENT, max_waiting=10_000)
    world, number, found = World(Setup((MACHINE,), limits), Workload(())), 0, []
    world.run()
    for name in names:
        clients, count, make = PHASES[name]
        began_us = world.now_us
        world.go_on(Workload(tuple(make(number + i) for i in range(1, count + 1)), clients))
        number += count
        found.append(_most_there_us(world, began_us) - began_us)
    assert all(record.served for record in world.readers.records)
    return tuple(found)


def _most_there_us(world: World, began_us: int) -> int:
    series = world.readers.series
    arrived = [(at, count) for at, count in zip(series[::2], series[1::2], strict=True) if at > began_us]
    sums = list(accumulate(count for _, count in arrived))
    return next(at for (at, _), so_far in zip(arrived, sums, strict=True) if so_far >= sums[-1] * 9 // 10)


def sequence(seed: int) -> tuple[str, ...]:
    rng, names = random.Random(seed), list(PHASES)
    rng.shuffle(names)
    return tuple(names)


@pytest.mark.parametrize("seed", range(1, 1 + int(os.environ.get("HEADRACE_PHASE_SEEDS", "1"))))
def test_through_any_sequence_of_workloads_auto_is_as_quick_as_the_best_mode(seed: int) -> None:
    names = sequence(seed)
    best = [min(times) for times in zip(*(times_us(mode, names) for mode in FIXED), strict=True)]
    slower = {
        name: round(mine / other, 3)
        for name, mine, other in zip(names, times_us("auto", names), best, strict=True)
        if mine > MOST * other
    }
    assert slower == {}
