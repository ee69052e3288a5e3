"""Models that share memory: which wake, which sleep, and that two of them do not fight."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from services.launcher.host_agent import (
    ASLEEP,
    CHANGING,
    LEAST_AWAKE_US,
    LOADED,
    MOST_WAIT_US,
    UNLOADED,
    MemoryRule,
    ModelNow,
    Sleep,
    Wake,
)

SECOND = 1_000_000


def now(name: str, state: str, work: int = 0, waits_us: int = 0, need_mib: int = 6_000) -> ModelNow:
    return ModelNow(name, state, need_mib, work, waits_us)


def test_one_that_fits_wakes_at_once() -> None:
    rule = MemoryRule(12_000)
    assert rule.decide([now("a", LOADED, 900), now("b", ASLEEP)], 0) is None
    assert rule.decide([now("a", LOADED, 900), now("b", ASLEEP, 1)], 0) == Wake("b")
    assert rule.decide([now("a", LOADED, 900), now("b", UNLOADED, 1)], 0) == Wake("b")


def test_memory_rule_replaces_a_model_with_less_work_after_its_least_time_awake() -> None:
    rule = MemoryRule(8_000)
    assert rule.decide([now("a", LOADED, 5), now("b", ASLEEP, 6)], 0) is None
    assert rule.decide([now("a", LOADED, 5), now("b", ASLEEP, 6)], LEAST_AWAKE_US - 1) is None
    assert rule.decide([now("a", LOADED, 6), now("b", ASLEEP, 6)], LEAST_AWAKE_US) is None
    assert rule.decide([now("a", LOADED, 5), now("b", ASLEEP, 6)], LEAST_AWAKE_US) == Sleep("a")
    assert rule.decide([now("a", CHANGING, 5), now("b", ASLEEP, 6)], LEAST_AWAKE_US) is None
    assert rule.decide([now("a", ASLEEP, 50), now("b", ASLEEP, 6)], LEAST_AWAKE_US) == Wake("b"), "its turn"


def test_a_long_wait_beats_any_work() -> None:
    rule = MemoryRule(8_000)
    rule.decide([now("a", LOADED, 10**9)], 0)
    before = [now("a", LOADED, 10**9), now("b", ASLEEP, 1, MOST_WAIT_US - 1)]
    assert rule.decide(before, 10**9) is None
    assert rule.decide([before[0], now("b", ASLEEP, 1, MOST_WAIT_US)], 10**9) == Sleep("a")


def test_only_as_many_sleep_as_must() -> None:
    rule = MemoryRule(10_000)
    awake = [now("a", LOADED, 3, need_mib=4_000), now("b", LOADED, 1, need_mib=4_000)]
    rule.decide(awake, 0)
    assert rule.decide([*awake, now("c", ASLEEP, 9, need_mib=6_000)], LEAST_AWAKE_US) == Sleep("b")
    second = [awake[0], now("b", ASLEEP, 1, need_mib=4_000), now("c", ASLEEP, 9, need_mib=6_000)]
    assert rule.decide(second, LEAST_AWAKE_US) == Wake("c")


def test_none_sleeps_if_that_frees_too_little() -> None:
    rule = MemoryRule(10_000)
    awake = [now("a", LOADED, 30, need_mib=8_000), now("b", LOADED, 1, need_mib=1_000)]
    rule.decide(awake, 0)
    assert rule.decide([*awake, now("c", ASLEEP, 9, need_mib=6_000)], LEAST_AWAKE_US) is None


def test_one_that_can_never_fit_is_refused_with_its_need() -> None:
    rule = MemoryRule(8_192)
    assert rule.why_not("big", 14_541) == (
        "big needs 14.2 GiB awake, and the models here share 8.0 (awake_gib)"
    )
    assert rule.why_not("small", 8_192) == ""
    rule.decide([now("a", LOADED)], 0)
    assert rule.decide([now("a", LOADED), now("big", UNLOADED, 9, 10**9, 14_541)], 10**9) is None


def test_memory_rule_sends_one_to_sleep_when_too_many_are_awake_at_the_start() -> None:
    rule = MemoryRule(8_000)
    assert rule.decide([now("a", LOADED, 1), now("b", LOADED)], 0) == Sleep("b")
    assert MemoryRule(8_000).decide([now("a", LOADED, need_mib=9_000)], 0) is None, "it is alone"


def test_swap_is_dropped_when_its_model_has_no_requests_any_more() -> None:
    rule = MemoryRule(8_000)
    rule.decide([now("a", LOADED)], 0)
    assert rule.decide([now("a", LOADED), now("b", ASLEEP, 6)], LEAST_AWAKE_US) == Sleep("a")
    assert rule.decide([now("a", ASLEEP, 2), now("b", ASLEEP)], LEAST_AWAKE_US) == Wake("a")


@dataclass
class Host:
    """Models on a clock by hand: a change takes 4 s, a request 1 s of an awake model."""

    names: tuple[str, ...]
    dice: random.Random
    rate: dict[str, float]  # requests a second
    rule: MemoryRule = field(default_factory=lambda: MemoryRule(8_000))
    now_s: int = 0
    states: dict[str, str] = field(default_factory=dict)
    done_s: dict[str, tuple[int, str]] = field(default_factory=dict)
    queue: dict[str, list[int]] = field(default_factory=dict)
    woken: list[tuple[int, str]] = field(default_factory=list)
    slept: list[tuple[int, str]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = {name: LOADED if name == self.names[0] else ASLEEP for name in self.names}
        self.queue = {name: [] for name in self.names}
        self.woken.append((0, self.names[0]))

    def second(self) -> None:
        self.now_s += 1
        for name in self.names:
            if self.states[name] == CHANGING and self.now_s >= self.done_s[name][0]:
                self.states[name] = self.done_s[name][1]
                if self.states[name] == LOADED:
                    self.woken.append((self.now_s, name))
            self.queue[name] += [self.now_s] * int(self.rate[name] + self.dice.random())
            if self.states[name] == LOADED:
                self.waits += [self.now_s - at for at in self.queue[name][:3]]
                del self.queue[name][:3]
        models = [
            now(
                name,
                self.states[name],
                100 * len(waiting),
                (self.now_s - (waiting or [self.now_s])[0]) * SECOND,
            )
            for name, waiting in self.queue.items()
        ]
        assert sum(model.need_mib for model in models if model.state in (LOADED, CHANGING)) <= 8_000
        match self.rule.decide(models, self.now_s * SECOND):
            case Sleep(name):
                self.slept.append((self.now_s, name))
                self.states[name], self.done_s[name] = CHANGING, (self.now_s + 4, ASLEEP)
            case Wake(name):
                self.states[name], self.done_s[name] = CHANGING, (self.now_s + 4, LOADED)


@pytest.mark.parametrize("rates", [(9.0, 9.0), (0.3, 0.3), (9.0, 0.02), (0.02, 9.0), (2.0, 2.0), (0.0, 9.0)])
def test_two_models_take_turns_and_do_not_fight(rates: tuple[float, float]) -> None:
    host = Host(("a", "b"), random.Random(7), dict(zip("ab", rates, strict=True)))
    for _ in range(1_800):
        host.second()
    for slept_s, name in host.slept:
        woken_s = max(at for at, other in host.woken if other == name and at <= slept_s)
        assert slept_s - woken_s >= LEAST_AWAKE_US / SECOND - 1
    assert len(host.slept) <= 1_800 * SECOND / LEAST_AWAKE_US
    for name in "ab":
        slept = [at for at, other in host.slept if other == name] or [0]
        woken = [at for at, other in host.woken if other == name]
        if host.rate[name] >= 0.3:  # it is never without a request for long
            away_s = [min((at for at in woken if at > since), default=1_800) - since for since in slept]
            assert max(away_s) <= 110, "60 s of waiting, and the change"
    if max(rates) < 1:
        assert max(host.waits) <= 110
