"""`Tiers` has the kv_offloads below the executors, and the lookups and jobs in flight.

A store:  KvReserve ─ KvReserved ▸ KvCopy ─ KvCopied ▸ KvCommit ─ KvStored
A load:   KvPrefetch ─ KvReady ▸ KvCopy ─ KvCopied ▸ KvRelease
The blocks of a job are not given out from its first message to its last (`begin_copy`, `end_copy`). A
`TransferLink` predicts how long a copy takes. Only kv_tiers/ changes this state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shared.messages import ExecHello

ANSWER_US = 200_000  # for an answer without the remote tier; it may wait in our mailbox after a burst
MISSES = 3  # missed answers in a row before a kv_offload is not used for BACKOFF_US
BACKOFF_US = 1_000_000
REMOTE = 2  # the tier of a key that only L2 has

GUESS_BYTES_PER_US = 10_000.0  # until a copy has been measured: high, so that one is tried
GUESS_EACH_US = 500.0
FIT_DECAY = 1 - 1 / 32  # of the fit, per copy
MIB = float(1 << 20)
LONG_COPY_BYTES, LONG_COPY_US = 32 << 20, 10_000  # a copy of either length shows the rate
ENOUGH_COPIES = 8  # so many shorter copies count as much as a long one
STALE_US = 5_000_000  # a small copy this often takes little time even on a slow link
RETRY_US = 1_000_000  # without a load, after which one is tried although it looks slow
TRY_BLOCKS = 4  # of a copy that measures the present rate

LookupTarget = tuple[str, str]  # kv_offload id, and an engine's fingerprint: keys differ by fingerprint


class JobPhase(Enum):
    """The answer that a job waits for."""

    REQUESTED = "asked"  # from kv_offload: reserved ranges, or the bytes
    COPYING = "copying"  # from the executor
    STORING = "storing"  # from kv_offload: the blocks are readable


@dataclass(slots=True)
class Job:
    """A copy of an executor's blocks, up (a load) or down (a store). `keys[i]` is the key of `blocks[i]`."""

    number: int
    offload: str  # kv_offload id
    generation: int
    executor: str
    epoch: int  # of the executor
    blocks: list[int]
    keys: list[bytes]
    began_us: int
    up: bool = False  # a load
    due_us: int = 0  # deadline for the next answer of kv_offload
    lease_us: int = 0  # the arena keeps its ranges until then
    phase: JobPhase = JobPhase.REQUESTED
    void: bool = False  # the copied bytes are not valid: a step failed that wrote them
    queued_bytes: int = 0  # of the job, counted in the link's `pending_bytes`
    after_step: int = 0  # store: the last step that writes a block of it
    written: list[int] = field(default_factory=list)  # store: 1 for each block that is copied
    leaves: bool = False  # store: the device forgets the blocks afterwards (policy swap)
    valid: list[int] = field(default_factory=list)  # load: tokens in each block
    seq: int = 0  # load
    fetched: list[bool] = field(default_factory=list)  # load: which blocks came from L2 for it
    from_l2: int = 0  # load: how many of its blocks, also those that L1 lost meanwhile
    sent_us: int = 0  # load: when KvCopy was sent
    predicted_us: int = 0
    recompute_us: int = 0  # predicted time to compute the same tokens

    @property
    def is_rise(self) -> bool:
        """A load for a request that has not come yet: no sequence has its blocks."""
        return self.up and not self.seq


