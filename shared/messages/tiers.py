"""Key-value tiers: scheduler <-> kv_offload, and the copies an executor makes."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages.columns import Ints, Longs, ints


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLookup:
    """scheduler -> kv_offload: in which tier is each key? Keys are 32 bytes, joined."""

    job: int
    keys: bytes
    prefix: bool = True  # stop at the first miss
    fingerprint: str = ""  # of the model's KV layout, as in ExecHello: part of the name in L2
    promote: bool = False  # begin to bring what only L2 has into L1: the request waits already


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFound:
    """kv_offload -> scheduler: tier of each key asked for: 0 none, 1 DRAM (L1), 2 remote (L2)."""

    job: int
    tiers: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReserve:
    """scheduler -> kv_offload: room in L1 for these keys, leased until `lease_us` from now."""

    job: int
    owner: str
    keys: bytes
    value_bytes: int
    lease_us: int
    priority: int = 0  # 1 = preemption
    valid_tokens: Ints = field(default_factory=ints)  # per key; the paused tail is partial
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReserved:
    """kv_offload -> scheduler: arena offset of each key, -1 where there is no room, -2 where the key is
    in L1 already and needs no copy."""

    job: int
    arena_generation: int
    offsets: Longs
    status: str = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPrefetch:
    """scheduler -> kv_offload: bring these keys into L1 and pin them for `lease_us`."""

    job: int
    owner: str
    keys: bytes
    deadline_us: int
    lease_us: int
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReady:
    """kv_offload -> scheduler: arena offset of each key, -1 where it could not be had."""

    job: int
    arena_generation: int
    offsets: Longs
    valid_tokens: Ints = field(default_factory=ints)
    status: str = "ok"
    took_us: int = 0
    from_l2: int = 0  # how many of them were brought from L2 for this


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCommit:
    """scheduler -> kv_offload: the reserved ranges with mask 1 are written; the others failed."""

    job: int
    written: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStored:
    """kv_offload -> scheduler: tier reached by each key of a committed job, 0 = lost."""

    job: int
    tiers: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRelease:
    """scheduler -> kv_offload: end the leases of these jobs."""

    jobs: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRenew:
    """scheduler -> kv_offload: prolong the leases of these jobs."""

    jobs: Ints
    lease_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRenewed:
    """kv_offload -> scheduler: 1 for each job whose lease is prolonged, 0 where it had ended. Until it
    is here the old deadline counts: a range read after it may hold another block."""

    jobs: Ints
    alive: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGone:
    """kv_offload -> scheduler: no tier holds these keys any more. Without an answer."""

    keys: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCopy:
    """scheduler -> executor: copy blocks between HBM and the arena once `after_step` has run."""

    job: int
    to_arena: bool
    after_step: int
    arena_generation: int
    blocks: Ints
    offsets: Longs
    block_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCopied:
    """executor -> scheduler: how the copy went: ok, no_arena, stale_arena, failed."""

    job: int
    status: str
    bytes: int = 0
    took_us: int = 0
    wait_us: int = 0  # it was here and had not begun: other copies, and the step that it comes after


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaReleased:
    """executor -> scheduler -> kv_offload: no mapping of this arena generation is left here."""

    executor: str
    arena_generation: int
