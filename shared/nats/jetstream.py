"""JetStream over `Bus`: streams, create-only publishes, direct reads, pulls and acks.

Each call is one request with a time limit of its own and a typed error: nats-py's JetStream context runs its
calls on the connection that `NatsBus` reads by itself. Formats: nats-architecture-and-design ADR-1 (API),
ADR-13 (pull), ADR-31 (direct get); headers of a publish: https://docs.nats.io/nats-concepts/jetstream/headers
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.clock import Clock, SystemClock
from shared.errors import DuplicateRequest, EngineError, HeadraceError, Overloaded, Unavailable
from shared.nats.interface import Bus, Delivery, NoResponders, RequestTimeout, Subscription

CALL_US = 1_000_000  # a call takes less than a millisecond; one made while the server is away never ends
LIST_US = 6_000_000  # a cluster waits 4 s for a consumer without a leader, and then lists the others
SEEN_US = 50_000  # within which a consumer has a message that is stored: after 0.4 ms, on a busy server more
FULL_RETRY_MS = 5_000  # a full stream has room again once answers have been stored

_API = "$JS.API"
_EXISTS, _BEING_STORED = 10071, 10164  # another message has the subject; in a cluster, it may soon
_FULL = (10005, 10047, 10077)  # of a cluster, of a server: too little storage; of a stream: too many messages
_NAME_IN_USE = 10058  # a stream of this name with other settings
_NO_STREAM, _NO_CONSUMER, _NO_MESSAGE = 10059, 10014, 10037

REMOVED_S = 3_600  # for so long it is a fact that a stream was removed

Json = dict[str, Any]
log = logging.getLogger("headrace.nats")


class Taken(DuplicateRequest):
    """A create-only publish to a subject that has a message."""


class NothingStored(Unavailable):
    """JetStream is off, or has no stream of this name."""


class UnknownStream(NothingStored):
    """There is no stream of this name."""


class NoMessage(EngineError):
    """A subject has no message."""


class UnknownConsumer(EngineError):
    """There is no consumer of this name."""


class StreamFull(Overloaded):
    """The stream or its disk is full."""


@dataclass(slots=True)
class Unwritten:
    """The kinds of writes that JetStream has refused, or not answered, since it took one. A nats-server with
    a full disk answers reads all the same."""

    clock: Clock = field(default_factory=SystemClock)
    _found: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # first and last failure; why
    _cleared: int = 0

    def clear(self) -> None:
        """The server was started again: what failed before means nothing now."""
        self._found.clear()
        self._cleared += 1

    def facts(self) -> dict[str, Json]:
        """For how long, since when not tried again, and why: by the kind."""
        now_us = self.clock.now_us()
        return {
            kind: {"for_s": (now_us - first) / 1e6, "tried_ago_s": (now_us - last) / 1e6, "why": why}
            for kind, (first, last, why) in self._found.items()
        }

    @contextlib.contextmanager
    def watch(self, subject: str) -> Iterator[None]:
        """A write to `subject`: how it ends is noted."""
        kind, cleared = ".".join(subject.split(".")[:3]), self._cleared  # headrace.store.work, without names
        try:
            yield
        except UnknownStream:  # it is yet to be made
            raise
        except (Unavailable, StreamFull, EngineError) as error:
            if cleared == self._cleared:
                now_us = self.clock.now_us()
                first_us = self._found[kind][0] if kind in self._found else now_us
                self._found[kind] = first_us, now_us, error.message
            raise
        except Taken:  # perhaps by an earlier try whose answer was lost
            self._found.pop(kind, None)
            raise
        self._found.pop(kind, None)


@dataclass(slots=True)
class Made:
    """The streams that this process has made or found, and those of them that were removed since."""

    clock: Clock = field(default_factory=SystemClock)
    lacking: asyncio.Event = field(default_factory=asyncio.Event)  # set by a call that found no stream
    _known: set[str] = field(default_factory=set)
    _removed_us: dict[str, int] = field(default_factory=dict)

    def on_found(self, name: str) -> None:
        """There is a stream of this name."""
        self._known.add(name)

    def was_found(self, name: str) -> bool:
        """True if there was a stream of this name."""
        return name in self._known

    def on_missing(self, name: str) -> None:
        """There is none, and it is made now."""
        if name in self._known:
            log.error("stream %s was removed, with all that it held: it is made again", name)
            self._removed_us[name] = self.clock.now_us()

    def facts(self) -> dict[str, float]:
        """How many seconds ago streams were found to be removed, by name."""
        now_us = self.clock.now_us()
        ago_s = {name: (now_us - at_us) / 1e6 for name, at_us in self._removed_us.items()}
        return {name: ago for name, ago in ago_s.items() if ago < REMOVED_S}


@dataclass(frozen=True, slots=True)
class JetStream:
    """The calls. All raise Unavailable if JetStream is off, or does not answer within CALL_US."""

    bus: Bus
    replicated: bool = False  # streams have replicas
    unwritten: Unwritten = field(default_factory=Unwritten)
    made: Made = field(default_factory=Made)

    async def make_stream(self, name: str, config: Mapping[str, Any]) -> bool:
        """Make a stream unless there is one of this name, whose settings then stay; True if it was made.
        Raises StreamFull if the server has no room for it."""
        made = False
        try:
            await self._call(f"{_API}.STREAM.INFO.{name}", b"")
        except UnknownStream:  # made again, it would need its space on disk a second time
            self.made.on_missing(name)
            with contextlib.suppress(Taken):  # by another service
                await self._call(f"{_API}.STREAM.CREATE.{name}", _json({"name": name, **config}))
                made = True
        self.made.on_found(name)
        return made

    async def make_consumer(self, stream: str, name: str, config: Mapping[str, Any]) -> None:
        """Make a durable pull consumer, or give one of this name these settings."""
        body = {"stream_name": stream, "config": {"durable_name": name, "name": name, **config}}
        below = f".{config['filter_subject']}" if "filter_subject" in config else ""
        subject = f"{_API}.CONSUMER.CREATE.{stream}.{name}{below}"
        with self.unwritten.watch(subject):
            await self._call(subject, _json(body))

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer, if there is one of this name."""
        with contextlib.suppress(UnknownConsumer):
            await self._call(f"{_API}.CONSUMER.DELETE.{stream}.{name}", b"")

    async def consumers(self, stream: str) -> list[Json]:
        """The state of each consumer of a stream (`ConsumerInfo` of ADR-1)."""
        found: list[Json] = []
        while True:
            body = _json({"offset": len(found)})
            limit_us = LIST_US if self.replicated else CALL_US
            page = await self._call(f"{_API}.CONSUMER.LIST.{stream}", body, timeout_us=limit_us)
            found += page["consumers"] or ()
            if not page["consumers"] or len(found) >= page["total"]:
                return found

    async def room(self, stream: str) -> tuple[int, int]:
        """The bytes that a stream has, and the most that it may have; -1: no limit."""
        info = await self._call(f"{_API}.STREAM.INFO.{stream}", b"")
        return int(info["state"]["bytes"]), int(info["config"]["max_bytes"])

    async def can_read(self, stream: str) -> bool:
        """Whether a stream, which in a cluster has a leader then, answers reads."""
        with contextlib.suppress(Unavailable, UnknownStream):
            return bool(await self.room(stream))
        return False

    async def create(self, subject: str, data: bytes, ttl_s: int = 0, only: str = "") -> None:
        """Store a message, the only one of its subject, or of the pattern `only`. It goes after `ttl_s`; 0:
        never. Returns when the stream has it. Raises Taken if there is one, StreamFull, PayloadTooLarge."""
        headers = {"Nats-Expected-Last-Subject-Sequence": "0", **_lifetime(ttl_s)}
        if only:
            headers["Nats-Expected-Last-Subject-Sequence-Subject"] = only
        with self.unwritten.watch(subject):
            await self._call(subject, data, headers)

    async def replace(self, subject: str, data: bytes, ttl_s: int = 0) -> None:
        """Store a message; a stream with one message for each subject drops the one before. Raises like
        `create`."""
        with self.unwritten.watch(subject):
            await self._call(subject, data, _lifetime(ttl_s))

    async def purge(self, stream: str, subject: str, keep: int = 0) -> int:
        """Remove the messages of a subject or pattern, but for the newest `keep`; returns how many."""
        asked = {"filter": subject, **({"keep": keep} if keep else {})}
        return int((await self._call(f"{_API}.STREAM.PURGE.{stream}", _json(asked)))["purged"])

    async def subjects_like(self, stream: str, pattern: str) -> list[str]:
        """The subjects that match a pattern and have a message."""
        found, most = list[str](), 1
        while len(found) < most:
            asked = {"subjects_filter": pattern, "offset": len(found)}
            answer = await self._info(stream, asked)
            page, most = answer["state"].get("subjects") or {}, int(answer.get("total", 0))
            if not page:
                break
            found += page
        return found

    async def bytes_of(self, stream: str) -> int:
        """What a stream holds."""
        return int((await self._info(stream, {}))["state"]["bytes"])

    async def room_for(self, stream: str) -> int:
        """How many messages of the mean size half of a stream holds, if it holds more bytes than that; else
        0."""
        info = await self._info(stream, {})
        held, half = info["state"], int(info["config"]["max_bytes"]) // 2
        return half * int(held["messages"]) // int(held["bytes"]) if held["bytes"] > half else 0

    async def _info(self, stream: str, asked: Mapping[str, Any]) -> Json:
        try:
            return await self._call(f"{_API}.STREAM.INFO.{stream}", _json(asked))
        except UnknownStream:
            self.made.lacking.set()
            raise NothingStored(f"there is no stream {stream} now: try again", retry_after_ms=1_000) from None

    async def last(self, stream: str, subject: str, *, sure: bool = True) -> bytes | None:
        """The newest message of a subject, None without one. The stream must allow direct reads, which any
        replica answers, and any mirror that an operator has made: a mirror keeps what the stream has removed,
        and may not have its newest messages. So only the leader knows that there is none; not `sure`: a
        caller that loses nothing by a wrong None saves the second call."""
        answer = await self._request(f"{_API}.DIRECT.GET.{stream}.{subject}", b"")
        status = answer.headers.get("Status")
        if status == "404":  # without the name of the stream that lacks it
            return await self._last_at_leader(stream, subject) if sure or self.replicated else None
        if status is not None:
            raise EngineError(f"stream {stream}: {status} {answer.headers.get('Description', '')}")
        if answer.headers.get("Nats-Stream") != stream:
            return await self._last_at_leader(stream, subject)
        return answer.data

    async def _last_at_leader(self, stream: str, subject: str) -> bytes | None:
        try:
            answer = await self._call(f"{_API}.STREAM.MSG.GET.{stream}", _json({"last_by_subj": subject}))
        except NoMessage:
            return None
        return b64decode(answer["message"].get("data", ""))

    async def _call(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        timeout_us: int = CALL_US,
    ) -> Json:
        answer: Json = json.loads((await self._request(subject, data, headers, timeout_us)).data)
        if "error" in answer:
            error = _error(subject, answer["error"])
            if isinstance(error, UnknownStream):
                self.made.lacking.set()
            raise error
        return answer

    async def _request(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        timeout_us: int = CALL_US,
    ) -> Delivery:
        try:
            return await self.bus.request(subject, data, timeout_us=timeout_us, headers=headers)
        except NoResponders:
            self.made.lacking.set()
            kind = ".".join(subject.split(".")[:3])  # without names
            why = "the nats-server has no JetStream"
            if (direct := f"{_API}.DIRECT.GET.") in subject:
                why = f"there is no stream {subject.removeprefix(direct).split('.')[0]} now, or {why}"
            elif not subject.startswith(f"{_API}."):
                why = f"there is no stream of {kind} now, or {why}"
            raise NothingStored(f"{why}: see docs/durability.md", retry_after_ms=1_000) from None
        except RequestTimeout:
            why = f"JetStream has not answered on {subject} within {timeout_us / 1e6:g} s: try again"
        raise Unavailable(why, retry_after_ms=1_000)

    # ---- acks: a lost one brings a redelivery ----------------------------------------------------

    def ack(self, reply: str) -> None:
        """Remove a delivered message, by its reply subject."""
        self.bus.publish(reply, b"+ACK")

    def nak(self, reply: str, delay_us: int) -> None:
        """Have a message delivered again after a delay."""
        self.bus.publish(reply, b"-NAK " + _json({"delay": delay_us * 1_000}))

    def progress(self, reply: str) -> None:
        """Restart the time within which a message must be acked."""
        self.bus.publish(reply, b"+WPI")


