"""Drives an engine in this process: opens sequences, makes plans, runs them. No scheduler, no messages."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from services.executor.engine import Backend, Pending
from shared.messages import Sampling, SlotOpen, StepPlan, ints

IN_FLIGHT = 2
GREEDY = Sampling(temperature=0.0)


class Driver:
    """Opens sequences with blocks in shuffled order, and runs plans, two steps in flight by default."""

    def __init__(self, backend: Backend, seed: int = 0) -> None:
        self._backend = backend
        self._free = list(range(backend.info.blocks))
        random.Random(seed).shuffle(self._free)
        self._step = 0
        self.host_us: list[int] = []  # of each step of the last run: processors and masks
        self.forward_us: list[float] = []  # to queue it, and what it waited for
        self.tokens: list[int] = []  # ids

    def open(
        self, slot: int, length: int, room: int, sampling: Sampling | None = None
    ) -> tuple[int, list[int]]:
        """A sequence of `length` tokens with blocks for `room`; the slot and its blocks."""
        tokens = [(slot * 7919 + i * 31) % 1000 + 300 for i in range(length)]
        return self.open_with(slot, tokens, room, sampling)

    def open_with(
        self,
        slot: int,
        tokens: list[int],
        room: int,
        sampling: Sampling | None = None,
        **more: Any,
    ) -> tuple[int, list[int]]:
        """The same with tokens given; greedy by default. `more` go to SlotOpen."""
        self._backend.open_slot(
            SlotOpen(
                slot=slot, generation=0, seq=slot, prompt_tokens=len(tokens), tokens=ints(tokens),
                sampling=sampling or GREEDY, **more,
            )
        )  # fmt: skip
        count = -(-room // self._backend.info.block_tokens)
        return slot, [self._free.pop() for _ in range(count)]

    def plan(
        self,
        rows: Sequence[tuple[int, int, int, int]],
        tables: dict[int, list[int]],
        samples: bool = True,
        two_stream: bool = False,
    ) -> StepPlan:
        """A step of rows (slot, start, count, `from_device`), each sampled; `tables` are set before."""
        self._step += 1
        slots = [slot for slot, *_ in rows]
        return StepPlan(
            exec_epoch=0, step=self._step, mode="single", micro_batch=0,
            slots=ints(slots), starts=ints(r[1] for r in rows), counts=ints(r[2] for r in rows),
            from_device=ints(int(r[3]) for r in rows),
            sample_rows=ints(range(len(rows)) if samples else ()),
            sample_slots=ints(slots if samples else ()),
            table_slots=ints(tables), table_first=ints([0] * len(tables)),
            table_counts=ints(len(blocks) for blocks in tables.values()),
            table_blocks=ints(block for blocks in tables.values() for block in blocks),
            two_stream=two_stream,
        )  # fmt: skip

    def run(self, plans: list[StepPlan], in_flight: int = IN_FLIGHT) -> list[float]:
        """Run the plans, some in flight; when each one's ids were there, in seconds from the start."""
        pending: deque[Pending] = deque()
        self.host_us, self.forward_us, self.tokens = [], [], []
        ends_s, began_s = [], time.monotonic()

        def end() -> None:
            output = self._backend.sample(pending.popleft())
            self.host_us.append(output.host_us)
            self.tokens.append(len(output.ids))
            ends_s.append(time.monotonic() - began_s)

        for plan in plans:
            queued_ns = time.monotonic_ns()
            pending.append(self._backend.forward(plan))
            self.forward_us.append((time.monotonic_ns() - queued_ns) / 1e3)
            if len(pending) == in_flight:
                end()
        while pending:
            end()
        return ends_s

    def close(self) -> None:
        """Forget all sequences."""
        self._backend.reset()
