"""What two halves of a step did when, on a GPU. See services.executor.pieces.

Of steps that are launched one kernel after the other by events; of those in a graph by kernels that write the
device's clock, for the events of a graph are those of its next replay, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.cuda import Event

from kernels.stamp.gpu import stamp
from services.executor.pieces import MOST, Piece


class Noting(Protocol):
    """Either."""

    def on(self, lane: int) -> AbstractContextManager[None]:
        """Note what is queued on the current stream within this. The first MOST pieces are."""


class CudaNotes:
    """Of one step; an event costs the host some microseconds."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, Event, Event]] = []

    @contextmanager
    def on(self, lane: int) -> Iterator[None]:
        if len(self._noted) == MOST:
            yield
            return
        began, ended = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        began.record()
        try:
            yield
        finally:
            ended.record()
            self._noted.append((lane, began, ended))

    def pieces(self) -> tuple[Piece, ...]:
        """Once the step has ended on the device."""
        origin = self._noted[0][1]
        return tuple(
            Piece(lane, int(1e3 * origin.elapsed_time(began)), int(1e3 * began.elapsed_time(ended)))
            for lane, began, ended in self._noted
        )


class StampedNotes:
    """Of a graph, while it is captured: where each piece begins and ends the clock is written to `times`."""

    def __init__(self, device: torch.device) -> None:
        self.times: Tensor = torch.zeros(MOST, 2, dtype=torch.int64, device=device)  # ns
        self._lanes: list[int] = []

    @contextmanager
    def on(self, lane: int) -> Iterator[None]:
        at = len(self._lanes)
        if at == MOST:
            yield
            return
        self._lanes.append(lane)
        stamp(self.times[at, :1])
        try:
            yield
        finally:
            stamp(self.times[at, 1:])

    def pieces(self, times: Tensor) -> tuple[Piece, ...]:
        """Of a replay: `times` as it left them, on the host."""
        noted: list[list[int]] = times[: len(self._lanes)].tolist()
        origin = noted[0][0]
        return tuple(
            Piece(lane, (began - origin) // 1000, (ended - began) // 1000)
            for lane, (began, ended) in zip(self._lanes, noted, strict=True)
        )