class Puller:
    """Pulls from the consumers of work queues, one pull at a time; each message goes to `deliver`. Open with
    `await Puller.open(...)`."""

    def __init__(self, bus: Bus, deliver: Callable[[Delivery], None], stored: Counter[str]) -> None:
        self._bus, self._deliver, self._stored = bus, deliver, stored
        self._inbox = ""
        self._number = 0  # of the current pull
        self._came, self._most = 0, 0
        self._confirmed = False
        self._ended = asyncio.Event()
        self._subscription: Subscription

    @classmethod
    async def open(
        cls, bus: Bus, deliver: Callable[[Delivery], None], stored: Counter[str] | None = None
    ) -> Puller:
        """A puller whose inbox the server knows. `stored`: how many messages of each consumer are stored, as
        the caller knows, and not pulled; `pull` takes away what it brings."""
        puller = cls(bus, deliver, Counter() if stored is None else stored)
        await puller._listen()
        await bus.flush()
        return puller

    async def _listen(self) -> None:
        self._inbox = self._bus.new_inbox()
        self._subscription = await self._bus.subscribe(f"{self._inbox}.*", self._on_message)

    async def close(self) -> None:
        """Take no more messages: what still comes is delivered again to others."""
        await self._subscription.cancel()

    async def pull(self, stream: str, consumer: str, most: int) -> int | None:
        """Have up to `most` of the waiting messages delivered. Returns their number; None if neither a
        message nor the end of the pull arrived: the consumer may be gone. Or it waits for acks: then the
        server keeps the pull, also one without a wait, until nothing listens at its inbox.

        The server answers for a message that it stores before its consumer knows of it: a pull of a consumer
        with `stored` messages waits for the first one, up to SEEN_US. Then another reader has them."""
        self._number, self._came, self._most, self._confirmed = self._number + 1, 0, most, False
        self._ended.clear()
        stored = self._stored[consumer]
        wait = {"expires": SEEN_US * 1_000} if stored > 0 else {}
        asked = _json({"batch": most, "no_wait": True, **wait})
        subject = f"{_API}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._bus.publish(subject, asked, reply=f"{self._inbox}.{self._number}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CALL_US / 1e6):  # wait_for of Python 3.11 may lose a cancellation
                await self._ended.wait()
        if not self._ended.is_set():  # what came late would be more than the next pull asks for
            await self._subscription.drain()
            await self._listen()
        if not self._confirmed:
            return None
        self._stored[consumer] -= self._came or stored  # what was stored meanwhile has not been waited for
        if self._stored[consumer] <= 0:
            del self._stored[consumer]
        return self._came

    def _on_message(self, delivery: Delivery) -> None:
        """A message, also of an earlier pull, or the end of the pull, which has a status. A message has the
        subject under which it was stored: the number of the pull is in that of a status."""
        status = delivery.headers.get("Status")
        if status is None and delivery.reply:
            self._confirmed = True
            self._came += 1
            self._deliver(delivery)
            ended = self._came >= self._most
        else:
            ended = delivery.subject == f"{self._inbox}.{self._number}"
            self._confirmed |= ended and status in ("404", "408", "409")  # 503: no such consumer
        if ended:
            self._ended.set()


