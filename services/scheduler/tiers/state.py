"""Which tiers there are below the executors, and every job that has been asked for and not answered.

A store:  ask KvReserve ─ KvReserved ▸ KvCopy ─ KvCopied ▸ KvCommit ─ KvStored
A load:   ask KvPrefetch ─ KvReady ▸ KvCopy ─ KvCopied ▸ KvRelease
The blocks of a job are fenced from its first message to its last (`begin_copy`, `end_copy`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shared.messages import ExecHello

ANSWER_US = 200_000  # for an answer that needs no remote tier; it may lie behind a burst in our own queue
MISSES = 3  # answers missed in a row: then nothing is asked for a while
REST_US = 1_000_000
REMOTE = 2  # the tier of a key that L2 alone has


class Phase(Enum):
    """What a job waits for."""

    ASKED = "asked"  # kv_offload: a place, or the bytes
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
    phase: Phase = Phase.ASKED
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
    rest_until_us: int = 0
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


Place = tuple[str, str]  # kv_offload id, and the fingerprint of an engine above: keys of two are not the same


@dataclass(frozen=True, slots=True)
class Lookup:
    """A question that is not answered."""

    unit: int
    place: Place
    asked_us: int

    @property
    def tier(self) -> str:
        return self.place[0]


@dataclass(slots=True)
class Answer:
    """What one tier said about a waiting unit: tier of each key, from the first on."""

    asked_us: int
    found: tuple[int, ...] = ()
    at_us: int = -1  # it has not answered
    stores: int = 0  # of the tier, when it was asked
    job: int = 0  # the lookup: another's answer is not the one to this
    fetched: set[int] = field(default_factory=set)  # places of keys that were brought from L2 for this unit


@dataclass(slots=True)
class Tiers:
    """All of it."""

    by_host: dict[str, Tier] = field(default_factory=dict)
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
        return tier if tier is not None and tier.rest_until_us <= now_us else None

    def below(self, hello: ExecHello, now_us: int) -> Tier | None:
        """The tier that an executor can copy to and from: not one whose arena it has yet to map."""
        tier = self.of(hello.host_id, now_us)
        if tier is None or self.mapped.get(hello.executor, tier.generation) != tier.generation:
            return None
        return tier

    def named(self, source: str) -> Tier | None:
        """The tier that is the actor `kind.id`."""
        return next((tier for tier in self.by_host.values() if tier.source == source), None)
