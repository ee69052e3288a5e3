"""The progress of a run on one line of a terminal. Prints nothing elsewhere."""

from __future__ import annotations

import asyncio
from typing import TextIO

from loadtest.bench.record import Record

EVERY_S = 0.5
CLEAR = "\r\033[K"


class Progress:
    """Counts the records of a run. Use as a context: its line is gone afterwards."""

    def __init__(self, name: str, total: int, stream: TextIO) -> None:
        self._name, self._total, self._stream = name, total, stream
        self._done = self._failed = self._tokens = 0
        self._telling: asyncio.Task[None] | None = None
        self._shown = stream.isatty()

    def ended(self, record: Record) -> None:
        """One more."""
        self._done += 1
        self._failed += bool(record.error)
        self._tokens += record.output_tokens

    def line(self, passed_s: float) -> str:
        """What is shown after so long."""
        failed = f", {self._failed} failed" if self._failed else ""
        rates = f"{self._done / passed_s:.1f} req/s, {self._tokens / passed_s:.0f} tok/s" if passed_s else ""
        bar = "█" * (20 * self._done // max(self._total, 1))
        return f"{self._name} {bar:·<20} {self._done}/{self._total}{failed}  {rates}  {passed_s:.0f} s"

    async def __aenter__(self) -> Progress:
        if self._shown:
            self._telling = asyncio.create_task(self._report())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._stream.write(CLEAR)
            self._stream.flush()

    async def _report(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            await asyncio.sleep(EVERY_S)
            self._stream.write(CLEAR + self.line(loop.time() - began_s))
            self._stream.flush()
