"""`Tiers` knows the tiers below the executors, and every job that has been asked for and not answered.

A store:  ask KvReserve ─ KvReserved ▸ KvCopy ─ KvCopied ▸ KvCommit ─ KvStored
A load:   ask KvPrefetch ─ KvReady ▸ KvCopy ─ KvCopied ▸ KvRelease
The blocks of a job are fenced from its first message to its last (`begin_copy`, `end_copy`). A `TransferLink`
predicts how long a copy takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shared.messages import ExecHello

ANSWER_US = 200_000  # for an answer that needs no remote tier; it may lie behind a burst in our own queue
MISSES = 3  # answers missed in a row: then nothing is asked for a while
BACKOFF_US = 1_000_000
REMOTE = 2  # the tier of a key that L2 alone has

GUESS_BYTES_PER_US = 10_000.0  # until a copy has been measured: it has to be tried to be known
GUESS_EACH_US = 500.0
FIT_DECAY = 1 - 1 / 32  # of the fit, per copy
MIB = float(1 << 20)
LONG_COPY_BYTES, LONG_COPY_US = 32 << 20, 10_000  # a copy of either length tells the rate
ENOUGH_COPIES = 8  # of others, and no more is to be learnt
STALE_US = 5_000_000  # a small copy in so long a time costs little, however slow the link is

LookupTarget = tuple[
    str, str
]  # kv_offload id, and the fingerprint of an engine above: keys of two are not the same


class JobPhase(Enum):
    """What a job waits for."""

    REQUESTED = "asked"  # kv_offload: a place, or the bytes
    COPYING = "copying"  # the executor
    STORING = "storing"  # kv_offload: that it is readable


@dataclass(slots=True)
class Job:
    """Blocks of one executor on their way up or down. `keys[i]` is of `blocks[i]`."""

    number: int
    tier: str  # kv_offload id
    generation: int
    executor: str
    epoch: int  # of the executor
    blocks: list[int]
    keys: list[bytes]
    began_us: int
    up: bool = False  # a load
    due_us: int = 0  # of the next answer of kv_offload
    lease_us: int = 0  # until then the arena keeps its place
    phase: JobPhase = JobPhase.REQUESTED
    void: bool = False  # what is copied means nothing: the engine has failed under it
    queued_bytes: int = 0  # of it, that wait for the link
    after_step: int = 0  # of a store: the last step that writes a block of it
    written: list[int] = field(default_factory=list)  # of a store: 1 for each block that is copied
    leaves: bool = False  # of a store: the device forgets the blocks (policy swap)
    valid: list[int] = field(default_factory=list)  # of a load: tokens in each block
    seq: int = 0  # of a load
    fetched: list[bool] = field(default_factory=list)  # of a load: the blocks that came from L2 for it
    sent_us: int = 0  # of a load: KvCopy left
    predicted_us: int = 0
    recompute_us: int = 0  # predicted, of the same tokens


@dataclass(slots=True)
class Tier:
    """One kv_offload."""

    actor: str
    epoch: int
    host_id: str
    generation: int
    misses: int = 0  # answers missed in a row
    backoff_until_us: int = 0
    fetch_bytes_per_us: float = 0.0  # L2 to L1, learned; 0: not known
    answer_us: int = 1_000  # what an answer takes, a moving average
    stores: int = 0  # that have ended: an older answer may know less

    @property
    def source(self) -> str:
        return f"kv_offload.{self.actor}"

    def answered(self, took_us: int = 0) -> None:
        """It lives. `took_us` is of an answer that needed no remote tier."""
        self.misses = 0
        if took_us:
            self.answer_us += (took_us - self.answer_us) // 8


@dataclass(frozen=True, slots=True)
class Lookup:
    """A question that is not answered."""

    group: int
    target: LookupTarget
    sent_us: int

    @property
    def tier(self) -> str:
        return self.target[0]


@dataclass(slots=True)
class LookupResult:
    """What one tier said about a waiting group: tier of each key, from the first on."""

    sent_us: int
    found: tuple[int, ...] = ()
    at_us: int = -1  # it has not answered
    stores: int = 0  # of the tier, when it was asked
    job: int = 0  # the lookup: another's answer is not the one to this
    fetched: set[int] = field(default_factory=set)  # places of keys that were brought from L2 for this group


@dataclass(slots=True)
class Tiers:
    """All tiers, jobs and lookups."""

    by_host: dict[str, Tier] = field(default_factory=dict)
    standby: dict[str, Tier] = field(
        default_factory=dict
    )  # others of a host, by id: the next when that one goes
    jobs: dict[int, Job] = field(default_factory=dict)
    lookups: dict[int, Lookup] = field(default_factory=dict)  # by job
    mapped: dict[str, int] = field(default_factory=dict)  # executor id -> generation of the arena it maps
    next_job: int = 1

    def number(self) -> int:
        """A number for the next job."""
        self.next_job = self.next_job % 0x7FFFFFFF + 1
        return self.next_job

    def of(self, host_id: str, now_us: int) -> Tier | None:
        """The tier of a host, unless there is none or it rests."""
        tier = self.by_host.get(host_id)
        return tier if tier is not None and tier.backoff_until_us <= now_us else None

    def below(self, hello: ExecHello, now_us: int) -> Tier | None:
        """The tier that an executor can copy to and from: not one whose arena it has yet to map."""
        tier = self.of(hello.host_id, now_us)
        if tier is None or self.mapped.get(hello.executor, tier.generation) != tier.generation:
            return None
        return tier

    def named(self, source: str) -> Tier | None:
        """The tier that is the actor `kind.id`."""
        return next((tier for tier in self.by_host.values() if tier.source == source), None)


@dataclass(slots=True)
class TransferLink:
    """One direction of the way between a device and the tier below: how long a copy will take.

        predicted = what is queued + each + bytes * per byte

    Both coefficients are a least squares fit over the last copies, which fade; sums of products only, so that
    a replay of the same events finds the same numbers. `pending_bytes` have been asked for and not answered.
    """

    pending_bytes: int = 0
    pending_jobs: int = 0
    copies_seen: int = 0
    moved_bytes: int = 0
    trip_us: int = 0  # KvCopy and KvCopied on their way, a moving average
    store_us: int = 0  # from the question for a place until the tier has it, a moving average
    seen_us: int = 0  # when a copy was measured last
    saw_long_copy: bool = False  # one was long enough to tell the rate
    _n: float = 0.0
    _x: float = 0.0  # MiB
    _y: float = 0.0  # us
    _xx: float = 0.0
    _xy: float = 0.0

    def predict_us(self, size_bytes: int) -> int:
        """How long a copy asked for now would take, with what it waits for."""
        each_us, per_mib_us = self._fit()
        jobs, mib = self.pending_jobs + 1, (self.pending_bytes + size_bytes) / MIB
        return int(jobs * each_us + mib * per_mib_us)

    def copy_us(self, size_bytes: int) -> int:
        """How long a copy runs, once it has begun."""
        each_us, per_mib_us = self._fit()
        return int(each_us + size_bytes / MIB * per_mib_us)

    def wait_us(self) -> int:
        """How long the copies that are asked for will take."""
        each_us, per_mib_us = self._fit()
        return int(self.pending_jobs * each_us + self.pending_bytes / MIB * per_mib_us)

    def block_us(self, size_bytes: int) -> int:
        """What one more block in a copy adds to it."""
        return int(size_bytes / MIB * self._fit()[1])

    @property
    def bytes_per_second(self) -> int:
        """The rate of long copies."""
        return int(MIB * 1e6 / self._fit()[1])

    def begin(self, size_bytes: int) -> None:
        """A copy is asked for."""
        self.pending_bytes += size_bytes
        self.pending_jobs += 1

    def end(self, size_bytes: int) -> None:
        """It is over, or will never be."""
        self.pending_bytes -= size_bytes
        self.pending_jobs -= 1

    def fresh(self, now_us: int) -> bool:
        """Whether a copy was measured lately. What was slow once is tried again: an estimate that keeps all
        copies away would never be corrected."""
        return self.copies_seen > 0 and now_us - self.seen_us <= STALE_US

    def known(self, now_us: int) -> bool:
        """Whether copies measured lately tell the rate. Short ones do not: most of their time may not be for
        their bytes, and an estimate that is too slow would keep away all that would correct it."""
        return self.fresh(now_us) and (self.saw_long_copy or self.copies_seen >= ENOUGH_COPIES)

    @property
    def _sizes_differ(self) -> bool:
        return self._n * self._xx - self._x * self._x > 1e-6 * self._n * self._xx

    def observe(self, size_bytes: int, took_us: int, now_us: int = 0) -> None:
        """A copy of so many bytes ran for so long."""
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
        """The messages of a copy were so long on their way, there and back."""
        self.trip_us = _averaged(self.trip_us, trip_us)

    def observe_store(self, took_us: int) -> None:
        """A store has taken so long, all in all."""
        self.store_us = _averaged(self.store_us, took_us)

    def _fit(self) -> tuple[float, float]:
        """us per copy, us per MiB: neither below zero."""
        if not self.copies_seen:
            return GUESS_EACH_US, MIB / GUESS_BYTES_PER_US
        if not self._sizes_differ:
            # Copies of one size do not say what each costs. Some of it is not for its bytes: else small ones
            # would make the link look slow, and large ones would never be tried.
            mean_us = self._y / self._n
            each = min(GUESS_EACH_US, mean_us / 2)
            return each, (mean_us - each) * self._n / self._x
        spread = self._n * self._xx - self._x * self._x
        slope = (self._n * self._xy - self._x * self._y) / spread
        each = (self._y - slope * self._x) / self._n
        if slope <= 0.0 or each < 0.0:
            return 0.0, self._y / self._x
        return each, slope


def _averaged(mean_us: int, us: int) -> int:
    return mean_us + (max(us, 0) - mean_us) // (8 if mean_us else 1)
