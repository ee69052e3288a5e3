"""An engine that writes down its calls and fails on request."""

from __future__ import annotations

from support.virtual_loop import FakeClock

from services.executor.engine import Pending, StepOutput
from services.executor.sim.engine import SimBackend, SimOptions
from shared.messages import SlotOpen, StepPlan, ints


class Scripted:
    """A backend that writes down its calls, takes 100 µs a forward and 10 a sample, and fails on request."""

    def __init__(self, clock: FakeClock, fail: dict[str, Exception] | None = None) -> None:
        self.clock, self.fail = clock, fail or {}
        self.calls: list[tuple[str, int]] = []
        self.info = SimBackend(SimOptions()).info

    def _do(self, what: str, about: int = 0, took_us: int = 0) -> None:
        self.calls.append((what, about))
        self.clock.advance(took_us)
        if error := self.fail.pop(f"{what} {about}" if about else what, None):
            raise error

    def warm_up(self) -> None:
        self._do("warm_up")

    def open_slot(self, opened: SlotOpen) -> None:
        self._do("open", opened.slot)

    def close_slot(self, slot: int) -> None:
        self._do("close", slot)

    def forward(self, plan: StepPlan) -> Pending:
        self._do("forward", plan.step, 100)
        return Pending(plan=plan)

    def sample(self, pending: Pending) -> StepOutput:
        step = pending.plan.step
        self._do("sample", step, 10)
        return StepOutput(
            ids=ints([step]), done=ints([0]), padding_rows=3, host_us=4, row_errors=((0, "no"),)
        )

    def reset(self) -> None:
        self._do("reset")

    def close(self) -> None:
        self._do("end")


def plan(step: int) -> StepPlan:
    one = ints([1])
    return StepPlan(
        exec_epoch=5, step=step, mode="single", micro_batch=0, slots=one, starts=one, counts=one,
        from_device=one, sample_rows=ints([0]), sample_slots=one,
    )  # fmt: skip


def opened(slot: int) -> SlotOpen:
    return SlotOpen(slot=slot, generation=1, seq=1, prompt_tokens=1, tokens=ints([4]))
