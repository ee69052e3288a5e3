"""The estimate of step times against machines whose times are known by formula."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from services.scheduler.state.cost_model import CostModel, DraftTimes, chunk_tokens
from shared.step_model import PRESETS, StepModel, StepShape

# preset -> most decode rows, longest chunk, longest context of its workload
WORKLOADS = {"h200-8b": (256, 2048, 4000), "smollm2-cpu": (64, 512, 2000)}
EMPTY = StepShape(0, 0, 0, 0)


def shapes(seed: int, count: int, preset: str) -> list[StepShape]:
    """Steps of 0 to all decode rows, 40 % of them with a chunk."""
    rng, (rows_most, chunk_most, context) = random.Random(seed), WORKLOADS[preset]
    made = []
    for _ in range(count):
        rows = int(2 ** rng.uniform(0, math.log2(rows_most))) if rng.random() > 0.1 else 0
        starts = [rng.randrange(50, context) for _ in range(rows)]
        shape = StepShape(rows, rows, sum(starts) + rows, sum(starts))
        if not rows or rng.random() < 0.4:
            shape = shape.with_chunk(rng.choice([0, 0, 512, context // 2]), rng.randrange(1, chunk_most))
        made.append(shape)
    return made


def teach(costs: CostModel, model: StepModel, steps: list[StepShape], rng: random.Random) -> None:
    for shape in steps:
        costs.observe(shape, int(model.step_us(shape) * rng.gauss(1, 0.05)))


def error(costs: CostModel, model: StepModel, held_out: list[StepShape], slower: int = 1) -> float:
    """Mean relative error of the predictions."""
    real = [slower * model.step_us(shape) for shape in held_out]
    return sum(abs(costs.predict_us(s) - us) / us for s, us in zip(held_out, real, strict=True)) / len(real)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_300_noisy_steps_are_enough(preset: str, seed: int) -> None:
    costs, model = CostModel(), PRESETS[preset]
    teach(costs, model, shapes(seed, 300, preset), random.Random(seed))
    assert costs.seen == 300
    assert error(costs, model, shapes(99, 300, preset)) < 0.05
    assert 20 < costs.error_pm < 80  # the noise itself is 40 per mille


@pytest.mark.parametrize("preset", PRESETS)
def test_a_machine_that_becomes_slower_is_followed_within_100_steps(preset: str) -> None:
    costs, model, rng = CostModel(), PRESETS[preset], random.Random(1)
    teach(costs, model, shapes(1, 300, preset), rng)
    for shape in shapes(2, 100, preset):
        costs.observe(shape, int(2 * model.step_us(shape) * rng.gauss(1, 0.05)))
    assert error(costs, model, shapes(99, 300, preset), slower=2) < 0.05


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("longest", [20, 100, 257, 260, 300])
def test_chunks_longer_than_any_before_are_predicted_about_right(preset: str, longest: int) -> None:
    """After short prompts beside few decodes, as a fresh executor has them."""
    for seed in range(10):
        costs, model, rng = CostModel(), PRESETS[preset], random.Random(f"{seed} {longest}")
        for number in range(1, 101):
            rows, at = rng.randrange(3), rng.randrange(50, 700)
            shape = StepShape(rows, rows, rows * (at + 1), rows * at)
            if not rows or number % 5 == 0:
                shape = shape.with_chunk(0, rng.randrange(longest // 2, longest) if number < 100 else longest)
            costs.observe(shape, model.step_us(shape))
        for chunk in (512, 1_024):
            times = costs.predict_us(EMPTY.with_chunk(0, chunk)) / model.step_us(EMPTY.with_chunk(0, chunk))
            assert times <= 2.0 * max(1.0, 217 / longest), (seed, chunk, times)


@pytest.mark.parametrize("seed", range(5))
def test_a_larger_step_never_costs_less(seed: int) -> None:
    costs, rng = CostModel(), random.Random(seed)
    for shape in shapes(seed, 200, "h200-8b"):
        costs.observe(shape, rng.randrange(100, 100_000))  # after any history
    for shape in shapes(seed + 100, 50, "h200-8b"):
        times = [costs.predict_us(shape.with_chunk(64, count)) for count in range(1, 1_024, 7)]
        assert times == sorted(times)
        assert costs.predict_us(shape) <= times[0]


def test_cost_model_predicts_zero_before_the_first_step() -> None:
    costs = CostModel()
    assert (costs.seen, costs.predict_us(EMPTY.with_chunk(0, 512))) == (0, 0)
    assert (costs.loop_us, costs.host_us(8), costs.error_pm) == (0, 0, 0)
    costs.observe(EMPTY.with_chunk(0, 1), 0)  # a stamp that is no time
    assert costs.seen == 0


def test_one_step_is_known_at_once() -> None:
    costs = CostModel()
    shape = StepShape(8, 8, 8_008, 8_000)
    costs.observe(shape, 5_000)
    assert costs.predict_us(shape) == pytest.approx(5_000, abs=1)


def test_loop_and_host_times_are_learned() -> None:
    costs = CostModel()
    costs.observe_loop(800)
    assert costs.loop_us == 800
    costs.observe_loop(1_600)
    assert costs.loop_us == 900
    costs.observe_host(10, 300)
    assert costs.host_us(256) == 7_680
    costs.observe_host(0, 5)
    costs.observe_host(10, 700)  # 30 + (70 - 30) / 8
    assert costs.host_us(10) == 350


def test_same_steps_give_the_same_numbers() -> None:
    one, other = CostModel(), CostModel()
    for costs in (one, other):
        teach(costs, PRESETS["h200-8b"], shapes(3, 150, "h200-8b"), random.Random(3))
    held_out = shapes(99, 50, "h200-8b")
    assert [one.predict_us(s) for s in held_out] == [other.predict_us(s) for s in held_out]


@pytest.mark.parametrize("bound_us", [0, 5_100, 8_000, 20_000, 10**9])
@pytest.mark.parametrize("start", [0, 3_000])
@pytest.mark.parametrize("most", [0, 15, 16, 1_000, 2_048])
def test_the_chunk_is_the_largest_that_fits(bound_us: int, start: int, most: int) -> None:
    costs = CostModel()
    teach(costs, PRESETS["h200-8b"], shapes(1, 300, "h200-8b"), random.Random(1))
    decodes = StepShape(16, 16, 16_016, 16_000)
    fitting = [
        tokens
        for tokens in range(16, most + 1, 16)
        if costs.predict_us(decodes.with_chunk(start, tokens)) <= bound_us
    ]
    assert chunk_tokens(costs, partial(decodes.with_chunk, start), bound_us, 16, most) == max(
        fitting, default=0
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_prompts_of_many_are_predicted_after_single_requests(seed: int) -> None:
    """Single requests do not show what a row costs, and all their chunks are of one size. And the decodes of
    many, which take longer than they show, are no sign of a slower machine."""
    model = StepModel(
        weights_us=6_500, token_ns=550_000, row_ns=450_000, kv_token_ps=600_000, pair_ps=300_000
    )
    costs, rng = CostModel(), random.Random(seed)

    def decodes(rows: int) -> list[StepShape]:
        return [StepShape(rows, rows, rows * (129 + i), rows * (128 + i)) for i in range(95)]

    for _ in range(10):
        teach(costs, model, [EMPTY.with_chunk(0, 128), *decodes(1)], rng)
    wave = StepShape(4, 4, 4 * 140, 4 * 139).with_chunks([(0, 128), (0, 128)])
    assert 0.8 < costs.predict_us(wave) / model.step_us(wave) < 1.25
    teach(costs, model, decodes(8), rng)
    assert 0.8 < costs.predict_us(wave) / model.step_us(wave) < 1.25


def decodes(rows: int, drafts: int = 0, context: int = 500) -> StepShape:
    bare = StepShape(rows, rows, rows * context, rows * context)
    return bare.with_drafts(drafts, again=False)


def test_measured_steps_give_the_times_of_drafts_against_the_fit() -> None:
    """A machine whose products take 1.3 times as long from 65 tokens on, as an H200's."""
    costs, times = CostModel(), DraftTimes()

    def machine_us(shape: StepShape) -> int:
        return 4_000 if shape.tokens <= 64 else 5_200 if shape.tokens <= 128 else 8_000

    for drafts in (0, 32, 96) * 3:
        whole = decodes(32, drafts)
        costs.observe(whole, machine_us(whole))
        times.observe(costs, decodes(32), whole, machine_us(whole))
    found = [times.times_pm(costs, decodes(32), drafts, again=False) for drafts in (0, 32, 96)]
    assert found == pytest.approx([1_000, 1_000, 1_300], rel=0.02)


def test_the_fit_gives_the_times_of_drafts_without_a_measured_step() -> None:
    costs = CostModel()
    teach(costs, PRESETS["smollm2-cpu"], shapes(3, 400, "smollm2-cpu"), random.Random(4))
    bare, whole = decodes(8), decodes(8, 8)
    want = 1_000 * costs.predict_us(whole) // costs.predict_us(bare)
    assert DraftTimes().times_pm(costs, bare, 8, again=False) == pytest.approx(want, abs=1)


def test_a_step_with_drafts_takes_no_less_than_one_without() -> None:
    costs, times = CostModel(), DraftTimes()
    for drafts, took_us in ((0, 5_000), (8, 4_000)) * 4:
        costs.observe(decodes(8, drafts), took_us)
        times.observe(costs, decodes(8), decodes(8, drafts), took_us)
    assert times.times_pm(costs, decodes(8), 8, again=False) >= 1_000
