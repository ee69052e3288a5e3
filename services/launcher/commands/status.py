"""`headrace status`, `top` and `usage` request the state of all services over NATS and print it.

`status` and `top` print problems, one line for each service, or every fact of one. Rates, hits and
preemptions cover the last ten seconds, counted by each service (`last_10_s` of its answer); all other figures
are current.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
import termios
import textwrap
import tty
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from services.launcher import console
from services.launcher.console import size
from services.launcher.session import (
    STATUS_WAIT_S,
    Facts,
    Target,
    answers_of,
    connected,
    find_fleet,
    services_of,
)
from shared.actor.membership import NEEDED
from shared.errors import BadRequest, HeadraceError
from shared.nats import access, subjects
from shared.telemetry import counters
from shared.telemetry.counters import KvOffloadCounter, KvOffloadLinkCounter, SchedulerCounter


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
        if target.page:
            print(f"The page: {target.page}")
        for link in filter(None, target.links.split(",")):
            print(": ".join(link.split("=", 1)))


def _width() -> int:
    """Columns of the terminal; 0 without one."""
    return shutil.get_terminal_size().columns if console.is_terminal(sys.stdout) else 0


async def top(target: Target, fleet: str, interval_s: float, count: int) -> None:
    """Print the table of `status` every `interval_s`, `count` times (0: until Ctrl-C). On a terminal each
    table replaces the last one, and `q` ends. Raises Unavailable if no service answers at first; later
    failures are shown and retried. Raises BadRequest."""
    if not interval_s > 0 or count < 0:
        raise BadRequest("--interval is above 0, and --count is 0 or more")
    ended = asyncio.Event()
    async with connected(target.nats_url) as bus:
        url, services = access.shown(target.nats_url), await answers_of(bus, fleet)
        with _screen(ended) as show, contextlib.suppress(asyncio.CancelledError):  # Ctrl-C ends it well
            text = lines(Fleet(fleet, url, services), _width())
            for turn in itertools.count(1):
                show(
                    [
                        console.dim(f"{datetime.now():%H:%M:%S}, every {interval_s:g} s; q or Ctrl-C ends"),
                        *text,
                    ]
                )
                if turn == count or await _is_set_within(ended, interval_s - STATUS_WAIT_S):
                    return
                try:
                    text = lines(Fleet(fleet, url, await answers_of(bus, fleet)), _width())
                except HeadraceError as error:
                    text = [f"{error.message}; trying again"]


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(seconds, 0)):
            await event.wait()
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


ID_DIGITS = 4  # shown of an id, more if two start alike
GROWS = 10  # requests by which a queue has grown in ten seconds to be reported as a problem
FULL_PCT = 95
FOOT = "Rates, hits, preemptions: last 10 s. Every fact: headrace status SERVICE"
_STARTS = {
    "executor": "it loads its model, and requests wait for it",
    "kv_offload": "until it is ready, KV blocks that leave device memory are computed again",
}
_REFUSALS = (
    (
        "scheduler",
        429,
        SchedulerCounter.REFUSED_429,
        "its queue is full, or its wait too long. Add an executor, send less, or raise max_waiting",
    ),
    ("scheduler", 503, SchedulerCounter.REFUSED_503, "no executor has come in time"),
    (
        "tokenizer",
        503,
        counters.TokenizerCounter.UNAVAILABLE,
        "no scheduler has answered, or none had an executor and a detokenizer",
    ),
)


@dataclass(frozen=True)
class Fleet:
    """The answers of all services of a fleet, in the order of the pipeline."""

    name: str
    nats_url: str  # without a password
    services: Sequence[Facts]

    @cached_property
    def models(self) -> list[str]:
        """The models of all services, sorted."""
        return sorted({str(s["model"]) for s in self.services if s.get("model")})

    @cached_property
    def _short_ids(self) -> dict[str, str]:
        ids = {str(s["id"]) for s in self.services}
        longest = max(map(len, ids), default=0)
        enough = (n for n in range(ID_DIGITS, longest) if len({i[:n] for i in ids}) == len(ids))
        digits = next(enough, longest)
        return {i: i[:digits] for i in ids}

    def name_of(self, kind: object, actor: object) -> str:
        """`kind.id`, with the id cut to a unique start; the whole id of a service that has not answered."""
        return f"{kind}.{self._short_ids.get(str(actor), actor)}"

    def of_kind(self, kind: str) -> list[tuple[str, Facts]]:
        """The ready services of a kind with their names."""
        found = [s for s in self.services if (s["kind"], s["state"]) == (kind, "ready")]
        return [(self.name_of(kind, s["id"]), s) for s in found]

    def find(self, wanted: str) -> list[Facts]:
        """The services with a `kind.id` or an id that starts with `wanted`."""
        names = [(f"{s['kind']}.{s['id']}", str(s["id"]), s) for s in self.services]
        return [s for name, actor, s in names if name.startswith(wanted) or actor.startswith(wanted)]


def lines(fleet: Fleet, width: int = 0) -> list[str]:
    """Problems, then one line for each service, cut to `width` columns; 0 is no limit."""
    found = list(problems(fleet))
    count = {0: "no problems", 1: "1 problem"}.get(len(found), f"{len(found)} problems")
    models = f", {', '.join(fleet.models)}" if fleet.models else ""
    head = f"fleet {fleet.name} at {fleet.nats_url}{models}"
    room = max(width - len(f": {count}"), 0) if width else None  # without it the verdict would be cut off
    return [
        console.bold(f"{head[:room]}: {count}"[: width or None]),
        *(line for problem in found for line in _folded(problem, width)),
        "",
        *_table(fleet, width),
        "",
        console.dim(FOOT[: width or None]),
    ]


def _folded(problem: str, width: int) -> list[str]:
    first, *more = textwrap.wrap(problem, width - 2 if width else 10_000)
    return [f"{console.red('!')} {first}", *(f"  {line}" for line in more)]


def every_fact(fleet: Fleet, service: Facts) -> list[str]:
    """One service: its problems, then one fact a line, for an executor also its scheduler's facts."""
    name, seen = fleet.name_of(service["kind"], service["id"]), {}
    for scheduler, facts in fleet.of_kind("scheduler"):
        if service["kind"] == "executor" and service["id"] in facts.get("executors", {}):
            seen[scheduler] = facts["executors"][service["id"]]
    rows = list(_flat({**service, **seen}))
    longest = max(len(fact) for fact, _ in rows)
    return [
        console.bold(f"{service['kind']}.{service['id']}"),
        *(line for problem in problems(fleet) if name in problem for line in _folded(problem, 0)),
        *(f"  {fact:<{longest}}  {value}".rstrip() for fact, value in rows),
    ]