def deliveries(reply: str) -> int:
    """How often a message was delivered, from its reply subject:
    `$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<deliveries>.<stream seq>.…`, of 9 or 11 and more
    tokens (ADR-15)."""
    tokens = reply.split(".")
    return int(tokens[4 if len(tokens) == 9 else 6])


def stored_us(reply: str) -> int:
    """When the server stored a delivered message, by its own wall clock, from the reply subject."""
    tokens = reply.split(".")
    return int(tokens[7 if len(tokens) == 9 else 9]) // 1_000


def _error(subject: str, error: Mapping[str, Any]) -> HeadraceError:
    number, text = int(error.get("err_code", 0)), str(error.get("description", ""))
    if number in (_EXISTS, _NAME_IN_USE):
        return Taken(text)
    if number == _NO_STREAM:
        why = f"{text}, on {subject}: a keeper makes the streams of Headrace again"
        return UnknownStream(why, retry_after_ms=1_000)
    if number == _NO_MESSAGE:
        return NoMessage(text)
    if number == _NO_CONSUMER:
        return UnknownConsumer(text)
    if number in _FULL:
        why = f"the store of durable requests is full ({text}): try again later"
        return StreamFull(why, retry_after_ms=FULL_RETRY_MS)
    if number == _BEING_STORED:
        return Unavailable("JetStream is still storing an earlier try: try again", retry_after_ms=1_000)
    if int(error.get("code", 0)) == Unavailable.code:
        return Unavailable(f"JetStream: {text}", retry_after_ms=1_000)
    return EngineError(f"JetStream refuses {subject}: {text} ({number})")


def _lifetime(ttl_s: int) -> Json:
    return {"Nats-TTL": f"{ttl_s}s"} if ttl_s else {}


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()
