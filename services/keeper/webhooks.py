"""Webhooks: which URLs may be called, what is sent there and how it is signed, when it is tried again. Pure.

An event has OpenAI's form and the signature of the Standard Webhooks specification
(https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md): the libraries of
both verify it. The setting `webhooks` names a file of the hosts that may be called, each with its secrets:

    hooks.example.com        whsec_MfKQ…          https alone
    hooks.example.com:8443   whsec_C2FV… whsec_MfKQ…   a new secret, and the one that it replaces
    http://127.0.0.1:9000    whsec_plJ3…

`Webhooks` sends the events of requests and batches that have ended to the URLs that their clients named.

    record stored ──event──▶ stream HR_HOOKS ──pull, some of each host──▶ POST ──2xx──▶ ack
                                                                            └─ else: nak with a delay

An event is in the stream before its request leaves the work queue, so no death loses it; it may be sent
twice, with the same id. Each host has a consumer and so many tries at a time: one that hangs holds up nothing
else, and fills no more than its share of the stream: then the oldest of its own events go. Without the
setting `webhooks` there is neither stream nor consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import random
import re
import ssl
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from services.keeper.parts import Keeper, Part
from services.keeper.records import BATCH, COMPLETED, DELETED, RESPONSE, Body, Hook
from shared import bodies
from shared.config import Settings, WatchedFile
from shared.errors import BadRequest, HeadraceError, Unavailable
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.nats.jetstream import REMOVED_S, Puller, Taken, deliveries
from shared.telemetry.counters import Counted, KeeperCounter

MAX_URL_CHARS = 2_048
SECRET, MIN_SECRET_BYTES, MAX_SECRET_BYTES = "whsec_", 24, 64  # as the specification has them
FIRST_DELAY_US, LAST_DELAY_US = 5_000_000, 3_600_000_000  # doubled at each try
MAX_TRIES = 33  # within 24 hours
SPREAD = 0.2  # of a delay, up and down: events that failed together are not tried again together
GONE = 410  # the receiver wants no more events

_PORTS = {"http": 80, "https": 443}
# Any other form is refused, with a user, a fragment, blanks or letters beyond ASCII: two parsers could read
# it as URLs of two hosts.
_URL = re.compile(
    r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)(?::([0-9]{1,5}))?((?:[/?][!\"$-~]*)?)",
    re.IGNORECASE | re.ASCII,
)

Secrets = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, taken apart."""

    scheme: str
    host: str  # in lower case; IPv6 without brackets
    port: int
    path: str  # with the query

    @property
    def origin(self) -> str:
        """Scheme, host and port: what the list of hosts compares."""
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """The header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def key(self) -> str:
        """A name of the origin without special characters, for subjects and consumers."""
        return sha256(self.origin.encode()).hexdigest()[:32]


def target_of(url: object) -> Target:
    """The parts of a URL. Raises BadRequest for one of another form."""
    found = _URL.fullmatch(url) if isinstance(url, str) and len(url) <= MAX_URL_CHARS else None
    port = int(found[3] or _PORTS[found[1].lower()]) if found else 0
    if found is None or not 0 < port < 65_536:
        raise BadRequest(
            "`webhook`: a URL like https://host/path is expected, in ASCII, without user and fragment, of at "
            f"most {MAX_URL_CHARS:,} characters",
            param="webhook",
        )
    path = found[4] if found[4].startswith("/") else f"/{found[4]}"
    return Target(found[1].lower(), found[2].lower().strip("[]"), port, path)


def read_hosts(text: str) -> dict[str, Secrets]:
    """Secrets by origin. Raises ValueError with the line number; no secret is in its text."""
    hosts: dict[str, Secrets] = {}
    for number, line in enumerate(text.splitlines(), 1):
        host, *secrets = line.partition("#")[0].split() or [""]
        if not host:
            continue
        try:
            target = target_of(host if "://" in host else f"https://{host}")
        except BadRequest:
            target = None
        if target is None or target.path != "/" or host.endswith("/"):
            raise ValueError(f"line {number}: a host, host:port or http://host:port is expected first")
        if not secrets:
            raise ValueError(f"line {number}: a secret is expected after the host")
        if target.origin in hosts:
            raise ValueError(f"line {number}: {target.origin} is listed twice; one line may have two secrets")
        hosts[target.origin] = tuple(_secret(each, number) for each in secrets)
    return hosts


def _secret(text: str, line: int) -> bytes:
    try:
        secret = b64decode(text.removeprefix(SECRET), validate=True)
    except ValueError:
        secret = b""
    if not text.startswith(SECRET) or not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        most = f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes"
        raise ValueError(
            f"line {line}: a secret is {SECRET} and {most} in base64 (`openssl rand -base64 32`)"
        )
    return secret


def event_of(hook: Hook, record: Mapping[str, object]) -> Body:
    """The event of a record. Its id is the same however often it is made."""
    status = record["status"]
    if hook.kind == RESPONSE and status == COMPLETED and _is_cut_short(record):
        status = "incomplete"
    named = "\0".join((hook.tenant, hook.kind, hook.id, str(hook.submitted)))
    return {
        "id": f"evt_{sha256(named.encode()).hexdigest()[:32]}",
        "object": "event",
        "created_at": record.get("ended_at") or record.get(f"{status}_at"),
        "type": f"{hook.kind}.{status}",
        "data": {"id": hook.id},
    }


def _is_cut_short(record: Mapping[str, object]) -> bool:
    """True for an answer that has met its limit."""
    answer = record.get("answer")
    choices = answer.get("choices", ()) if isinstance(answer, dict) else ()
    return any(choice.get("finish_reason") == "length" for choice in choices)


def signed(event: str, now_s: int, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """The headers of a try: the id of its event, its time, a signature with each secret."""
    content = f"{event}.{now_s}.".encode() + body
    each = (b64encode(hmac.digest(secret, content, "sha256")).decode() for secret in secrets)
    return {
        "webhook-id": event,
        "webhook-timestamp": str(now_s),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in each),
    }


def delay_us(tries: int, drawn: float) -> int | None:
    """The time until the next try after so many have failed; None: it is given up. `drawn`: random, from 0
    to 1."""
    if tries >= MAX_TRIES:
        return None
    delay = min(FIRST_DELAY_US << min(tries - 1, 10), LAST_DELAY_US)
    return int(delay * (1 - SPREAD + 2 * SPREAD * drawn))


log = logging.getLogger("headrace.keeper")

HOOK_BYTES = 67_108_864  # with the other streams less than the 3 GB of the server of `up`
STREAM = {
    "subjects": [subjects.HOOK_ALL], "retention": "workqueue", "storage": "file", "discard": "new",
    "max_bytes": HOOK_BYTES, "max_age": 172_800_000_000_000,  # two days, for hosts that are listed no more
}  # fmt: skip
CONSUMER = {
    "ack_policy": "explicit",
    "ack_wait": 30_000_000_000,  # three times TRY_S
    "max_deliver": -1,  # MAX_TRIES counts
    "max_ack_pending": -1,  # all events of a host that is down: by default, 1,000 of them end its deliveries
}
TRY_S = 10.0
TRIES_OF_HOST = 8  # at a time, of one keeper
MAX_LINE = 4_096  # bytes of a status line
LIST_PART = 20  # a list of all events takes at most this part of the time: a full stream has 200,000 events
OPEN_AGAIN_S = 1.0
EVENTS_POLL_S = 2.0  # between looks for events that are due again, or that other keepers stored
AGAIN_US = 5_000_000  # until a record whose event could not be stored is delivered again
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})\b")


def hosts_in(path: str) -> WatchedFile[dict[str, Secrets]]:
    """The hosts in a file. Raises SetupError."""
    return WatchedFile("webhooks", path, read_hosts, log)


class Webhooks(Part):
    """The webhooks of one keeper; none without the setting `webhooks`."""

    def __init__(self, keeper: Keeper) -> None:
        """Raises SetupError if the file of hosts is invalid."""
        self._keeper, self._streams = keeper, keeper.streams
        self._clock, self._away = keeper.clock, keeper.away
        self._hosts = hosts_in(keeper.hosts) if keeper.hosts else None
        if self._hosts is not None:
            keeper.check_url, keeper.land = self.check, self.land
        self._ready = False  # there is a stream
        self._made: set[str] = set()  # hosts with a consumer of these settings
        self._due: set[str] = set()  # hosts that may have events now
        self._not_pulled = Counter[str]()  # events of this keeper that no pull has brought, by host
        self._busy = Counter[str]()  # tries that run, by host
        self._tries: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.delivered = self.failed = self.given_up = 0
        self._lists_at = 0.0  # the next list of all events, at the earliest
        self._dropped = Counter[str]()  # events that found no room, by origin
        self._dropped_us: dict[str, int] = {}

    @staticmethod
    def check_settings(settings: Settings) -> None:
        if settings.webhooks:
            hosts_in(settings.webhooks)

    def check(self, url: object) -> str:
        """`url`, if events may go there. Raises BadRequest, Unavailable."""
        target = target_of(url)
        if self._hosts is None or target.origin not in self._hosts.value:
            why = f"{target.origin:.300} is not among the hosts that this fleet calls (setting `webhooks`)"
            raise BadRequest(f"`webhook`: {why}", param="webhook")
        if not self._ready:
            raise Unavailable("the stream of webhooks is not made yet: try again", retry_after_ms=1_000)
        return str(url)

    async def land(self, hook: Hook, reply: str) -> None:
        """Store the event of a record, then ack the delivery of its request."""
        try:
            await self._store(hook)
        except HeadraceError as error:
            self._away.warning("webhooks wait: %s", error.message)
            self._streams.nak(reply, AGAIN_US)
        else:
            self._streams.ack(reply)

    async def _store(self, hook: Hook) -> None:
        part = subjects.batch_part(hook.tenant, hook.id, "end")
        end = part if hook.kind == BATCH else subjects.record(hook.tenant, hook.id)
        data = await self._streams.last(subjects.RECORD_STREAM, end)
        record = bodies.decode(bodies.Ended, data) if data is not None else {"status": DELETED}
        if record["status"] == DELETED:
            return  # by its tenant, or it was kept for its time
        event, key = event_of(hook, record), target_of(hook.url).key
        message: bodies.HookMessage = {"url": hook.url, "body": bodies.encode(event).decode()}
        with contextlib.suppress(Taken):  # by a keeper that died before its ack
            await self._streams.create(subjects.hook(key, hook.tenant, event["id"]), bodies.encode(message))
            self._not_pulled[key] += 1
        self._turn(key)

    @property
    def counted(self) -> Counted:
        return {
            KeeperCounter.HOOKS: self.delivered,
            KeeperCounter.HOOKS_FAILED: self.failed,
            KeeperCounter.HOOKS_GIVEN_UP: self.given_up,
            KeeperCounter.HOOKS_DROPPED: self._dropped.total(),
        }

    def status(self) -> Mapping[str, object]:
        """The events that found no room, by origin, of hosts that have lost one within REMOVED_S."""
        since_us = self._clock.now_us() - REMOVED_S * 1_000_000
        lost = {origin: self._dropped[origin] for origin, at in self._dropped_us.items() if at > since_us}
        return {"webhooks_dropped": lost}

    # ---- room for all ----------------------------------------------------------------------------

    async def _cut(self, origins: Mapping[str, str]) -> None:
        """Drop the oldest events of each host and tenant with more than an equal share of half the stream, if
        more than that is full: a host that is down leaves room for the events of others. Shares are counted
        from what waits in the stream, whichever keeper has stored it. `origins`: by key."""
        now = asyncio.get_running_loop().time
        try:
            room = await self._streams.room_for(subjects.HOOK_STREAM)
            if not room or (began := now()) < self._lists_at:
                return
            names = await self._streams.subjects_like(subjects.HOOK_STREAM, subjects.HOOK_ALL)
            waiting = Counter(name.rpartition(".")[0] for name in names)  # by host and tenant
            self._lists_at = now() + LIST_PART * (now() - began)
            share = max(room // max(len(waiting), 1), 1)
            for each in [each for each, count in waiting.items() if count > share]:
                key = each.split(".")[3]
                origin = origins.get(key, key)
                if count := await self._streams.purge(subjects.HOOK_STREAM, f"{each}.*", keep=share):
                    self._dropped[origin] += count
                    self._dropped_us[origin] = self._clock.now_us()
                    self._away.warning("%d events for %s are dropped: too many wait for it", count, origin)
        except HeadraceError as error:
            self._away.warning("no room is made for webhooks: %s", error.message)

    # ---- from the stream to the hosts ------------------------------------------------------------

    def loops(self) -> Iterable[Coroutine[Any, Any, None]]:
        return () if self._hosts is None else (self._run(self._hosts),)

    async def _run(self, hosts: WatchedFile[dict[str, Secrets]]) -> None:
        """Send events for ever."""
        config = {**STREAM, "num_replicas": self._keeper.replicas}
        while True:
            try:
                await self._streams.make_stream(subjects.HOOK_STREAM, config)
                self._ready = True
                await self._send(hosts)
            except HeadraceError as error:
                self._away.warning("webhooks wait: %s", error.message)
                await asyncio.sleep(OPEN_AGAIN_S)

    async def _send(self, hosts: WatchedFile[dict[str, Secrets]]) -> None:
        """Pull and send until an error. Raises Unavailable."""
        puller = await Puller.open(self._streams.bus, self._deliver, self._not_pulled)
        looks_at = 0.0
        try:
            while True:
                now = asyncio.get_running_loop().time()
                if now >= looks_at:
                    looks_at = now + EVENTS_POLL_S
                    hosts.refresh()
                    origins = {target_of(origin).key: origin for origin in hosts.value}
                    await self._cut(origins)
                    self._due |= origins.keys()
                self._wake.clear()
                for key in [*self._due]:
                    if (room := TRIES_OF_HOST - self._busy[key]) > 0:
                        await self._pull(puller, key, room)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(looks_at):
                        await self._wake.wait()
        finally:
            await puller.close()

    async def _pull(self, puller: Puller, key: str, room: int) -> None:
        self._due.discard(key)
        if key not in self._made:
            config = {**CONSUMER, "filter_subject": subjects.hooks_of(key)}
            await self._streams.make_consumer(subjects.HOOK_STREAM, key, config)
            self._made.add(key)
        came = await puller.pull(subjects.HOOK_STREAM, key, room)
        if came is None:  # it may be gone; its next turn is that of the next look
            self._made.discard(key)
        elif came == room or self._not_pulled[key]:
            self._turn(key)

    def _turn(self, key: str) -> None:
        self._due.add(key)
        self._wake.set()

    def _deliver(self, delivery: Delivery) -> None:
        key = delivery.subject.split(".")[3]
        self._busy[key] += 1
        task = asyncio.get_running_loop().create_task(self._try(delivery))
        self._tries.add(task)

        def on_ended(task: asyncio.Task[None]) -> None:
            self._tries.discard(task)
            self._busy[key] -= 1
            self._wake.set()

        task.add_done_callback(on_ended)

    async def _try(self, delivery: Delivery) -> None:
        origin, why, event = "", "", delivery.subject.rpartition(".")[2]
        try:
            message = bodies.decode(bodies.HookMessage, delivery.data)
            target = target_of(message["url"])
            origin = target.origin
            if self._hosts is None or (secrets := self._hosts.value.get(origin)) is None:
                raise BadRequest("it is listed no more")
            body = message["body"].encode()
            now_s = self._clock.wall_us() // 1_000_000
            status = await post(target, signed(event, now_s, body, secrets), body)
            why = f"it answers {status}"
        except asyncio.CancelledError:
            self._streams.nak(delivery.reply, 0)
            raise
        except TimeoutError:
            status, why = 0, f"no answer within {TRY_S:g} s"
        except (HeadraceError, OSError, EOFError, ValueError, LookupError) as error:
            status, why = 0, f"{error!s:.200}" or type(error).__name__
        tries = deliveries(delivery.reply)
        delay = None if status == GONE else delay_us(tries, random.random())
        if 200 <= status < 300:
            self.delivered += 1
            self._streams.ack(delivery.reply)
        elif delay is None:
            self.given_up += 1
            self._streams.ack(delivery.reply)
            log.warning("event %s for %s is given up at try %d: %s", event, origin, tries, why)
        else:
            self.failed += 1
            self._streams.nak(delivery.reply, delay)
            self._away.warning("event %s for %s is tried again: %s", event, origin, why)

    async def drain(self) -> None:
        """End the tries that run: the events are delivered again to another keeper."""
        for task in self._tries:
            task.cancel()
        await asyncio.gather(*self._tries, return_exceptions=True)


async def post(target: Target, headers: Mapping[str, str], body: bytes) -> int:
    """Send one POST on a new connection; returns the status, and reads no more of the answer. Redirects are
    not followed. Raises TimeoutError, OSError, EOFError, ValueError."""
    lines = {
        "Host": target.authority,
        "User-Agent": "Headrace",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    async with asyncio.timeout(TRY_S):
        tls = _tls() if target.scheme == "https" else None
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=tls, limit=MAX_LINE)
        try:
            writer.write(f"POST {target.path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            await writer.drain()
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError:
                line = b""
            if (found := _STATUS.match(line)) is None:
                raise ValueError("it does not answer in HTTP/1.1")
            return int(found[1])
        finally:
            writer.transport.abort()


@cache
def _tls() -> ssl.SSLContext:
    """The system's certificates; reading them takes some milliseconds."""
    return ssl.create_default_context()