@dataclass(slots=True)
class Offload:
    """One kv_offload."""

    actor: str
    epoch: int
    host_id: str
    generation: int
    misses: int = 0  # answers missed in a row
    backoff_until_us: int = 0
    fetch_bytes_per_us: float = 0.0  # L2 to L1, measured; 0: not known
    answer_us: int = 1_000  # time to an answer, a moving average
    stores: int = 0  # stores that have ended: a lookup before the last one may be out of date

    @property
    def source(self) -> str:
        return f"kv_offload.{self.actor}"

    def on_answered(self, took_us: int = 0) -> None:
        """It has answered; `took_us` if the answer needed no remote tier."""
        self.misses = 0
        if took_us:
            self.answer_us += (took_us - self.answer_us) // 8


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup without an answer."""

    group: int
    target: LookupTarget
    sent_us: int
    first: int = 0  # index of its first key: a long prompt takes several, one after the other

    @property
    def offload(self) -> str:
        return self.target[0]


@dataclass(slots=True)
class LookupResult:
    """The last lookup of a waiting group's keys in one kv_offload."""

    sent_us: int
    found: tuple[int, ...] = ()  # the tier of each key that was answered; 0: in none
    at_us: int = -1  # when it was last answered; -1: not yet
    stores: int = 0  # `Offload.stores` when the lookup was sent
    job: int = 0  # the last lookup's number: an answer to an earlier lookup is ignored
    goes_on: bool = False  # later keys are being looked up, since the answered ones are there
    fetched: set[int] = field(default_factory=set)  # indexes of keys that came from L2 for this group


@dataclass(slots=True)
class Tiers:
    """The kv_offloads in use, jobs and lookups."""

    by_host: dict[str, Offload] = field(default_factory=dict)
    standby: dict[str, Offload] = field(default_factory=dict)  # other ones of a host, by id
    jobs: dict[int, Job] = field(default_factory=dict)
    lookups: dict[int, Lookup] = field(default_factory=dict)  # by job
    mapped: dict[str, int] = field(default_factory=dict)  # executor id -> generation of the arena it maps
    next_job: int = 1

    def number(self) -> int:
        """A number for the next job or lookup."""
        self.next_job = self.next_job % 0x7FFFFFFF + 1
        return self.next_job

    def of(self, host_id: str, now_us: int) -> Offload | None:
        """The kv_offload of a host; None if there is none, or during its backoff."""
        offload = self.by_host.get(host_id)
        return offload if offload is not None and offload.backoff_until_us <= now_us else None

    def below(self, hello: ExecHello, now_us: int) -> Offload | None:
        """The kv_offload that an executor can copy to and from; None until it has mapped the arena of it."""
        offload = self.of(hello.host_id, now_us)
        if offload is None or self.mapped.get(hello.executor, offload.generation) != offload.generation:
            return None
        return offload

    def named(self, source: str) -> Offload | None:
        """The kv_offload with the address `kv_offload.<id>`."""
        return next((offload for offload in self.by_host.values() if offload.source == source), None)


