"""kv_offload's answers: what is nowhere is said so at once; reservations, commits, leases."""

from __future__ import annotations

from services.kv_offload.actor import KvOffloadActor, build
from services.kv_offload.core import KvCore, keys_of
from services.kv_offload.memory import MemoryTiers
from shared.config import Settings
from shared.messages import (
    Beat,
    Cancel,
    KvCommit,
    KvFound,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvRenew,
    KvRenewed,
    KvReserve,
    KvReserved,
    KvStored,
    Message,
    ints,
    longs,
)

A, B, C, D = (bytes([i]) * 32 for i in range(4))


def reserve(job: int, *keys: bytes) -> KvReserve:
    return KvReserve(job=job, owner="s", keys=b"".join(keys), value_bytes=100, lease_us=1)


def lookup(*keys: bytes, prefix: bool = True) -> KvLookup:
    return KvLookup(job=9, keys=b"".join(keys), prefix=prefix)


def stored(capacity: int, *keys: bytes) -> KvCore:
    core = KvCore(MemoryTiers(capacity))
    core.handle(reserve(1, *keys))
    assert core.handle(KvCommit(job=1, written=ints([1] * len(keys)))) == KvStored(
        job=1, tiers=ints([1] * len(keys))
    )
    return core


def test_without_an_arena_nothing_is_stored_and_every_question_is_answered() -> None:
    core = KvCore(MemoryTiers())
    prefetch = KvPrefetch(job=4, owner="s", keys=A, deadline_us=1, lease_us=1)
    answers: list[tuple[Message, Message | None]] = [
        (lookup(A, B), KvFound(job=9, tiers=ints([0, 0]))),
        (reserve(2, A), KvReserved(job=2, arena_generation=0, offsets=longs([-1]), status="no_room")),
        (KvCommit(job=2, written=ints([1])), KvStored(job=2, tiers=ints([0]))),
        (prefetch, KvReady(job=4, arena_generation=0, offsets=longs([-1]), status="missing")),
        (KvRenew(jobs=ints([2, 3]), lease_us=1), KvRenewed(jobs=ints([2, 3]), alive=ints([0, 0]))),
        (KvRelease(jobs=ints([2])), None),
        (Cancel(tenant="t", request="r"), None),
    ]
    for asked, answer in answers:
        assert core.handle(asked) == answer
    assert (core.lookups, core.hits) == (2, 0)


def test_a_prefix_ends_at_its_first_miss() -> None:
    core = stored(4, A, C)
    assert core.handle(lookup(A, B, C)) == KvFound(job=9, tiers=ints([1, 0, 0]))
    assert core.handle(lookup(A, B, C, prefix=False)) == KvFound(job=9, tiers=ints([1, 0, 1]))
    assert (core.lookups, core.hits) == (6, 3)


def test_no_two_keys_share_a_place() -> None:
    core = KvCore(MemoryTiers(3))
    core.handle(reserve(1, A, B))
    core.handle(KvCommit(job=1, written=ints([0, 1])))  # the copy of A failed: its place is free again
    found = core.handle(reserve(2, C, D))
    assert isinstance(found, KvReserved)
    core.handle(KvCommit(job=2, written=ints([1, 1])))
    ready = core.handle(KvPrefetch(job=3, owner="s", keys=B + C + D, deadline_us=1, lease_us=1))
    assert isinstance(ready, KvReady)
    assert sorted(ready.offsets) == [0, 100, 200]


def test_a_key_that_is_there_needs_no_copy() -> None:
    core = stored(2, A)
    answer = core.handle(reserve(2, A, B, C))
    assert answer == KvReserved(job=2, arena_generation=0, offsets=longs([-2, 100, -1]), status="no_room")
    assert core.handle(KvCommit(job=2, written=ints([0, 1, 0]))) == KvStored(job=2, tiers=ints([1, 1, 0]))


def test_two_jobs_for_one_key_keep_one_copy() -> None:
    core = KvCore(MemoryTiers(2))
    core.handle(reserve(1, A))
    core.handle(reserve(2, A))
    for job in (1, 2):
        assert core.handle(KvCommit(job=job, written=ints([1]))) == KvStored(job=job, tiers=ints([1]))
    answer = core.handle(reserve(3, B))
    assert isinstance(answer, KvReserved)
    assert answer.status == "ok"  # the second place is free again


def test_leases_end_and_asking_twice_is_asking_once() -> None:
    core = KvCore(MemoryTiers(2))
    first = core.handle(reserve(1, A, B))
    assert core.handle(reserve(1, A, B)) != KvReserved(
        job=1, arena_generation=0, offsets=longs([-1, -1]), status="no_room"
    )
    assert isinstance(first, KvReserved)
    assert first.status == "ok"
    renewed = KvRenewed(jobs=ints([1, 2]), alive=ints([1, 0]))
    assert core.handle(KvRenew(jobs=ints([1, 2]), lease_us=5)) == renewed
    core.handle(KvRelease(jobs=ints([1])))
    assert core.handle(KvCommit(job=1, written=ints([1, 1]))) == KvStored(job=1, tiers=ints())
    again = core.handle(reserve(2, C, D))
    assert isinstance(again, KvReserved)
    assert again.status == "ok"


def test_keys_are_32_bytes() -> None:
    assert keys_of(A + B) == [A, B]
    assert keys_of(b"") == []


class Port:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Message | Beat]] = []

    def send(self, to: str, message: Message, trace: str = "") -> None:
        self.sent.append((to, message))


async def test_the_shell_answers_whoever_asked() -> None:
    actor, port = build(Settings()), Port()
    assert isinstance(actor, KvOffloadActor)
    await actor.start(port)
    actor.receive("scheduler.s7", lookup(A), "")
    actor.receive("scheduler.s7", KvRelease(jobs=ints([1])), "")
    assert port.sent == [("scheduler.s7", KvFound(job=9, tiers=ints([0])))]
    assert actor.status() == {"tiers": [], "lookups": 1, "hits": 0}
    assert actor.facts().tiers == ()
