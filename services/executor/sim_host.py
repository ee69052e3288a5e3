"""Logits processors in the simulated engine: they run on zero logits, and what they make of them is not
looked at. `Wait` is not run but slept for, all rows of a step at once, so that a row may take 30 µs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

from services.executor.chains import Chains, HostRow
from services.executor.processors import MakeProcessor, Wait
from shared.messages import SlotOpen

if TYPE_CHECKING:
    from torch import Tensor


class SimHostRows:
    """The processors of open slots. `process` is the host lane's, the rest the device thread's."""

    def __init__(self, known: Mapping[str, MakeProcessor], vocab: int, host_row_us: int) -> None:
        """`host_row_us`: of a `Wait` that names no time."""
        self._waits: list[float | None] = []  # ms, of the step that is processed
        self._chains = Chains({name: self._noted(make) for name, make in known.items()})
        self._reads_logits = any(make is not Wait for make in known.values())
        self._vocab = vocab
        self._host_row_us = host_row_us

    def open(self, opened: SlotOpen) -> None:
        """Take a slot's processors, if it has any."""
        self._chains.open(opened)

    def close(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""
        self._chains.close(slot)

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        """The indices of slots with processors."""
        return self._chains.rows_of(slots)

    def process(
        self, slots: Sequence[int], tokens: Callable[[int], Sequence[int]]
    ) -> tuple[int, dict[int, str]]:
        """Run the processors of the rows that have some. Returns their time in µs and why rows failed, by
        index into `slots`."""
        rows = self._chains.rows_of(slots)
        began_ns = time.monotonic_ns()
        hosted = [HostRow(slots[row], tokens(slots[row]), self._logits()) for row in rows]
        failed = self._chains.run(hosted, nullcontext)
        sound = [not self._reads_logits or bool(row.logits.amax().isfinite()) for row in hosted]
        failed = self._chains.judged(hosted, failed, sound)
        self._sleep()
        return (time.monotonic_ns() - began_ns) // 1000, {rows[k]: why for k, why in failed.items()}

    def _sleep(self) -> None:
        waits, self._waits[:] = tuple(self._waits), []
        named_ms = [ms for ms in waits if ms is not None]
        us = 1e3 * max(named_ms, default=0.0) + self._host_row_us * (len(waits) - len(named_ms))
        if us:
            time.sleep(us / 1e6)

    def _logits(self) -> Tensor:
        if not self._reads_logits:
            return cast("Tensor", _Unread())
        import torch  # only where somebody's processor needs it

        return torch.zeros(self._vocab)

    def _noted(self, make: MakeProcessor) -> MakeProcessor:
        if make is not Wait:
            return make
        return lambda args, prompt: _Noted(Wait(args, prompt), self._waits)


class _Noted:
    """A Wait that is written down."""

    def __init__(self, wait: Wait, waits: list[float | None]) -> None:
        self._wait = wait
        self._waits = waits

    def process(self, generated: Sequence[int], logits: Tensor) -> Tensor:
        self._waits.append(self._wait.ms)
        return logits


class _Unread:
    """Stands for logits that no processor reads, without torch."""
