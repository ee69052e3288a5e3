"""`Client` is the client's side of the native API: requests, streams, cancels.

The gateway, the command line and benches use it. One wildcard inbox serves all requests of a client; with
users of `headrace auth` it contains the tenant's name (shared/nats/access.py). Frame numbers are checked: a
missing one is an error, and a stream that starts over (its detokenizer died) begins with `accepted` again.
Unread frames are bounded: the request of a slow reader ends, and delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from array import array
from base64 import b64decode
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shared import errors
from shared.bodies import parse_frame
from shared.client.follow import ENDED, RESUME_S, AttachAgain, Followed, Patience
from shared.clock import TIMER_S, timer_s
from shared.messages import Floats
from shared.nats import access, subjects
from shared.nats.interface import Bus, BusFault, Delivery, NoResponders, RequestTimeout

END_HEADER = "Headrace-End"
DEFAULT_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 10.0  # of `Client.request`
PROBE_TIMEOUT_S = 60.0
PROBE = {"messages": [{"role": "user", "content": "Hello"}]}
AGAIN_S, TIMES_AGAIN = 1.0, 4  # resends of a request without a reply, after a reconnect or without services
SILENCE_S = 3.0  # of a followed request; then its detokenizer may be dead
STATE_S = 2.0  # for a keeper's answer
MOST_INBOXES = 8  # of one reader: late answers to its attaches are still read
ACCEPTED_S = 0.5  # after which a stream without text is quiet, the first time
QUIET = "quiet"  # type of a frame that this client adds: the request is accepted, and nothing has come
MAX_TIMER_S = 86_400.0  # a timer runs no longer: a limit may be infinite
GAP_S = 3.0  # for a stream with a missing frame to start over, as streams do after an outage of the broker

MAX_UNREAD_BYTES = 2_097_152  # of one request: some 10,000 frames, a hundred seconds of a fast stream
MAX_TENANT_BYTES = 67_108_864  # of all requests of a tenant; above, those with more than their share end

_CUT = "the connection to the nats-server was cut, and the answer did not continue: send it again"

OTHER_VERSION_MS = 1_000  # while a fleet is updated, the next try may meet other services

LEAVE = b'{"leave":true}'  # body of an attach: its reader wants no more

Body = dict[str, Any]


class NoAnswer(errors.DeadlineExceeded):
    """The client's own time limit passed without a message from the service."""


class MissingFrame(errors.EngineError):
    """A frame is missing, and the stream did not start over."""


class SlowReader(errors.HeadraceError):
    """Too many unread frames: the request was ended."""

    code, type = 408, "slow_reader"


@dataclass(slots=True)
class UnreadTotal:
    """The unread frames of one tenant."""

    streams: int = 0
    size: int = 0  # bytes


