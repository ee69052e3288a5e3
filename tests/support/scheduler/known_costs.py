"""Costs that are known exactly."""

from __future__ import annotations

from services.scheduler.state.cost_model import CostModel
from shared.step_model import StepModel, StepShape


class Known(CostModel):
    """Costs that are known exactly."""

    def __init__(self, model: StepModel, loop_us: int, host_row_us: int = 0) -> None:
        super().__init__()
        self.model, self.loop_us, self.host_row_us, self.seen = model, loop_us, host_row_us, 1_000

    def predict_us(self, shape: StepShape) -> int:
        return self.model.step_us(shape)

    def host_us(self, rows: int) -> int:
        return rows * self.host_row_us
