"""The time of a step: by hand, and the shape of a plan."""

from __future__ import annotations

import pytest
from support.executor.plan_maker import PlanMaker, Row

from services.executor.sim.engine import SimBackend, SimOptions
from shared.step_model import PRESETS, StepModel, StepShape, shape_of, shape_of_rows

MODEL = StepModel(
    weights_us=4_000, token_ns=20_000, row_ns=2_500, kv_token_ps=32_000, pair_ps=700, host_row_ns=30_000
)


@pytest.mark.parametrize(
    ("shape", "took_us"),
    [
        (StepShape(rows=0, tokens=0, kv_tokens=0, attention=0), 4_000),
        (StepShape(rows=4, tokens=200, kv_tokens=0, attention=0), 4_000 + 10),  # weights still
        (StepShape(rows=0, tokens=201, kv_tokens=0, attention=0), 4_020),  # the products are longer
        (StepShape(rows=1, tokens=1, kv_tokens=1_000, attention=0), 4_034),  # 4000 + 2.5 + 32
        (StepShape(rows=0, tokens=0, kv_tokens=0, attention=10_000), 4_007),
    ],
)
def test_the_time_of_a_step_by_hand(shape: StepShape, took_us: int) -> None:
    assert MODEL.step_us(shape) == took_us


def test_the_shape_of_a_plan_is_that_of_its_rows() -> None:
    maker = PlanMaker(SimBackend(SimOptions(blocks=80, timing="step=0")))
    for slot in (0, 1):
        maker.open(slot, [300] * 100)
    plan = maker.plan([Row(0, 50, 1), Row(1, 16, 32)])
    shape = StepShape(rows=2, tokens=33, kv_tokens=51 + 48, attention=1 * 50 + 32 * (16 + 16))
    assert shape_of(plan) == shape_of_rows([(50, 1), (16, 32)]) == shape


def test_more_work_never_takes_less_time() -> None:
    for model in PRESETS.values():
        small = StepShape(rows=8, tokens=8, kv_tokens=8_000, attention=8_000)
        assert model.step_us(small) > 0
        for field in ("rows", "tokens", "kv_tokens", "attention"):
            more = {name: getattr(small, name) for name in small.__slots__} | {field: 1_000_000}
            assert model.step_us(StepShape(**more)) >= model.step_us(small)
