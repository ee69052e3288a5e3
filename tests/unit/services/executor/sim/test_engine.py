"""The simulated engine beyond the contract: its tokens by an independent formula, its time."""

from __future__ import annotations

import time

import pytest
from support.executor.plan_maker import PlanMaker, Row

from services.executor.sampling.logits_processors import Wait
from services.executor.sim.engine import SimBackend, SimOptions, sim_timing
from shared.errors import SetupError
from shared.step_model import H200_8B, SMOLLM2_CPU, StepShape


def token(seed: int, position: int, last: int, vocab: int) -> int:
    """Written out from the description: two rounds of SplitMix64's mixer over seed, place and input."""
    mixed = (seed ^ (position * 0x9E3779B97F4A7C15) ^ (last << 32)) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    return 256 + (mixed ^ (mixed >> 27)) % (vocab - 256)


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_the_next_token_is_a_hash_of_seed_place_and_the_one_before(seed: int) -> None:
    maker = PlanMaker(SimBackend(SimOptions(vocab=900, blocks=8, timing="step=0")))
    maker.open(0, [300, 301, 302], seed=seed)
    ids = [maker.prefill({0: 3}).ids[0], *maker.decode({0: 4}, 5)[0]]
    last, wanted = 302, []
    for position in range(3, 9):
        last = token(seed, position, last, 900)
        wanted.append(last)
    assert ids == wanted


def test_control_tokens_are_never_drawn_and_a_tiny_vocabulary_works() -> None:
    for vocab, low in ((300, 256), (10, 9)):
        maker = PlanMaker(SimBackend(SimOptions(vocab=vocab, blocks=8, timing="step=0")))
        maker.open(0, [1], seed=3)
        ids = [maker.prefill({0: 1}).ids[0], *maker.decode({0: 2}, 40)[0]]
        assert low <= min(ids) <= max(ids) < vocab


def test_a_step_takes_its_fixed_time_and_that_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept = 50.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "sleep", slept.append)
    maker = PlanMaker(SimBackend(SimOptions(blocks=8, timing="step=2000,token=10")))
    for slot in (0, 1):
        maker.open(slot, [300] * 20)
    plan = maker.plan([Row(0, 0, 20), Row(1, 0, 5)])
    pending = maker.backend.forward(plan)
    now_s += 0.001
    maker.backend.sample(pending)
    assert slept == [pytest.approx((2_000 + 25 * 10) / 1e6 - 0.001)]
    pending = maker.backend.forward(plan)
    now_s += 1.0  # sampled late: no wait is left
    maker.backend.sample(pending)
    assert len(slept) == 1


@pytest.mark.parametrize(
    ("setting", "shape", "took_us"),
    [
        ("step=5000,token=20", StepShape(rows=3, tokens=10, kv_tokens=500, attention=900), 5_200),
        ("token=3", StepShape(rows=1, tokens=7, kv_tokens=7, attention=0), 21),
        ("", StepShape(rows=1, tokens=7, kv_tokens=7, attention=0), 0),
        ("h200-8b", StepShape(rows=0, tokens=0, kv_tokens=0, attention=0), H200_8B.weights_us),
        (
            "h200-8b, token=2, stages=4",
            StepShape(rows=64, tokens=64, kv_tokens=64_000, attention=0),
            H200_8B.step_us(StepShape(rows=64, tokens=64, kv_tokens=64_000, attention=0)) + 128,
        ),
    ],
)
def test_the_setting_gives_the_time_of_a_step(setting: str, shape: StepShape, took_us: int) -> None:
    assert sim_timing(setting).step_us(shape) == took_us


def test_the_setting_gives_stages_and_the_hosts_time() -> None:
    assert (sim_timing("step=1").stages, sim_timing("step=1").host_row_us) == (1, 0)
    assert sim_timing("h200-8b").host_row_us == 30
    timing = sim_timing("smollm2-cpu,stages=2,host_row=7")
    assert (timing.model, timing.stages, timing.host_row_us) == (SMOLLM2_CPU, 2, 7)


@pytest.mark.parametrize(
    "entry", ["step", "step=-1", "step=x", "step=1.5", "h100", "speed=4", "step=60000001"]
)
def test_a_setting_that_means_nothing_is_named_with_an_example(entry: str) -> None:
    with pytest.raises(SetupError, match=rf"sim: '{entry}' is neither a preset \(h200-8b, smollm2-cpu\) nor"):
        sim_timing(f"token=1,{entry}")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("h200-8b,step=4", r"one preset, or step=\.\.\., not both"),
        ("h200-8b,smollm2-cpu", "one preset, or step"),
        ("stages=0", "stages=0 is not from 1 to 64"),
        ("stages=65", "stages=65 is not from 1 to 64"),
    ],
)
def test_settings_that_contradict_are_refused(setting: str, text: str) -> None:
    with pytest.raises(SetupError, match=f"sim: .*{text}"):
        sim_timing(setting)


class Watch:
    """A clock that sleeping advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self._from_s = 50.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, time_s: float) -> None:
        self.now_s += time_s

    def passed_ms(self) -> float:
        """Since it was asked last."""
        passed_s, self._from_s = self.now_s - self._from_s, self.now_s
        return passed_s * 1e3


def test_stages_of_a_pipeline_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of 3 ms: A leaves the first at 3, B at 6; A is done at 6, B at 9."""
    watch = Watch(monkeypatch)
    backend = SimBackend(SimOptions(blocks=8, timing="step=6000,stages=2"))
    assert backend.info.stages == 2
    maker = PlanMaker(backend)
    at_ms, pending = [], []
    for slot in (0, 1):
        maker.open(slot, [300])
        pending.append(backend.forward(maker.plan([Row(slot, 0, 1, feeds=(slot,))])))
        at_ms.append((watch.now_s - 50) * 1e3)
    for one in pending:
        backend.sample(one)
        at_ms.append((watch.now_s - 50) * 1e3)
    assert at_ms == pytest.approx([3, 6, 6, 9])


@pytest.mark.parametrize(
    ("asked", "took_ms"),
    [
        (["{}"] * 3, 5 + 3 * 0.03),  # host_row, one row after the other
        (['{"ms": 20}'] * 3, 5 + 20),  # side by side, as in an engine that waits in earnest
        (['{"ms": 20}', '{"ms": 7}', "{}", ""], 5 + 20 + 0.03),
        ([""] * 2, 5),
    ],
)
def test_wait_takes_the_hosts_time_after_the_forward(
    monkeypatch: pytest.MonkeyPatch, asked: list[str], took_ms: float
) -> None:
    watch = Watch(monkeypatch)
    maker = PlanMaker(
        SimBackend(SimOptions(blocks=8, timing="step=5000,host_row=30", processors={"w": Wait}))
    )
    for slot, args in enumerate(asked):
        specs = (f'{{"name": "w", "args": {args}}}',) if args else ()
        maker.open(slot, [300], processors=specs)
    output = maker.prefill(dict.fromkeys(range(len(asked)), 1))
    assert output.row_errors == ()
    assert watch.passed_ms() == pytest.approx(took_ms)
    maker.prefill(dict.fromkeys(range(len(asked)), 1))  # a second step waits as long
    assert watch.passed_ms() == pytest.approx(took_ms)
