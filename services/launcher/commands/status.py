"""`headrace status`, `top` and `kv` request the state of all services over NATS and print it.

`status` and `top` print the lines of overview.py; `kv` prints what each KV tier holds, how much work it saved
and how good its predictions were. `ScrapeTargets` has the addresses at which Prometheus reads the processes
of `up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime

from services.launcher import console
from services.launcher.commands.overview import ANSWER_S, Facts, Fleet, every_fact, lines, percent, size
from services.launcher.serve import KINDS
from services.launcher.session import Target, connected
from shared.client import request_all
from shared.errors import BadRequest, HeadraceError, Unavailable
from shared.nats import access, subjects
from shared.nats.interface import Bus
from shared.processes import http_url
from shared.telemetry.metrics import PATH, reserve
from shared.telemetry.otel import PROMETHEUS_HOST, PROMETHEUS_PORT, prometheus_address

NOBODY = (
    "no kv_offload runs in this fleet: what device memory loses is computed again.",
    "`headrace up` starts one; elsewhere run `headrace serve kv_offload` on each host with an executor",
)
OFF = "off: KV blocks are kept only in device memory. Start it with --l1 auto, or a size in MiB"


async def status(target: Target, fleet: str, wanted: str = "", *, as_json: bool) -> None:
    """Print the services of `fleet`, or every fact of those with a kind or id that starts with `wanted`.
    Raises Unavailable if no service answers, BadRequest if none matches."""
    found = Fleet(fleet, access.shown(target.nats_url), await services_of(target, fleet))
    chosen = found.find(wanted)
    if not chosen:
        names = ", ".join(found.name_of(s["kind"], s["id"]) for s in found.services)
        raise BadRequest(f"there is no service {wanted!r} in fleet {fleet}: choose one of {names}, or a kind")
    if as_json:
        print(json.dumps({"nats_url": found.nats_url, "fleet": fleet, "services": chosen}, indent=2))
    elif wanted:
        print("\n\n".join("\n".join(every_fact(found, service)) for service in chosen))
    else:
        print("\n".join(lines(found, _width())))


async def services_of(target: Target, fleet: str) -> list[Facts]:
    """The answers of the services of `fleet`, in pipeline order. Raises Unavailable without any."""
    async with connected(target.nats_url) as bus:
        return await _answers(bus, fleet)


async def _answers(bus: Bus, fleet: str) -> list[Facts]:
    answers = await request_all(bus, subjects.STATUS, ANSWER_S)
    services = sorted((a for a in answers if a.get("fleet") == fleet), key=_order)
    if not services:
        fleets = ", ".join(sorted({str(a.get("fleet")) for a in answers}))
        raise Unavailable(f"no service of fleet {fleet!r} answers; there are: {fleets or 'none'}")
    return services


def _order(answer: Facts) -> tuple[int, str]:
    kind = str(answer.get("kind"))
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), f"{kind}.{answer.get('id')}")


def _width() -> int:
    """Columns of the terminal; 0 without one."""
    return shutil.get_terminal_size().columns if console.is_terminal(sys.stdout) else 0


async def top(target: Target, fleet: str, interval_s: float, count: int) -> None:
    """Print the table of `status` every `interval_s`, `count` times (0: until Ctrl-C). On a terminal each
    table replaces the last one, and `q` ends. Raises Unavailable if no service answers at first; later
    failures are shown and retried."""
    ended = asyncio.Event()
    async with connected(target.nats_url) as bus:
        url, services = access.shown(target.nats_url), await _answers(bus, fleet)
        with _screen(ended) as show, contextlib.suppress(asyncio.CancelledError):  # Ctrl-C ends it well
            text = lines(Fleet(fleet, url, services), _width())
            for turn in itertools.count(1):
                show(
                    [
                        console.dim(f"{datetime.now():%H:%M:%S}, every {interval_s:g} s; q or Ctrl-C ends"),
                        *text,
                    ]
                )
                if turn == count or await _set_within(ended, interval_s - ANSWER_S):
                    return
                try:
                    text = lines(Fleet(fleet, url, await _answers(bus, fleet)), _width())
                except HeadraceError as error:
                    text = [f"{error.message}; trying again"]


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), max(seconds, 0))
    return event.is_set()


@contextlib.contextmanager
def _screen(ended: asyncio.Event) -> Iterator[Callable[[list[str]], None]]:
    """A function that prints lines, on a terminal in place of the last ones. There `q` sets `ended`."""
    if not (console.is_terminal(sys.stdout) and sys.stdin.isatty()):
        yield lambda text: print("\n".join(text), end="\n\n", flush=True)
        return
    from rich.live import Live
    from rich.text import Text

    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()

    def on_key() -> None:
        if b"q" in os.read(keyboard, 64):
            ended.set()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, on_key)
    try:
        with Live(screen=True, auto_refresh=False) as live:
            yield lambda text: live.update(Text.from_ansi("\n".join(text), no_wrap=True), refresh=True)
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


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
    lines = [] if stores else list(NOBODY)
    for store in stores:
        lines += _store_lines(store)
    for scheduler in schedulers:
        lines += _scheduler_lines(_of_tiers(scheduler))
    return lines


def _of_tiers(scheduler: Facts) -> Facts:
    measured = scheduler.get("measured", {}).get("tiers", {})
    return {name: scheduler.get(name) for name in ("id", "state", "tiers")} | {"measured": measured}


# ---- a kv_offload -------------------------------------------------------------------------------


def _store_lines(store: Facts) -> list[str]:
    head = f"kv_offload.{store.get('id')}  {store.get('state')}"
    if "tiers" not in store or store.get("state") == "starting":
        return [head]
    if not store["tiers"]["l1"]["capacity_bytes"]:
        return [f"{head}  off: {why}" if (why := store.get("why_off")) else f"{head}  {OFF}"]
    l1, l2 = store["tiers"]["l1"], store["tiers"]["l2"]
    keys, moved = store["keys"]["asked"], store["keys"]["moved"]
    quarantined = f"; {size(l1['quarantined_bytes'])} in quarantine" if store["quarantine"] else ""
    hits = keys["hits_l1"] + keys["hits_l2"]
    where = f"{keys['hits_l1']:,} in L1, {keys['hits_l2']:,} in L2"
    return [
        f"{head}  store {store.get('store', '')}",
        f"  L1     {size(l1['used_bytes'])} of {size(l1['capacity_bytes'])}"
        f" ({percent(l1['used_bytes'], l1['capacity_bytes'])}) in {l1['entries']:,} blocks;"
        f" {l1['evictions']:,} evicted",
        f"  leases {store['reads']:,} reads of {size(l1['read_bytes'])},"
        f" {store['writes']:,} writes of {size(l1['written_bytes'])}{quarantined}",
        *_l2_lines(l2, str(store.get("l2_url", "")), str(store.get("l2_error", ""))),
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


class ScrapeTargets:
    """The address at which Prometheus reads each service: one port each, from the standard port upwards, or
    free ports if that is 0. None if `env` does not ask for Prometheus.

    A port stays reserved until the run ends, so that a restarted service keeps it: the system gives outgoing
    connections ports of the same range.
    """

    def __init__(self, env: Mapping[str, str], names: Sequence[str]) -> None:
        """Raises SetupError if a port is taken."""
        self.addresses: dict[str, tuple[str, int]] = {}
        self._held: list[socket.socket] = []
        if (address := prometheus_address(env)) is None:
            return
        host, first = address
        for i, name in enumerate(names):
            held = reserve(host, first + i if first else 0, listen=False)
            self._held.append(held)
            self.addresses[name] = (host, held.getsockname()[1])

    def variables(self, name: str) -> dict[str, str]:
        """The environment variables with the address of this service."""
        if (address := self.addresses.get(name)) is None:
            return {}
        return {PROMETHEUS_HOST: address[0], PROMETHEUS_PORT: str(address[1])}

    def shown(self) -> str:
        """All addresses in one line."""
        return ", ".join(f"{name} {http_url(*page)}{PATH}" for name, page in self.addresses.items())

    def close(self) -> None:
        """Release all ports."""
        for held in self._held:
            held.close()
