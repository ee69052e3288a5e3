"""One step on its way: its forward, then its sampling, perhaps on another thread, and the times they took.

plan arrives ── queued ──▶ start ── forward ──▶ (host lane) ── processors ── sample ──▶ end
"""

from __future__ import annotations

from services.executor.backend import Backend, Pending, StepOutput
from shared.clock import Clock
from shared.messages import StepPlan, StepResult, ints

MAX_ERROR_CHARS = 1_000


class Step:
    """An engine's error in either half becomes the error of the result."""

    def __init__(
        self, backend: Backend, plan: StepPlan, clock: Clock, *, wait_us: int = 0, queued_us: int = 0
    ) -> None:
        """`wait_us`: the device had nothing to do before; `queued_us`: the plan lay here."""
        self._backend = backend
        self._plan = plan
        self._clock = clock
        self._wait_us, self._queued_us = wait_us, queued_us
        self._start_wall_us, self._start_us = clock.wall_us(), clock.now_us()
        self._forwarded_us = self._start_us
        self._pending: Pending | None = None
        self._error: Exception | None = None

    def forward(self, refused: Exception | None = None) -> None:
        """Run the forward half, unless the step was `refused`."""
        self._error = refused
        if refused is not None:
            return
        try:
            self._pending = self._backend.forward(self._plan)
        except Exception as error:  # noqa: BLE001 - the step fails with a typed result, the process lives
            self._error = error
        self._forwarded_us = self._clock.now_us()

    @property
    def answered(self) -> bool:
        """True when sampling is queued on the device already: see Pending.answer."""
        return self._pending is not None and self._pending.answer is not None

    def finish(self, published_us: int = 0, before_us: int = 0) -> StepResult:
        """Choose the tokens; the result of the step. `published_us`: see StepResult. `before_us`: when the
        step before ended; one that was queued behind it began then."""
        if self._pending is None:
            return self._failed(self._error)
        if self.answered and (waited_us := before_us - self._start_us) > 0:
            self._start_us, self._start_wall_us = before_us, self._start_wall_us + waited_us
            self._forwarded_us = max(self._forwarded_us, before_us)
            self._queued_us += waited_us
        sampling_us = self._clock.now_us()
        try:
            output = self._backend.sample(self._pending)
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed(error)
        return self._result(output, sampling_us, published_us)

    def _result(self, output: StepOutput, sampling_us: int, published_us: int) -> StepResult:
        end_us = self._clock.now_us()
        return StepResult(
            exec_epoch=self._plan.exec_epoch,
            step=self._plan.step,
            ids=output.ids,
            done=output.done,
            start_wall_us=self._start_wall_us,
            end_wall_us=self._start_wall_us + end_us - self._start_us,
            forward_us=self._forwarded_us - self._start_us,
            sample_us=max(0, end_us - max(sampling_us, self._forwarded_us) - output.host_us),
            bucket_padding_rows=output.padding_rows,
            logprobs=output.logprobs,
            top_counts=output.top_counts,
            top_ids=output.top_ids,
            top_logprobs=output.top_logprobs,
            wait_us=self._wait_us,
            published_us=published_us,
            queued_us=self._queued_us,
            host_us=output.host_us,
            row_errors=output.row_errors,
            pieces=ints(n for piece in output.pieces for n in (piece.lane, piece.from_us, piece.took_us)),
        )

    def _failed(self, error: Exception | None) -> StepResult:
        rows = len(self._plan.sample_slots)
        return StepResult(
            exec_epoch=self._plan.exec_epoch,
            step=self._plan.step,
            ids=ints([-1]) * rows,
            done=ints([0]) * rows,
            start_wall_us=self._start_wall_us,
            end_wall_us=self._clock.wall_us(),
            error=f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS],
            queued_us=self._queued_us,
        )
