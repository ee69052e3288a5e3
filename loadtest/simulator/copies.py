"""The copies of a virtual executor: one queue down to the arena, one up, each in order.

A job starts when its queue is free and the step before it has run. It takes its bytes' time and the machine's
overhead of a job. Copies and steps do not slow each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import KvCopied, KvCopy


@dataclass(frozen=True, slots=True)
class Link:
    """The way between HBM and the arena."""

    d2h_bytes_s: int = 50_000_000_000
    h2d_bytes_s: int = 50_000_000_000
    job_us: int = 30  # of each job of any size


@dataclass(slots=True)
class Copies:
    """Both lanes of an engine, and what went through them."""

    link: Link
    stored_bytes: int = 0
    loaded_bytes: int = 0
    jobs: int = 0
    busy_us: int = 0
    _free_us: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})

    def run(self, copy: KvCopy, arrived_us: int, after_us: int) -> tuple[KvCopied, int]:
        """The answer to a copy that arrives now, and when it leaves. `after_us`: its step has run then."""
        size = len(copy.blocks) * copy.block_bytes
        rate = self.link.d2h_bytes_s if copy.to_arena else self.link.h2d_bytes_s
        took_us = self.link.job_us + size * 1_000_000 // rate
        begin_us = max(arrived_us, after_us, self._free_us[copy.to_arena])
        self._free_us[copy.to_arena] = begin_us + took_us
        self.jobs += 1
        self.busy_us += took_us
        if copy.to_arena:
            self.stored_bytes += size
        else:
            self.loaded_bytes += size
        wait_us = begin_us - arrived_us
        done = KvCopied(job=copy.job, status="ok", bytes=size, took_us=took_us, wait_us=wait_us)
        return done, begin_us + took_us