@dataclass(slots=True)
class Client:
    """Sends requests over one bus connection. Build with `await Client.open(bus)`."""

    bus: Bus
    tenant: str = subjects.DEFAULT_TENANT
    _own: str = ""  # a fresh inbox of the connection
    awaited: Callable[[], bool] = lambda: False  # services are to come: requests without one are sent again
    _served: set[str] = field(default_factory=set)  # models with services when a request was last answered
    _waiting: dict[str, UnreadFrames] = field(default_factory=dict)  # by reply subject
    _unread_totals: dict[str, UnreadTotal] = field(default_factory=dict)  # by tenant

    @classmethod
    async def open(cls, bus: Bus, tenant: str = subjects.DEFAULT_TENANT) -> Client:
        """A client on `bus`. The caller drains the bus."""
        client = cls(bus, tenant, bus.new_inbox())
        bus.on_fault(client._on_fault)
        await bus.subscribe(f"{access.reply_inbox(bus.user, '*', client._own)}.*", client._on_reply)
        await bus.flush()  # the server has the subscription before the first reply
        return client

    def as_tenant(self, tenant: str) -> Client:
        """The same client for another tenant."""
        return replace(self, tenant=tenant)

    async def complete(
        self, body: Mapping[str, Any], *, timeout_s: float = DEFAULT_TIMEOUT_S, trace: str = ""
    ) -> Body:
        """The whole answer, OpenAI-shaped. Raises the service's error, Unavailable if no service has the
        model (one that this client has had answers from: for TIMES_AGAIN seconds), NoAnswer after
        `timeout_s`."""
        async with contextlib.aclosing(
            self._exchange({**body, "stream": False}, timeout_s, trace)
        ) as replies:
            async for reply in replies:
                if "input" in body and "embedding" not in reply:
                    raise errors.Unavailable(errors.NO_VECTOR, retry_after_ms=OTHER_VERSION_MS)
                return reply
        raise errors.EngineError("the service ended the request without an answer")

    async def embed(self, body: Mapping[str, Any], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Floats:
        """The vector of the `input` in `body`. Raises like `complete`."""
        found = await self.complete({**body, "encoding_format": "base64"}, timeout_s=timeout_s)
        return array("f", b64decode(found["embedding"]))

    def stream(
        self,
        body: Mapping[str, Any],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        trace: str = "",
        quiet_s: float = math.inf,
    ) -> AsyncGenerator[Body]:
        """The frames of an answer: accepted, delta…, done. `timeout_s` limits the wait for each. A frame
        QUIET comes ACCEPTED_S after `accepted` if no other one does, then after each `quiet_s` without
        one.

        Raises like `complete`, and MissingFrame, SlowReader. Closing the generator early (`aclose`,
        cancellation) cancels the request, unless it has `finish_detached`.
        """
        return self._exchange({**body, "stream": True}, timeout_s, trace, quiet_s)

    async def follow(
        self, request_id: str, start: Mapping[int, str] | None = None, *, quiet: bool = False
    ) -> AsyncGenerator[Body]:
        """The frames of any request of this tenant, for a reader that has the text `start` of each choice:
        accepted, delta…, done, as of `stream`; each choice of a delta has `at`, the characters of the choice
        before it. A durable request may wait, run, or have ended; any other must run. The reader survives the
        deaths of services, of the broker, and of all of them. When the text starts over, `accepted` comes
        again with a higher `attempt` (with `start`, the first one has 1 if the text goes on): drop what you
        have. With `quiet` a frame QUIET comes after each silence of some seconds.

        Closing the generator early leaves the request alone. Raises the request's error; Moved, if another
        reader follows it; UnknownRequest; Unavailable, if the fleet is gone for follow.LOST_S.
        """
        loop = asyncio.get_running_loop()
        place, patience = Followed(request_id, start or {}), Patience(loop.time())
        total = self._unread_totals.setdefault(self.tenant, UnreadTotal())
        replies, inboxes = UnreadFrames(lambda: None, total), deque[str]()
        try:
            while True:
                state = await self._state(request_id)
                if state.get("status") in ENDED:
                    for stored in _of_record(place, state):
                        yield stored
                    return
                if replies.failure is not None:  # a slow reader: it gets the rest at once
                    replies.close()
                    replies = UnreadFrames(lambda: None, total)
                    self._waiting.update(dict.fromkeys(inboxes, replies))
                self._attach(place, replies, inboxes)
                try:
                    while not place.ended:
                        wait_s = SILENCE_S if place.was_answered else patience.pause_s
                        if (new := await self._next(place, replies, wait_s)) is not None:
                            patience.frame_came(loop.time())
                            yield new
                    return
                except TimeoutError:
                    if place.was_answered:
                        patience.on_known(loop.time())
                except (AttachAgain, SlowReader):
                    patience.on_known(loop.time())
                    await asyncio.sleep(patience.pause_s)
                if not place.was_answered and patience.is_over(state, loop.time()):
                    raise _lost(request_id, state)
                if quiet:
                    yield {"type": QUIET}
        finally:
            for inbox in inboxes:
                self._waiting.pop(inbox, None)
            replies.close()
            if not total.streams:
                self._unread_totals.pop(self.tenant, None)
            if inboxes and not place.ended:
                self.bus.publish(subjects.attach(self.tenant, request_id), LEAVE, reply=inboxes[-1])

    def _attach(self, place: Followed, replies: UnreadFrames, inboxes: deque[str]) -> None:
        """Ask for the frames in a fresh inbox: what comes in an older one may be of an older attach."""
        inboxes.append(inbox := self._new_reply())
        self._waiting[inbox] = replies
        if len(inboxes) > MOST_INBOXES:
            del self._waiting[inboxes.popleft()]
        replies.lasting = True
        subject = subjects.attach(self.tenant, place.request_id)
        self.bus.publish(subject, _json(place.attach(inbox)), reply=inbox)

    async def _next(self, place: Followed, replies: UnreadFrames, wait_s: float) -> Body | None:
        """The next frame for the reader; None if the message has none for it. Raises the request's error,
        TimeoutError, AttachAgain, SlowReader."""
        delivery = await replies.get(wait_s)
        if delivery.has_no_responders:
            return None
        frame = _message(delivery, "")
        if "error" not in frame:
            return place.accept(delivery.subject, delivery.reply, frame)
        if place.can_ignore(delivery.subject, delivery.reply, frame):
            return None
        error = error_of(frame)
        if isinstance(error, errors.Overloaded) and "attempt" not in frame:
            raise AttachAgain
        place.ended = True
        raise error

    async def _state(self, request_id: str) -> Body:
        """The state of a request at its keeper, or an error; empty without a keeper."""
        try:
            return await self._asked(subjects.result(self.tenant, request_id), None, STATE_S)
        except NoResponders:
            return {}
        except RequestTimeout as error:
            return dict(errors.error_body(error))

    @property
    def waiting(self) -> int:
        """The number of running requests."""
        return len(self._waiting)

    def resend_unanswered(self, model: str) -> None:
        """Send all requests for `model` without a reply again, of any tenant: the server may have given them
        to a service that has died. A service that has such a request ignores the repetition."""
        of_model = subjects.generate_any_tenant(model).rpartition(".")[2]
        for replies in self._waiting.values():
            if not replies.count and replies.model == of_model:
                replies.send_again()

    def fail(self, error: errors.HeadraceError) -> None:
        """End all running requests; their readers get this error after the received frames."""
        for replies in self._waiting.values():
            replies.fail(error)

    def cancel(self, request_id: str) -> None:
        """Ask every service to stop working on a request of this tenant."""
        self.bus.publish(subjects.cancel(self.tenant, request_id), b"")

    async def request(self, subject: str, body: Mapping[str, Any] | None = None) -> Body:
        """The answer to a request with one reply, such as `tokenize`, for this tenant. Raises the service's
        error, NoResponders, RequestTimeout."""
        answer = await self._asked(subject, body, REQUEST_TIMEOUT_S)
        if "error" in answer:
            raise error_of(answer)
        return answer

    async def state(self, request_id: str) -> Body:
        """The state of a durable request of this tenant at its keeper, with its answer or its error. Raises
        the keeper's error, NoResponders, RequestTimeout."""
        found = await self._asked(subjects.result(self.tenant, request_id), None, REQUEST_TIMEOUT_S)
        if "status" not in found:
            raise error_of(found)
        return found

    async def _asked(self, subject: str, body: Mapping[str, Any] | None, timeout_s: float) -> Body:
        """The same with an error as it is sent."""
        return _message(await self.ask(subject, b"" if body is None else _json(body), timeout_s), "")

    async def ask(self, subject: str, data: bytes, timeout_s: float = REQUEST_TIMEOUT_S) -> Delivery:
        """The one reply to a request of bytes. Raises NoResponders, RequestTimeout."""
        reply = self._new_reply()
        replies = self._waiting[reply] = UnreadFrames(lambda: None)
        try:
            replies.send = partial(self.bus.publish, subject, data, reply=reply)
            replies.send()
            delivery = await replies.get(timeout_s)
        except TimeoutError:
            raise RequestTimeout(f"no answer on {subject} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(reply).close()
        if delivery.has_no_responders:
            raise NoResponders(f"no service answers on {subject}")
        return delivery

    async def _exchange(
        self, body: Body, timeout_s: float, trace: str, quiet_s: float = math.inf
    ) -> AsyncGenerator[Body]:
        """Send `body` and yield the messages of the reply up to the last one."""
        model = str(body.get("model", ""))
        if not model:
            raise errors.BadRequest("the request has no model: add `model`", param="model")
        request_id = str(body.setdefault("request_id", secrets.token_hex(11)))
        subject, data = self._written(model, body)
        reply, order = self._new_reply(), FrameOrder()
        total = self._unread_totals.setdefault(self.tenant, UnreadTotal())
        replies = self._waiting[reply] = UnreadFrames(lambda: self.cancel(request_id), total)
        ended, silent_s = False, 0.0
        try:
            headers = {"traceparent": trace} if trace else None
            replies.subject = subject
            replies.resends = TIMES_AGAIN if replies.model in self._served else 0
            replies.send = partial(self.bus.publish, subject, data, reply=reply, headers=headers)
            replies.send()
            while not ended:
                most_s = timeout_s if order.gap is None else min(timeout_s, GAP_S)
                first = order.frame == 1 and not silent_s
                wait_s = min(
                    most_s - silent_s, min(quiet_s, ACCEPTED_S) if first and quiet_s < math.inf else quiet_s
                )
                try:
                    delivery = await replies.get(wait_s)
                except TimeoutError:
                    silent_s += wait_s
                    if silent_s >= most_s:
                        if replies.unserved and not replies.count:
                            raise _no_service(model) from None
                        raise order.gap or _no_answer(request_id, timeout_s) from None
                    if order.frame:
                        yield {"type": QUIET}
                    continue
                silent_s = 0.0
                ended = True  # an error, or the last message: nothing is left to cancel
                message = _message(delivery, model)
                if "error" in message and not (body["stream"] and order.is_outdated(message)):
                    raise error_of(message)
                ended = not body["stream"]
                if ended or order.accept(message):
                    if ended or order.frame == 1:
                        self._served.add(replies.model)
                    ended = ended or END_HEADER in delivery.headers
                    yield message
        finally:
            self._waiting.pop(reply).close()
            if not total.streams:
                self._unread_totals.pop(self.tenant, None)
            if not ended and body.get("finish_detached") is not True:
                self.cancel(request_id)

    def _new_reply(self) -> str:
        """A reply subject that other clients cannot guess."""
        inbox = access.reply_inbox(self.bus.user, subjects.token(self.tenant), self._own)
        return f"{inbox}.{secrets.token_hex(8)}"

    def _written(self, model: str, body: Body) -> tuple[str, bytes]:
        data = _json(body)
        try:
            return subjects.generate(self.tenant, model), data
        except UnicodeEncodeError:
            raise _unwritable("holds a lone surrogate") from None

    def _on_fault(self, fault: BusFault) -> None:
        """After a reconnect: end streams that stay silent for RESUME_S, and send requests without a reply
        again. During the cut the server returned 503s to the services, which have stopped these streams; a
        request may be lost, and a service that has it ignores the repetition."""
        if fault.kind == "reconnected":
            loop = asyncio.get_running_loop()
            waiting = self._waiting.items()
            running = {reply: each.count for reply, each in waiting if each.count > 1 and not each.lasting}
            loop.call_later(RESUME_S, self._end_silent, running)
            for reply, each in self._waiting.items():
                if not each.count:
                    each.resends = TIMES_AGAIN
                    loop.call_later(AGAIN_S, self._send_again, reply)

    def _send_again(self, reply: str) -> None:
        replies = self._waiting.get(reply)
        if replies is not None and not replies.count:
            replies.resends -= bool(replies.resends)
            replies.unserved = False
            replies.send_again()

    def _end_silent(self, counts: Mapping[str, int]) -> None:
        for reply, count in counts.items():
            replies = self._waiting.get(reply)
            if replies is not None and replies.count == count:
                replies.fail(errors.Unavailable(_CUT))

    def _on_reply(self, delivery: Delivery) -> None:
        replies = self._waiting.get(delivery.subject)
        if replies is None:
            return
        if delivery.has_no_responders:
            if replies.resends or self.awaited():  # its services may not be back yet
                replies.unserved = True
                asyncio.get_running_loop().call_later(AGAIN_S, self._send_again, delivery.subject)
                return
            self._served.discard(replies.model)
        replies.put(delivery)


@dataclass(slots=True)
class FrameOrder:
    """Checks the frame numbers of one stream. After a missing frame it drops all frames until the stream
    starts over, as streams do after an outage of the broker."""

    attempt: int = -1
    frame: int = 0  # the next one
    gap: MissingFrame | None = None

    def is_outdated(self, frame: Mapping[str, Any]) -> bool:
        """True for a frame or an error of an earlier attempt, from a detokenizer that was replaced."""
        attempt = frame.get("attempt")
        return isinstance(attempt, int) and attempt < self.attempt

    def accept(self, frame: Mapping[str, Any]) -> bool:
        """True if this is the next frame; a new attempt starts at 0 again."""
        # the usual frame, on the path of every chunk
        if frame["frame"] == self.frame > 0 and frame["attempt"] == self.attempt and self.gap is None:
            self.frame += 1
            return True
        if self.is_outdated(frame):
            return False
        attempt, number = int(frame["attempt"]), int(frame["frame"])
        starts_over = attempt > self.attempt or (number == 0 and frame["type"] == "accepted")
        expected = 0 if starts_over else self.frame
        if number != expected:
            self.gap = self.gap or MissingFrame(
                f"frame {expected} of request {frame.get('request_id')} is missing (frame {number} arrived): "
                "the reader was too slow or the connection broke; send it again"
            )
        elif starts_over:
            self.gap = None
        if self.gap is None:
            self.attempt, self.frame = attempt, number + 1
        return self.gap is None


async def probe(client: Client, model: str) -> str:
    """Send a request like a user's, a chat without `max_tokens`, and cancel it at the first text; a model
    without a chat template gets a completion, an encoder a text for a vector. Returns the field with which
    it answers (messages, prompt, input) when an answer has started. Its tenant is PROBE_TENANT. Raises like
    `Client.stream`."""
    client = client.as_tenant(subjects.PROBE_TENANT)
    try:
        await _begin_and_cancel(client, {"model": model, **PROBE, "temperature": 0})
    except errors.BadRequest as error:
        if error.message != errors.NO_TEMPLATE:
            raise
    else:
        return "messages"
    try:
        await _begin_and_cancel(client, {"model": model, "prompt": "Hello", "temperature": 0})
    except errors.BadRequest as error:
        if not error.message.endswith(errors.NO_TEXT):
            raise
        await client.embed({"model": model, "input": "Hello"}, timeout_s=PROBE_TIMEOUT_S)
        return "input"
    return "prompt"


async def _begin_and_cancel(client: Client, body: Body) -> None:
    with contextlib.suppress(errors.Cancelled):
        async for frame in client.stream(body, timeout_s=PROBE_TIMEOUT_S):
            if frame["type"] == "delta":
                client.cancel(str(frame["request_id"]))  # then read to the end, so that nothing is left of it


def error_of(body: Mapping[str, Any]) -> errors.HeadraceError:
    """The error of a public error body, with its parameter."""
    fields = body["error"]
    try:
        if fields.get("type") == errors.Moved.type:  # its code is also that of another error
            return errors.Moved(str(fields["message"]))
        error = errors.from_code(
            int(fields["code"]), str(fields["message"]), int(fields.get("retry_after_ms") or 0)
        )
        error.param = fields.get("param")
    except (KeyError, TypeError, ValueError, AttributeError):
        return errors.EngineError(f"the service answered with an error of another form: {fields!r:.200}")
    return error


def _of_record(place: Followed, record: Body) -> Iterator[Body]:
    place.ended = True  # no detokenizer sends frames to this reader
    if "error" in record:
        raise error_of(record)
    yield from place.of_record(record)


def _lost(request_id: str, state: Body) -> errors.HeadraceError:
    """Why a request cannot be followed: `state` is the keeper's last answer."""
    if state and (error := error_of(state)).code != errors.UnknownRequest.code:
        return error
    what = (
        "it runs nowhere, and no record of it is kept" if state else "it runs nowhere, and no keeper answers"
    )
    return errors.UnknownRequest(
        f"no request {request_id!r:.140} of this tenant is known: {what}", param="id"
    )


async def request_all(
    bus: Bus,
    subject: str,
    wait_s: float,
    enough: Callable[[Body], object] = lambda body: False,
    *,
    body: bytes = b"",
) -> list[Body]:
    """The JSON replies of all services to `body` on `subject` within `wait_s`, or until one is `enough`.
    Raises NoResponders for none."""
    got = list[Body]()

    def note(delivery: Delivery) -> object:
        if (reply := _read(delivery.data)) is None:  # other programs may answer, too
            return False
        got.append(reply)
        return enough(reply)

    if not await gather(bus, subject, wait_s, note, body=body):
        raise NoResponders(f"no service runs on this server: none answers on {subject}")
    return got


async def gather(
    bus: Bus,
    subject: str,
    wait_s: float,
    note: Callable[[Delivery], object],
    *,
    body: bytes = b"",
    inbox: str = "",
) -> bool:
    """Send `body` to all services on `subject`, and give `note` each answer until it returns true or `wait_s`
    have passed. False if no service runs. `inbox`: of a tenant, for a request in its name."""
    silent, ended = False, asyncio.Event()

    def on_answer(delivery: Delivery) -> None:
        nonlocal silent
        silent = silent or delivery.has_no_responders
        if silent or note(delivery):
            ended.set()

    inbox = inbox or bus.new_inbox()
    subscription = await bus.subscribe(inbox, on_answer)
    try:
        bus.publish(subject, body, reply=inbox)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await ended.wait()
    finally:
        await subscription.cancel()
    return not silent


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        why = "holds a lone surrogate" if isinstance(error, ValueError) else "is nested too deeply"
        raise _unwritable(why) from None


def _no_service(model: str) -> errors.Unavailable:
    why = f"no service answers for model {model!r}: start one with `headrace up`, or see `headrace status`"
    return errors.Unavailable(why, retry_after_ms=round(AGAIN_S * 1e3))


def _no_answer(request_id: str, timeout_s: float) -> NoAnswer:
    return NoAnswer(f"no answer to request {request_id} within {timeout_s:g} s: see `headrace status`")


def _unwritable(why: str) -> errors.BadRequest:
    return errors.BadRequest(f"the request {why}: send flat values of whole characters")


def _read(data: bytes) -> Body | None:
    """A JSON object, None for anything else."""
    try:
        body = parse_frame(data)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _message(delivery: Delivery, model: str) -> Body:
    if delivery.has_no_responders:
        raise _no_service(model)
    message = _read(delivery.data)
    if message is None:
        raise errors.EngineError(
            f"the service answered with something that is not JSON: {delivery.data[:80]!r}"
        )
    return message


class UnreadFrames:
    """The unread messages of one request: a queue of at most MAX_UNREAD_BYTES and one message. If its tenant
    has MAX_TENANT_BYTES unread, the limit is an equal share of them.

    A message without room ends the request: `on_full` is called at once, and the reader gets SlowReader
    instead of the waiting messages.
    """

    __slots__ = (
        "_bytes", "_deliveries", "_due_s", "_failure", "_loop", "_on_full", "_reader", "_timer", "_total",
        "count", "lasting", "resends", "send", "subject", "unserved",
    )  # fmt: skip

    def __init__(self, on_full: Callable[[], None], total: UnreadTotal | None = None) -> None:
        self._on_full = on_full
        self._total = total or UnreadTotal()
        self._total.streams += 1
        self._deliveries: deque[Delivery] = deque()
        self._bytes = 0
        self._failure: errors.HeadraceError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: asyncio.Future[None] | None = None  # waits until `_due_s`
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None  # one for many waits: most end long before it
        self.count = 0  # received messages
        self.send: Callable[[], None] = lambda: None  # publishes the request
        self.subject = ""  # to this subject
        self.resends = 0  # left, while no service is there
        self.unserved = False  # no service was there when it was last sent
        self.lasting = False  # its reader itself notices a silence

    @property
    def model(self) -> str:
        """The token of the model that the request is for; empty without one."""
        return self.subject.rpartition(".")[2]

    def put(self, delivery: Delivery) -> None:
        """Keep a message for the reader."""
        self.count += 1
        if self._failure is not None:
            return
        if self._bytes and self._is_full():
            why = f"{self._bytes} bytes of the answer waited to be read"
            self._deliveries.clear()
            self._count(-self._bytes)
            self.fail(SlowReader(f"{why}, and the request was ended: read faster, or leave out `stream`"))
            self._on_full()
        else:
            self._deliveries.append(delivery)
            self._count(len(delivery.data))
        self._wake()

    def _is_full(self) -> bool:
        total = self._total
        over = total.size > MAX_TENANT_BYTES and self._bytes * total.streams >= total.size
        return self._bytes > MAX_UNREAD_BYTES or over

    def _count(self, size: int) -> None:
        self._bytes += size
        self._total.size += size

    def send_again(self) -> None:
        """Publish the request once more; the queue ends if the server's limit has become too low for it."""
        try:
            self.send()
        except errors.PayloadTooLarge as error:
            self.fail(error)

    def fail(self, error: errors.HeadraceError) -> None:
        """End the queue: the reader gets this error after the waiting messages."""
        self._failure = error
        self._wake()

    @property
    def failure(self) -> errors.HeadraceError | None:
        """The error that ended the queue."""
        return self._failure

    async def get(self, timeout_s: float) -> Delivery:
        """The oldest message. Raises TimeoutError, and the error of `fail`."""
        while not self._deliveries:
            if self._failure is not None:
                raise self._failure
            loop = self._loop = self._loop or asyncio.get_running_loop()
            self._reader, self._due_s = loop.create_future(), loop.time() + timeout_s
            if self._timer is None or self._timer.when() - TIMER_S > self._due_s:
                self._arm()
            try:
                await self._reader
            finally:
                self._reader = None
        delivery = self._deliveries.popleft()
        self._count(-len(delivery.data))
        return delivery

    def close(self) -> None:
        """Drop the waiting messages: the reader has gone."""
        self._disarm()
        self._count(-self._bytes)
        self._deliveries.clear()
        self._total.streams -= 1

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._disarm()
        loop = asyncio.get_running_loop()
        wait_s = min(self._due_s - loop.time(), MAX_TIMER_S)
        self._timer = loop.call_later(timer_s(wait_s * 1e6), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._reader is None or self._reader.done():
            return  # the next wait arms it again
        if asyncio.get_running_loop().time() < self._due_s:
            self._arm()
        else:
            self._reader.set_exception(TimeoutError())
