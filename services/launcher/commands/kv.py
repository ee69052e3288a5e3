"""`headrace kv` prints what each KV tier holds, how much work it saved and how good its predictions were."""

from __future__ import annotations

import argparse
import asyncio
import json

from services.launcher.console import size
from services.launcher.session import Facts, Target, find_fleet, services_of
from shared.telemetry.counters import KvOffloadCounter as Count
from shared.telemetry.counters import KvOffloadLinkCounter as Links
from shared.telemetry.counters import SchedulerLinkCounter as OnLinks
from shared.telemetry.counters import SchedulerSessionCounter as Sessions
from shared.telemetry.counters import SchedulerTierCounter as Tiers
from shared.telemetry.counters import percent

NO_STORE = (
    "no kv_offload runs in this fleet: what device memory loses is computed again.",
    "`headrace up` starts one; elsewhere run `headrace serve kv_offload` on each host with an executor",
)
OFF = "off: KV blocks are kept only in device memory. Start it with --l1 auto, or a size in MiB"
NOT_SHARED = (
    "no L1: the KV cache of the one CPU executor is in the same memory and has its share. "
    "Another executor, an L2, or a size (--l1 MIB) brings L1"
)


async def kv(target: Target, fleet: str, *, as_json: bool) -> None:
    """Print the KV tiers of `fleet`. Raises Unavailable if none of its services answers."""
    services = await services_of(target, fleet)
    stores = [s for s in services if s.get("kind") == "kv_offload"]
    schedulers = [s for s in services if s.get("kind") == "scheduler"]
    if as_json:
        body = {"fleet": fleet, "kv_offloads": stores, "schedulers": [_of_tiers(s) for s in schedulers]}
        print(json.dumps(body, indent=2))
    else:
        print("\n".join(draw(stores, schedulers)))


def draw(stores: list[Facts], schedulers: list[Facts]) -> list[str]:
    """The lines of `kv`, from the answers of the kv_offloads and the schedulers."""
    drawn = [] if stores else list(NO_STORE)
    for store in stores:
        drawn += _store_lines(store)
    for scheduler in schedulers:
        drawn += _scheduler_lines(_of_tiers(scheduler))
    return drawn


def _of_tiers(scheduler: Facts) -> Facts:
    measured = scheduler.get("measured", {}).get("tiers", {})
    facts = {name: scheduler.get(name) for name in ("id", "state", "tiers")}
    followed = Sessions.FOLLOWED.of(scheduler)
    return facts | {"measured": measured} | ({Sessions.FOLLOWED.status: followed} if followed else {})


# ---- a kv_offload -------------------------------------------------------------------------------


def _store_lines(store: Facts) -> list[str]:
    head = f"kv_offload.{store.get('id')}  {store.get('state')}"
    if "tiers" not in store or store.get("state") == "starting":
        return [head]
    if not (capacity := Count.L1_BYTES.of(store)):
        off = NOT_SHARED if store.get("not_shared") else OFF
        return [f"{head}  off: {why}" if (why := store.get("why_off")) else f"{head}  {off}"]
    quarantined = (
        f"; {size(Count.L1_QUARANTINED.of(store))} in quarantine" if Count.QUARANTINE.of(store) else ""
    )
    l1_hits, l2_hits, lookups = (count.of(store) for count in (Count.HITS_L1, Count.HITS_L2, Count.LOOKUPS))
    peer_hits, used = Links.PEER_HITS.of(store), Count.L1_USED.of(store)
    where = f"{l1_hits:,} in L1, {l2_hits:,} in L2"
    where += f", {peer_hits:,} in L1 of other hosts" if store.get("peers") else ""
    return [
        head,
        f"  L1     {size(used)} of {size(capacity)} ({percent(used, capacity)})"
        f" in {Count.L1_ENTRIES.of(store):,} blocks; {Count.EVICTED.of(store):,} evicted",
        f"  leases {Count.READS.of(store):,} reads of {size(Count.L1_READ.of(store))},"
        f" {Count.WRITES.of(store):,} writes of {size(Count.L1_WRITTEN.of(store))}{quarantined}",
        *_l2_lines(store),
        *_peer_lines(store),
        f"  hits   {percent(l1_hits + l2_hits + peer_hits, lookups)} of {lookups:,} blocks looked up:"
        f" {where}",
        f"  moved  {Count.STORED.of(store):,} blocks stored ({Count.NO_ROOM.of(store):,} did not fit),"
        f" {Count.LOADED.of(store):,} leased to be read, {Count.PROMOTIONS.of(store):,} brought from L2",
        f"  late   {Count.LOADS_LATE.of(store):,} loads, {Count.LATE_COMMITS.of(store):,} commits,"
        f" {Count.EXPIRED.of(store):,} leases",
    ]


