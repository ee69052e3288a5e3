"""Plans of no rows."""

from __future__ import annotations

from shared.messages import StepPlan, ints


def plan(step: int) -> StepPlan:
    none = ints()
    return StepPlan(
        exec_epoch=1, step=step, mode="single", micro_batch=0, slots=none, starts=none, counts=none,
        from_device=none, sample_rows=none, sample_slots=none,
    )  # fmt: skip
