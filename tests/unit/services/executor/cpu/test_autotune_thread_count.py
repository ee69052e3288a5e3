"""The number of threads of a CPU engine, on virtual machines whose best number is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.cpu.autotune import LATEST, ThreadCount, _ladder

Machine = Callable[[int, int], float]  # threads, tokens -> us of a step


def beside(busy: int, cores: int) -> Machine:
    """Other processes keep so many of the cores busy: a step with more threads than are left waits for them
    at every barrier."""

    def step(threads: int, tokens: int) -> float:
        contended = threads > max(1, cores - busy)
        return (20_000 + 300 * tokens) / threads**0.6 * (12 if contended else 1)

    return step


def steps_on(count: ThreadCount, machine: Machine, steps: int, seed: int = 1) -> list[tuple[int, float]]:
    """The threads and the time of each of so many steps, of sizes as they come, with a tenth of noise."""
    rng, found = random.Random(seed), []
    for _ in range(steps):
        tokens = rng.choice([1, 1, 1, 1, 2, 8, 200])
        took = machine(count.now, tokens) * rng.uniform(0.95, 1.05)
        found.append((count.now, took / machine(1, tokens)))
        count.observe(tokens, round(took))
    return found


@pytest.mark.parametrize(
    ("busy", "cores", "best"), [(0, 1, 1), (0, 2, 2), (1, 2, 1), (4, 8, 4), (0, 8, 8), (1, 64, 48)]
)
def test_steps_find_the_quickest_count_and_keep_it(busy: int, cores: int, best: int) -> None:
    count, machine = ThreadCount(cores), beside(busy, cores)
    assert count.now == cores
    steps_on(count, machine, 200)
    later = [threads for threads, _ in steps_on(count, machine, 400)]
    assert later.count(best) >= 0.9 * len(later)


def test_the_count_falls_within_twenty_steps_of_a_busy_process_and_rises_after_it() -> None:
    count = ThreadCount(2)
    steps_on(count, beside(0, 2), 5 * LATEST)
    fallen = [threads for threads, _ in steps_on(count, beside(1, 2), 200)]
    assert fallen[20:].count(1) >= 0.9 * len(fallen[20:])
    steps_on(count, beside(1, 2), 5 * LATEST)
    risen = [threads for threads, _ in steps_on(count, beside(0, 2), 2 * LATEST)]
    assert risen[LATEST + 20 :].count(2) >= 0.9 * len(risen[LATEST + 20 :])


@given(
    cores=st.sampled_from([1, 2, 3, 6, 16]),
    phases=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    seed=st.integers(0, 9),
)
def test_steps_take_at_most_a_ninth_longer_than_with_the_best_count_after_each_change(
    cores: int, phases: list[int], seed: int
) -> None:
    count = ThreadCount(cores)
    for busy in phases:
        machine = beside(busy, cores)
        steps_on(count, machine, 2 * LATEST * cores.bit_length(), seed)
        took = [took for _, took in steps_on(count, machine, LATEST, seed)]
        best = min(machine(threads, 1) for threads in _ladder(cores)) / machine(1, 1)
        assert median(took) <= best / 0.9


def test_steps_of_one_size_alone_change_no_thread_count() -> None:
    count = ThreadCount(4)
    for tokens in (1, 2, 4, 8, 16, 32):
        count.observe(tokens, 10**9)
        assert count.now == 4


def test_a_trial_ends_when_steps_come_to_have_a_size_not_seen_before() -> None:
    """Else the tried count would compute all steps of a batch that just grew."""
    count, machine = ThreadCount(2), beside(0, 2)
    while count.now == 2:
        count.observe(100, round(machine(2, 100)))
    used = []
    for _ in range(100):
        used.append(count.now)
        count.observe(8, round(machine(count.now, 8)))
    assert used.count(1) <= 20


def test_prompts_of_other_lengths_do_not_look_like_a_faster_count() -> None:
    """One thread computes 33 tokens sooner than two compute 60."""

    def took(tokens: int) -> int:
        return round(600 * tokens / count.now**0.6)

    count = ThreadCount(2)
    for tokens in (33, 60, 33, 60):
        count.observe(tokens, took(tokens))
    used = []
    for _ in range(400):
        tokens = 60 if count.now == 2 else 33
        used.append(count.now)
        count.observe(tokens, took(tokens))
    assert used.count(1) <= 40


def test_fewer_threads_are_tried_only_if_one_waits_for_a_core() -> None:
    """Steps of a noisy kind, which look slow again and again."""
    rng, waits = random.Random(3), [0.1]
    count = ThreadCount(2, waits=lambda: waits[0])

    def used(steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            found.append(count.now)
            count.observe(40, round(10_000 / count.now * rng.uniform(1, 4)))
        return found

    assert used(600) == [2] * 600
    waits[0] = 0.5
    assert 1 in used(LATEST + 1)


def test_more_threads_are_tried_though_none_waits_for_a_core() -> None:
    waits = [0.5]
    count = ThreadCount(2, waits=lambda: waits[0])
    steps_on(count, beside(0, 2), 100)
    assert [threads for threads, _ in steps_on(count, beside(1, 2), 200)][-1] == 1
    waits[0] = 0.0
    assert [threads for threads, _ in steps_on(count, beside(0, 2), 2 * LATEST)][-1] == 2
