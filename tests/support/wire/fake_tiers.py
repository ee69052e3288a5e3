"""The fake scheduler's half that pauses and restores: leases, copies, commits."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from support.wire.fake_state import FakeSequence, sequence_keys
from support.wire.fakes import BLOCK, EXECUTOR, KV

from shared.messages import (
    ArenaReleased,
    KvCommit,
    KvCopied,
    KvCopy,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvReserve,
    KvReserved,
    KvStored,
    ints,
)

if TYPE_CHECKING:
    from support.wire.fake_scheduler import FakeScheduler


class Tiers:
    """Jobs by number; each belongs to one sequence."""

    def __init__(self, house: FakeScheduler) -> None:
        self.house = house
        self.jobs: dict[int, FakeSequence] = {}
        self._jobs = count(100)

    def _job(self, sequence: FakeSequence) -> int:
        job = next(self._jobs)
        self.jobs[job] = sequence
        return job

    def pause(self, sequence: FakeSequence) -> None:
        sequence.state = "pausing"
        keys = sequence_keys(sequence)
        valid = [min(BLOCK, sequence.computed - i * BLOCK) for i in range(len(keys) // 32)]
        reserve = KvReserve(
            job=self._job(sequence),
            owner=self.house.mailbox.source,
            keys=keys,
            value_bytes=BLOCK * 4,
            lease_us=1_000_000,
            priority=1,
            valid_tokens=ints(valid),
        )
        self.house.mailbox.send(KV, reserve)

    def _on_KvReserved(self, source: str, reserved: KvReserved) -> None:
        self._copy(self.jobs[reserved.job], reserved, to_arena=True)

    def _copy(self, sequence: FakeSequence, place: KvReserved | KvReady, *, to_arena: bool) -> None:
        self.house.mailbox.send(
            EXECUTOR,
            KvCopy(
                job=place.job,
                to_arena=to_arena,
                after_step=self.house.steps.step if to_arena else 0,
                arena_generation=place.arena_generation,
                blocks=ints(sequence.table),
                offsets=place.offsets,
                block_bytes=BLOCK * 4,
            ),
        )

    def _on_KvCopied(self, source: str, copied: KvCopied) -> None:
        sequence = self.jobs[copied.job]
        if sequence.state == "pausing":
            mask = 1 if copied.status == "ok" else 0
            self.house.mailbox.send(KV, KvCommit(job=copied.job, written=ints([mask] * len(sequence.table))))
        else:
            self.house.mailbox.send(KV, KvRelease(jobs=ints([copied.job])))

    def _on_KvStored(self, source: str, stored: KvStored) -> None:
        sequence = self.jobs.pop(stored.job)
        computed = sequence.computed if all(stored.tiers) else 0
        self.house.steps.free_slot(sequence)
        sequence.state, sequence.computed = "paused", computed

    def restore(self, sequence: FakeSequence) -> None:
        """Bring a paused sequence back: from L1 if it was stored, else by computing it again."""
        self.house.pause_after.pop(sequence.seq, None)
        if sequence.computed:
            prefetch = KvPrefetch(
                job=self._job(sequence),
                owner=self.house.mailbox.source,
                keys=sequence_keys(sequence),
                deadline_us=50_000,
                lease_us=1_000_000,
            )
            self.house.mailbox.send(KV, prefetch)
        else:
            self.house.steps.open_slot(sequence)
            self.house.steps.plan()

    def _on_KvReady(self, source: str, ready: KvReady) -> None:
        sequence = self.jobs[ready.job]
        if min(ready.offsets) < 0:
            sequence.computed = 0
        else:
            sequence.table = [self.house.steps.tables.new() for _ in ready.offsets]
            self._copy(sequence, ready, to_arena=False)
            sequence.wait_jobs = [ready.job]
        self.house.steps.open_slot(sequence)
        self.house.steps.plan()

    def _on_ArenaReleased(self, source: str, released: ArenaReleased) -> None:
        self.house.mailbox.send(KV, released)
