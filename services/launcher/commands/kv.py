"""`headrace kv` prints what each KV tier holds, how much work it saved and how good its predictions were."""

from __future__ import annotations

import argparse
import asyncio
import json

from services.launcher.console import percent, size
from services.launcher.session import Facts, Target, find_fleet, services_of

NOBODY = (
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
    drawn = [] if stores else list(NOBODY)
    for store in stores:
        drawn += _store_lines(store)
    for scheduler in schedulers:
        drawn += _scheduler_lines(_of_tiers(scheduler))
    return drawn


def _of_tiers(scheduler: Facts) -> Facts:
    measured = scheduler.get("measured", {}).get("tiers", {})
    return {name: scheduler.get(name) for name in ("id", "state", "tiers")} | {"measured": measured}


# ---- a kv_offload -------------------------------------------------------------------------------


def _store_lines(store: Facts) -> list[str]:
    head = f"kv_offload.{store.get('id')}  {store.get('state')}"
    if "tiers" not in store or store.get("state") == "starting":
        return [head]
    if not store["tiers"]["l1"]["capacity_bytes"]:
        off = NOT_SHARED if store.get("not_shared") else OFF
        return [f"{head}  off: {why}" if (why := store.get("why_off")) else f"{head}  {off}"]
    l1, l2 = store["tiers"]["l1"], store["tiers"]["l2"]
    keys, moved = store["keys"]["asked"], store["keys"]["moved"]
    quarantined = f"; {size(l1['quarantined_bytes'])} in quarantine" if store["quarantine"] else ""
    peers: Facts = store.get("peers", {})
    hits = keys["hits_l1"] + keys["hits_l2"] + peers.get("hits", 0)
    where = f"{keys['hits_l1']:,} in L1, {keys['hits_l2']:,} in L2"
    where += f", {peers['hits']:,} in L1 of other hosts" if peers else ""
    return [
        head,
        f"  L1     {size(l1['used_bytes'])} of {size(l1['capacity_bytes'])}"
        f" ({percent(l1['used_bytes'], l1['capacity_bytes'])}) in {l1['entries']:,} blocks;"
        f" {l1['evictions']:,} evicted",
        f"  leases {store['reads']:,} reads of {size(l1['read_bytes'])},"
        f" {store['writes']:,} writes of {size(l1['written_bytes'])}{quarantined}",
        *_l2_lines(l2, str(store.get("l2_url", "")), str(store.get("l2_error", ""))),
        *_peer_lines(peers, str(store.get("peer_error", ""))),
        f"  hits   {percent(hits, keys['lookups'])} of {keys['lookups']:,} blocks looked up: {where}",
        f"  moved  {moved['stored']:,} blocks stored ({moved['no_room']:,} did not fit),"
        f" {keys['loaded']:,} leased to be read, {moved['promotions']:,} brought from L2",
        f"  late   {keys['loads_late']:,} loads, {moved['late_commits']:,} commits,"
        f" {moved['expired_leases']:,} leases",
    ]


def _l2_lines(l2: Facts, url: str, error: str) -> list[str]:
    if l2["breaker"] == "none":
        return ["  L2     none: what leaves L1 is gone. --l2 redis://host:port or file:///folder adds one"]
    health = "answers"
    if l2["breaker"] == "open":
        health = "does not answer: breaker open, no calls but a probe about once a second"
    wait = f"{l2['in_flight']:,} calls out, {l2['queued']:,} wait"
    return [
        f"  L2     {url or 'remote'} {health}; {l2['known']:,} blocks known there; {wait}",
        *([f"         {error}"] if error else []),
        f"         to it {rate(l2['put_bytes_per_s'])}, from it {rate(l2['get_bytes_per_s'])};"
        f" {l2['errors']:,} errors, {l2['timeouts']:,} timeouts, {l2['refused']:,} refused,"
        f" {l2['corrupt']:,} damaged values,"
        f" breaker opened {l2['opened']:,} times",
    ]


def _peer_lines(peers: Facts, error: str) -> list[str]:
    if not peers or not (peers["readable"] or error):
        return []  # NIXL is not installed, or there is one host
    return [
        f"  peers  L1 of {peers['readable']:,} other hosts can be read; {peers['gets']:,} blocks"
        f" ({size(peers['bytes'])}) came from there, {peers['leased']:,} were leased to them;"
        f" {peers['absent']:,} were gone, {peers['corrupt']:,} damaged, {peers['failures']:,} failures",
        *([f"         {error}"] if error else []),
    ]


# ---- a scheduler --------------------------------------------------------------------------------


def _scheduler_lines(scheduler: Facts) -> list[str]:
    head = f"scheduler.{scheduler['id']}  {scheduler['state']}"
    m = scheduler["measured"]
    if not m:  # the scheduler is starting
        return [head]
    backoffs = m["tier_backoffs"]
    rests = f"; backed off {backoffs:,} times from a tier that did not answer" if backoffs else ""
    links = scheduler["tiers"] or {}
    return [
        f"{head}  {m['lookups_open']:,} lookups and {m['jobs_open']:,} copies open{rests}",
        f"  restored  {m['loads']:,} times, {m['restored_tokens']:,} tokens:"
        f" {m['l1_hit_blocks']:,} blocks of L1, {m['l2_hit_blocks']:,} of L2;"
        f" {m['loads_declined']:,} times computing was cheaper, {m['loads_failed']:,} failed",
        f"  stored    {m['stored_blocks']:,} blocks,"
        f" {m['stored_ahead_blocks']:,} before a preemption needed it;"
        f" {m['stores_failed']:,} stores failed",
        f"  dropped   {m['dropped_blocks']:,} blocks,"
        f" {m['dropped_preempted_blocks']:,} of preempted sequences",
        f"  restore   p50 {m['restore_p50_ms']:g} ms, p99 {m['restore_p99_ms']:g} ms;"
        f" prediction off by {m['restore_error_p50_pct']:g} % (p50)",
        f"  recompute prediction off by {m['recompute_error_p50_pct']:g} % (p50)",
        *(_link_line(name, facts) for name, facts in links.items()),
    ]


def _link_line(executor: str, facts: Facts) -> str:
    ways = [
        f"{way} {rate(facts[f'{way}_bytes_per_s'])}, {size(facts[f'{way}_moved_bytes'])} moved,"
        f" {facts[f'{way}_pending']:,} pending"
        for way in ("up", "down")
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