def _flat(facts: Facts, above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        elif isinstance(value, list) and not any(isinstance(v, dict | list) for v in value):
            yield f"{above}{name}", ", ".join(map(str, value))
        else:
            yield f"{above}{name}", value if isinstance(value, str) else json.dumps(value)


# ---- one line a service -------------------------------------------------------------------------


def _table(fleet: Fleet, width: int) -> list[str]:
    rows = [(fleet.name_of(s["kind"], s["id"]), s, _cells(fleet, s)) for s in fleet.services]
    names, states = max(len(n) for n, _, _ in rows), max(len(str(s["state"])) for _, s, _ in rows)
    hosts = {str(s.get("host", "")) for s in fleet.services}
    longest_host = max(map(len, hosts)) if len(hosts) > 1 else 0
    shown = []
    for name, service, cells in rows:
        alike = [other for _, s, other in rows if s["kind"] == service["kind"]]
        old = age(counters.ProcessCounter.AGE.of(service))
        line = f"{name:<{names}}  {service['state']:<{states}}  {old:>3}"
        line += f"  {service.get('host', ''):<{longest_host}}" if longest_host else ""
        for i, cell in enumerate(cells):
            longest = max(len(other[i]) for other in alike if len(other) > i)
            word = i == len(cells) - 1 and not cell[0].isdigit()  # a model, a URL
            text = cell if word else f"{cell:>{longest}}"
            if width and len(line) + 2 + len(text) > width:
                break
            line += f"  {text}"
        shown.append(line)
    return shown


def _cells(fleet: Fleet, service: Facts) -> list[str]:
    """The cells of a service's line; none if it starts or has failed: then its answer has no facts."""
    if service["state"] == "starting":
        return []
    make = _CELLS.get(service["kind"])
    try:
        cells = make(fleet, service) if make is not None else counters.cells(service)
    except KeyError:
        return []
    model = service.get("model")
    return [*cells, model] if model and (len(fleet.models) > 1 or service["kind"] == "executor") else cells


def _gateway(_: Fleet, gateway: Facts) -> list[str]:
    return [*counters.cells(gateway), gateway["url"]]


def _executor(fleet: Fleet, executor: Facts) -> list[str]:
    """KV, step time and slots come from the scheduler, which has the block pool."""
    of_schedulers = [s.get("executors", {}).get(executor["id"]) for _, s in fleet.of_kind("scheduler")]
    pool = next((pool for pool in of_schedulers if pool), None)
    engine = f"{executor['backend']} {executor['dtype']}".removesuffix(" none")
    if pool is None:
        return ["asleep", engine] if executor.get("asleep") else [engine]
    slots = SchedulerCounter.SLOTS.of(pool)
    of = f" of {size(kv_bytes)}" if (kv_bytes := counters.ExecutorCounter.KV_BYTES.of(executor)) else ""
    return [
        f"KV {SchedulerCounter.KV_USED.of(pool):.0f} %{of}",
        f"step {SchedulerCounter.STEP_P50.of(pool):.1f} ms",
        f"{slots - SchedulerCounter.FREE_SLOTS.of(pool)} of {slots} slots",
        *([f"{len(pool['adapters'])} adapters"] if "adapters" in pool else []),
        engine,
    ]


def _kv_offload(_: Fleet, store: Facts) -> list[str]:
    if not (capacity := KvOffloadCounter.L1_BYTES.of(store)):
        return ["no L1: nothing shares it" if store.get("not_shared") else "off"]
    used = f"L1 {size(KvOffloadCounter.L1_USED.of(store))} of {size(capacity)}"
    states = {"none": "no L2", "open": "L2 does not answer"}
    reached = states.get(KvOffloadLinkCounter.BREAKER.of(store), "L2 answers")
    return [used, reached, *counters.cells(store)[1:]]


_CELLS: dict[str, Callable[[Fleet, Facts], list[str]]] = {
    "gateway": _gateway,
    "executor": _executor,
    "kv_offload": _kv_offload,
}  # else those declared


# ---- problems -----------------------------------------------------------------------------------


def problems(fleet: Fleet) -> Iterator[str]:
    """Each problem as a sentence that starts with a service or a model, and what to do about it."""
    for check in (
        _not_ready,
        _silent,
        _lacking,
        _kept_out,
        _queues,
        _gateways,
        _removed,
        _keepers,
        _tiers,
        _faults,
    ):
        yield from check(fleet)


def _not_ready(fleet: Fleet) -> Iterator[str]:
    for service in fleet.services:
        name, state = fleet.name_of(service["kind"], service["id"]), service["state"]
        if state == "starting":
            why, old = (
                _STARTS.get(service["kind"], "requests wait for it"),
                age(counters.ProcessCounter.AGE.of(service)),
            )
            yield f"{name} has been starting for {old}: {why}. Its log shows how far it is."
        elif state == "draining":
            yield f"{name} drains: it takes no new requests, and ends after its last one or drain_timeout_s."
        elif state != "ready":
            yield f"{name} has {state}: its log has the reason. `headrace up` starts it again."


def _silent(fleet: Fleet) -> Iterator[str]:
    """Services that a scheduler counts on and that have not answered."""
    there = {(s["kind"], s["id"]) for s in fleet.services}
    for scheduler, facts in fleet.of_kind("scheduler"):
        members = [(kind, i) for kind in ("executor", "detokenizer") for i in facts.get(f"{kind}s", ())]
        for kind, actor in members:
            if (kind, actor) not in there:
                yield (
                    f"{fleet.name_of(kind, actor)} has not answered within {STATUS_WAIT_S} s, and "
                    f"{scheduler} counts on it: it is busy, stopped or cut off. Try again; its log has the "
                    "reason."
                )


def _lacking(fleet: Fleet) -> Iterator[str]:
    for model in fleet.models:
        there = {s["kind"] for s in fleet.services if s.get("model") == model}
        schedulers = [(name, s) for name, s in fleet.of_kind("scheduler") if s.get("model") == model]
        counted_on = {kind for kind in NEEDED for _, s in schedulers if s.get(f"{kind}s")}
        starting = {s["kind"] for s in fleet.services if s["state"] == "starting"}
        for kind in NEEDED:
            may_load = kind == "executor" and any(s.get("shares_memory") for _, s in schedulers)
            if kind not in there | counted_on | starting and not may_load:
                yield (
                    f"{model} has no {kind}: new requests for it are refused. "
                    f"Start one: `headrace serve {kind} --model {model}`."
                )
        for name, facts in schedulers if "executor" in there else ():
            if not (facts.get("executors") or facts.get("states")):  # the latter: asleep
                yield f"{name} has no executor yet: it serves nothing until one joins it."


def _kept_out(fleet: Fleet) -> Iterator[str]:
    for scheduler, facts in fleet.of_kind("scheduler"):
        for actor, refused in facts.get("kept_out", {}).items():
            name = fleet.name_of("executor", actor)
            yield f"{name} serves nothing, {scheduler} keeps it out: {refused['why']}."
    listed = {actor for _, facts in fleet.of_kind("scheduler") for actor in facts.get("kept_out", {})}
    for service in fleet.services:  # that keep themselves out
        if service["kind"] == "executor" and service.get("kept_out") and service["id"] not in listed:
            yield f"{fleet.name_of('executor', service['id'])} serves nothing: {service['kept_out']}."


def _queues(fleet: Fleet) -> Iterator[str]:
    for name, facts in fleet.of_kind("scheduler"):
        waiting, grown = SchedulerCounter.WAITING.of(facts), SchedulerCounter.WAITING_REQUESTS.grown(facts)
        if waiting and grown >= GROWS:
            yield (
                f"{name} has {_many(waiting, 'request')} waiting, {grown:,} more than "
                f"{_seconds(facts)} ago: {_bottleneck(facts['executors'])}. Add an executor, or send less."
            )
    for kind, code, count, why in _REFUSALS:
        for name, facts in fleet.of_kind(kind):
            if refused := count.grown(facts):
                asked, when = _many(refused, "request"), _seconds(facts)
                yield f"{name} has refused {asked} with {code} in the last {when}: {why}."


def _bottleneck(executors: Facts) -> str:
    pools = executors.values()
    if not pools:
        return "it has no executor"
    if all(SchedulerCounter.FREE_SLOTS.of(pool) == 0 for pool in pools):
        return "all slots of its executors are in use"
    if all(SchedulerCounter.KV_USED.of(pool) >= FULL_PCT for pool in pools):
        return "the KV cache of its executors is full"
    return "they come faster than its executors serve them"


def _gateways(fleet: Fleet) -> Iterator[str]:
    for name, facts in fleet.of_kind("gateway"):
        if (health := facts.get("health", "ok")) != "ok":
            yield f"{name} is not healthy, and /health answers 503: {health}."


def _removed(fleet: Fleet) -> Iterator[str]:
    for name, facts in (*fleet.of_kind("keeper"), *fleet.of_kind("tokenizer")):
        for stream, ago_s in sorted(facts.get("removed", {}).items()):
            held = "it has all aliases" if stream == subjects.ALIAS_STREAM else "what it held is gone"
            yield (
                f"{name} found stream {stream} removed, {age(ago_s)} ago, and made it again: {held}. "
                "Headrace removes no stream: look for what else does at that nats-server."
            )


def _keepers(fleet: Fleet) -> Iterator[str]:
    for name, facts in fleet.of_kind("keeper"):
        if failing := facts.get("unwritten"):
            first = max(failing.values(), key=lambda each: each["for_s"])
            tried = min(each["tried_ago_s"] for each in failing.values())
            yield (
                f"{name} cannot store durable requests or answers: JetStream has taken no write to "
                f"{', '.join(sorted(failing))} for {age(first['for_s'])}, the last try was {age(tried)} ago "
                f"({first['why']}). The disk of that nats-server may be full: look at its log and at the "
                "folder of durable requests."
            )
        for origin, count in sorted(facts.get("webhooks_dropped", {}).items()):
            yield (
                f"{name} has dropped {count:,} events for {origin}, the oldest of tenants with more than "
                "their share: it takes none, or too few of them. Look at that receiver."
            )
        if taker := facts.get("taken_by"):
            yield (
                f"{name} refuses new durable requests: {taker} takes them out of their stream. Delete "
                "it, and back up the folder of the nats-server instead."
            )


def _tiers(fleet: Fleet) -> Iterator[str]:
    for name, facts in fleet.of_kind("kv_offload"):
        if why := facts.get("why_off"):
            yield f"{name} is off: {why}."
        if KvOffloadLinkCounter.BREAKER.of(facts) == "open":
            why = f" ({facts['l2_error']})" if facts.get("l2_error") else ""
            yield (
                f"{name} does not reach its L2 {facts.get('l2_url')}{why}: what leaves L1 is computed again. "
                "Start that server or repair the connection; kv_offload tries it once a second."
            )
        elif why := facts.get("l2_refusal"):
            yield (
                f"{name} cannot write to its L2 {facts.get('l2_url')} ({why}): it reads what is there, and "
                "what leaves L1 is computed again. Give it memory or an eviction policy, or make it writable."
            )
        if damaged := KvOffloadLinkCounter.DAMAGED.of(facts):
            yield (
                f"{name} has deleted {_many(damaged, 'damaged value')} from its L2 {facts.get('l2_url')} "
                "since it started, and computes them again: check that server's memory and disk, and what "
                "else writes to it."
            )
        if stuck := KvOffloadLinkCounter.STUCK.of(facts):
            yield f"{name} waits for {_many(stuck, 'call')} that do not end: check {facts.get('l2_url')}."


def _faults(fleet: Fleet) -> Iterator[str]:
    for service in fleet.services:
        name = fleet.name_of(service["kind"], service["id"])
        if errors := counters.ProcessCounter.WIRE_ERRORS.of(service):
            yield (
                f"{name} has dropped {_many(errors, 'message')} that it could not read (wire errors): is a "
                "service of another version in this fleet? Its log has the details."
            )
        if failed := counters.ExecutorCounter.FAILED.grown(service):
            steps = _many(failed, "step")
            yield f"{name} has failed {steps} in the last {_seconds(service)}: its log has the reason."
        if waiting := counters.DetokenizerCounter.FAILOVER.of(service):
            yield f"{name} has {_many(waiting, 'request')} without a scheduler: start a scheduler."


# ---- usage --------------------------------------------------------------------------------------

COLUMNS = tuple(
    each.status
    for each in (
        SchedulerCounter.USED_REQUESTS,
        SchedulerCounter.USED_PROMPT_TOKENS,
        SchedulerCounter.USED_CACHED_TOKENS,
        SchedulerCounter.USED_COMPLETION_TOKENS,
    )
)
_HEAD = ("tenant", "model", "requests", "prompt tokens", "of them cached", "completion tokens")

Usage = dict[tuple[str, str], Counter[str]]  # by tenant and model


async def usage(target: Target, fleet: str, *, as_json: bool) -> None:
    """Print what each tenant has used of each model, from the counters of the schedulers, which start with
    them. Raises Unavailable if no service answers."""
    services = await services_of(target, fleet)
    found = by_tenant(services)
    if as_json:
        rows = [{"tenant": tenant, "model": model, **used} for (tenant, model), used in found.items()]
        print(json.dumps({"fleet": fleet, "usage": rows}, indent=2))
        return
    ages = [
        int(counters.ProcessCounter.AGE.of(service))
        for service in services
        if service.get("kind") == "scheduler"
    ]
    print(f"ended requests of the last {max(ages, default=0) / 3600:.1f} h, since the schedulers started")
    print("\n".join(table(found)))


def by_tenant(services: list[Facts]) -> Usage:
    """The counts by tenant and model: the sum over all schedulers."""
    found: Usage = defaultdict(Counter)
    for service in services:
        for tenant, counts in service.get("usage", {}).items():
            found[tenant, str(service.get("model", ""))].update(counts)
    return dict(sorted(found.items()))


def table(found: Usage) -> list[str]:
    """Aligned lines, with a sum if there are several."""
    counts = dict(found)
    if len(found) > 1:
        counts["all", ""] = sum(found.values(), Counter[str]())
    rows = [_HEAD, *((*names, *(f"{used[name]:,}" for name in COLUMNS)) for names, used in counts.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.ljust, str.ljust, *[str.rjust] * len(COLUMNS)]
    return ["  ".join(map(lambda align, *cell: align(*cell), aligned, row, widths)) for row in rows]


# ---- figures ------------------------------------------------------------------------------------


def age(seconds: float) -> str:
    """A duration in its largest whole unit: at most three characters up to 99 days."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds:.0f}s"


def _seconds(facts: Facts) -> str:
    return f"{facts[counters.RECENT][counters.SECONDS]:.0f} s"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add(
        "service",
        nargs="?",
        default="",
        metavar="SERVICE",
        help="show every fact of this kind, id or start of an id",
    )
    add("--json", action="store_true", help="everything, as JSON")
    parser.set_defaults(
        run=lambda given: asyncio.run(status(*find_fleet(given), given.service, as_json=given.json))
    )


def top_command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add("--interval", type=float, default=1.0, metavar="SECONDS", help="default 1")
    add("--count", type=int, default=0, metavar="N", help="number of updates; default: until q or Ctrl-C")
    parser.set_defaults(run=lambda given: asyncio.run(top(*find_fleet(given), given.interval, given.count)))


def usage_command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=lambda given: asyncio.run(usage(*find_fleet(given), as_json=given.json)))