@dataclass(slots=True)
class TransferLink:
    """One direction of copies between a device and the tier below; predicts how long a copy takes.

        predicted = queued copies + each + bytes * per byte

    Both coefficients are a least squares fit over the last copies, with decay. It uses sums of products only,
    so a replay of the same events finds the same numbers. `pending_bytes` are those of copies in flight.
    """

    pending_bytes: int = 0
    pending_jobs: int = 0
    copies_seen: int = 0
    moved_bytes: int = 0
    trip_us: int = 0  # time of the messages KvCopy and KvCopied, a moving average
    store_us: int = 0  # time from KvReserve to KvStored, a moving average
    seen_us: int = 0  # when a copy was last measured
    tried_us: int = 0  # when a load last began to measure it, also one that failed
    saw_long_copy: bool = False
    _n: float = 0.0
    _x: float = 0.0  # MiB
    _y: float = 0.0  # us
    _xx: float = 0.0
    _xy: float = 0.0

    def predict_us(self, size_bytes: int) -> int:
        """Predicted time of a new copy, with the copies before it."""
        each_us, per_mib_us = self._fit()
        jobs, mib = self.pending_jobs + 1, (self.pending_bytes + size_bytes) / MIB
        return int(jobs * each_us + mib * per_mib_us)

    def copy_us(self, size_bytes: int) -> int:
        """Predicted time of a copy alone."""
        each_us, per_mib_us = self._fit()
        return int(each_us + size_bytes / MIB * per_mib_us)

    def wait_us(self) -> int:
        """Predicted time of the copies in flight."""
        each_us, per_mib_us = self._fit()
        return int(self.pending_jobs * each_us + self.pending_bytes / MIB * per_mib_us)

    def block_us(self, size_bytes: int) -> int:
        """Predicted time of one more block of a copy."""
        return int(size_bytes / MIB * self._fit()[1])

    @property
    def bytes_per_second(self) -> int:
        """The rate of long copies."""
        return int(MIB * 1e6 / self._fit()[1])

    def begin(self, size_bytes: int) -> None:
        """Count a copy that is requested."""
        self.pending_bytes += size_bytes
        self.pending_jobs += 1

    def end(self, size_bytes: int) -> None:
        """Count it no longer: it has ended, or was given up."""
        self.pending_bytes -= size_bytes
        self.pending_jobs -= 1

    def is_fresh(self, now_us: int) -> bool:
        """Whether a copy was measured lately. Else a slow link is tried again: an estimate that prevents all
        copies would never be corrected."""
        return self.copies_seen > 0 and now_us - self.seen_us <= STALE_US

    def is_known(self, now_us: int) -> bool:
        """Whether the last copies show the rate. A few short ones do not: most of their time may not depend
        on their bytes, and an estimate that is too slow would prevent the copies that correct it."""
        return self.is_fresh(now_us) and (self.saw_long_copy or self.copies_seen >= ENOUGH_COPIES)

    def is_unused(self, now_us: int) -> bool:
        """Whether no copy was measured for RETRY_US: the machine may have been slow for a moment then."""
        return now_us - self.seen_us >= RETRY_US

    def may_try(self, now_us: int) -> bool:
        """Whether it is time for a load that measures the link. One that failed has measured nothing."""
        return self.is_unused(now_us) and now_us - self.tried_us >= RETRY_US

    def forget(self) -> None:
        """The measured times are not true any more: the next copy replaces them."""
        self.trip_us = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, size_bytes: int, took_us: int, now_us: int = 0) -> None:
        """Add a measured copy to the fit."""
        if size_bytes <= 0 or took_us <= 0:
            return
        self.seen_us = now_us
        x, y = size_bytes / MIB, float(took_us)
        self._n = self._n * FIT_DECAY + 1.0
        self._x = self._x * FIT_DECAY + x
        self._y = self._y * FIT_DECAY + y
        self._xx = self._xx * FIT_DECAY + x * x
        self._xy = self._xy * FIT_DECAY + x * y
        self.copies_seen += 1
        self.saw_long_copy |= size_bytes >= LONG_COPY_BYTES or took_us >= LONG_COPY_US
        self.moved_bytes += size_bytes

    def observe_trip(self, trip_us: int) -> None:
        """Update the time of a copy's messages, there and back."""
        self.trip_us = _averaged(self.trip_us, trip_us)

    def observe_store(self, took_us: int) -> None:
        """Update the time of a whole store."""
        self.store_us = _averaged(self.store_us, took_us)

    def _fit(self) -> tuple[float, float]:
        """us per copy, us per MiB: neither below zero."""
        if not self._n:
            return GUESS_EACH_US, MIB / GUESS_BYTES_PER_US
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-6 * self._n * self._xx:
            # Copies of one size do not separate the two coefficients. Part of the time counts as per copy:
            # else small copies would make the link look slow, and large ones would never be tried.
            mean_us = self._y / self._n
            each = min(GUESS_EACH_US, mean_us / 2)
            return each, (mean_us - each) * self._n / self._x
        slope = (self._n * self._xy - self._x * self._y) / spread
        each = (self._y - slope * self._x) / self._n
        if slope <= 0.0 or each < 0.0:
            return 0.0, self._y / self._x
        return each, slope


def _averaged(mean_us: int, us: int) -> int:
    return mean_us + (max(us, 0) - mean_us) // (8 if mean_us else 1)