def _l2_lines(store: Facts) -> list[str]:
    if Links.BREAKER.of(store) == "none":
        return ["  L2     none: what leaves L1 is gone. --l2 redis://host:port or file:///folder adds one"]
    health = "answers"
    if Links.BREAKER.of(store) == "open":
        health = "does not answer: breaker open, no calls but a probe about once a second"
    wait = f"{Links.IN_FLIGHT.of(store):,} calls out, {Links.QUEUED.of(store):,} wait"
    known = Links.KNOWN.of(store)
    return [
        f"  L2     {store.get('l2_url') or 'remote'} {health}; {known:,} blocks known there; {wait}",
        *([f"         {error}"] if (error := store.get("l2_error")) else []),
        f"         to it {rate(Links.PUT_RATE.of(store))}, from it {rate(Links.GET_RATE.of(store))};"
        f" {Links.ERRORS.of(store):,} errors, {Links.TIMEOUTS.of(store):,} timeouts,"
        f" {Links.REFUSED.of(store):,} refused, {Links.DAMAGED.of(store):,} damaged values,"
        f" breaker opened {Links.OPENED.of(store):,} times",
    ]


def _peer_lines(store: Facts) -> list[str]:
    readable, error = Links.PEERS_READABLE.of(store), store.get("peer_error")
    if not store.get("peers") or not (readable or error):
        return []  # NIXL is not installed, or there is one host
    return [
        f"  peers  L1 of {readable:,} other hosts can be read; {Links.PEER_GETS.of(store):,} blocks"
        f" ({size(Links.PEER_BYTES.of(store))}) came from there, {Links.PEER_LEASED.of(store):,} were leased"
        f" to them; {Links.PEER_ABSENT.of(store):,} were gone, {Links.PEER_CORRUPT.of(store):,} damaged,"
        f" {Links.PEER_FAILURES.of(store):,} failures",
        *([f"         {error}"] if error else []),
    ]


# ---- a scheduler --------------------------------------------------------------------------------


def _scheduler_lines(scheduler: Facts) -> list[str]:
    head = f"scheduler.{scheduler['id']}  {scheduler['state']}"
    if not scheduler["measured"]:  # the scheduler is starting
        return [head]
    shown = {"measured": {"tiers": scheduler["measured"]}}
    backoffs = Tiers.BACKOFFS.of(shown)
    rests = f"; backed off {backoffs:,} times from a tier that did not answer" if backoffs else ""
    links, followed = scheduler["tiers"] or {}, Sessions.FOLLOWED.of(scheduler)
    return [
        f"{head}  {OnLinks.LOOKUPS_OPEN.of(shown):,} lookups and {OnLinks.JOBS.of(shown):,} copies"
        f" open{rests}",
        f"  restored  {Tiers.LOADS.of(shown):,} times, {Tiers.RESTORED.of(shown):,} tokens:"
        f" {Tiers.L1_HITS.of(shown):,} blocks of L1, {Tiers.L2_HITS.of(shown):,} of L2;"
        f" {Tiers.DECLINED.of(shown):,} times computing was cheaper, {Tiers.LOADS_FAILED.of(shown):,} failed",
        f"  stored    {Tiers.STORED.of(shown):,} blocks,"
        f" {Tiers.STORED_AHEAD.of(shown):,} before a preemption needed it;"
        f" {Tiers.STORES_FAILED.of(shown):,} stores failed",
        f"  dropped   {Tiers.DROPPED.of(shown):,} blocks,"
        f" {Tiers.DROPPED_PREEMPTED.of(shown):,} of preempted sequences",
        f"  restore   p50 {OnLinks.RESTORE_P50.of(shown):g} ms, p99 {OnLinks.RESTORE_P99.of(shown):g} ms;"
        f" prediction off by {OnLinks.RESTORE_ERROR_P50.of(shown):g} % (p50)",
        f"  recompute prediction off by {OnLinks.RECOMPUTE_ERROR_P50.of(shown):g} % (p50)",
        *([f"  sessions  {followed:,} followed: see `headrace sessions`"] if followed else []),
        *(_link_line(name, facts) for name, facts in links.items()),
    ]


def _link_line(executor: str, facts: Facts) -> str:
    up = ("up", OnLinks.UP_RATE, OnLinks.UP_MOVED, OnLinks.UP_PENDING)
    down = ("down", OnLinks.DOWN_RATE, OnLinks.DOWN_MOVED, OnLinks.DOWN_PENDING)
    ways = [
        f"{way} {rate(speed.of(facts))}, {size(moved.of(facts))} moved, {pending.of(facts):,} pending"
        for way, speed, moved, pending in (up, down)
    ]
    return f"  executor {executor} on {facts['host']}: {'; '.join(ways)}"


# ---- figures ------------------------------------------------------------------------------------


def rate(bytes_per_s: float) -> str:
    """Bytes a second; 0 is not measured yet."""
    return f"{size(bytes_per_s)}/s" if bytes_per_s else "not measured"


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.set_defaults(run=lambda given: asyncio.run(kv(*find_fleet(given), as_json=given.json)))
