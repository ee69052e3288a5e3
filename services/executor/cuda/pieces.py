"""What two halves of a step did when, on a GPU: by events on the streams. See services.executor.pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.cuda import Event

from services.executor.pieces import MOST, Piece


class CudaNotes:
    """Of one step. The first pieces that are queued are noted: an event costs the host some microseconds."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, Event, Event]] = []

    @contextmanager
    def on(self, lane: int) -> Iterator[None]:
        """Note what is queued on the current stream within this."""
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
