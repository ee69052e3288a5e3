"""Client speaks the native API from the client's side: requests, streams, cancels.

The gateway, the command line and benches use it. One wildcard inbox serves every request of a client. Frames
are checked: a missing number is an error, never a silent hole; a stream that starts over (its detokenizer
died) says `accepted` again. What a reader does not take is bounded: a slow one is ended, and slows nobody
else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.errors import (
    NO_TEMPLATE,
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    EngineError,
    HeadraceError,
    Unavailable,
    from_code,
)
from shared.nats import subjects
from shared.nats.interface import Bus, BusFault, Delivery, NoResponders

END_HEADER = "Headrace-End"
DEFAULT_TIMEOUT_S = 300.0
ASK_TIMEOUT_S = 10.0  # of a small question
PROBE_TIMEOUT_S = 60.0
RETURN_S = 30.0  # after our own connection was cut, for a stream to go on: far longer than any replay
HOLE_S = 3.0  # wait for a stream with a hole to start over; after a broker's return that takes one

MAX_UNREAD_BYTES = 2_097_152  # of one request: some 10,000 frames, a hundred seconds of a fast stream

_CUT = "the connection to the nats-server was cut, and the answer did not go on: send it again"

Body = dict[str, Any]


class NoAnswer(DeadlineExceeded):
    """The client's own time limit: the service has said nothing for that long."""


class MissingFrame(EngineError):
    """A frame never came, and the stream did not start over."""


class SlowReader(HeadraceError):
    """More frames waited for their reader than are kept for it: its request was ended."""

    code, type = 408, "slow_reader"


@dataclass(slots=True)
class Client:
    """Sends requests over one bus connection. Build with `await Client.open(bus)`."""

    bus: Bus
    tenant: str = subjects.DEFAULT_TENANT
    _prefix: str = ""
    _waiting: dict[str, Unread] = field(default_factory=dict)

    @classmethod
    async def open(cls, bus: Bus, tenant: str = subjects.DEFAULT_TENANT) -> Client:
        """A client on `bus`, which stays the caller's to drain."""
        client = cls(bus, tenant, bus.new_inbox())
        bus.on_fault(client._on_fault)
        await bus.subscribe(f"{client._prefix}.*", client._on_reply)
        await bus.flush()  # the inbox is known to the server before the first reply can come
        return client

    def as_tenant(self, tenant: str) -> Client:
        """The same client, asking in another's name."""
        return replace(self, tenant=tenant)

    async def complete(
        self, body: Mapping[str, Any], *, timeout_s: float = DEFAULT_TIMEOUT_S, trace: str = ""
    ) -> Body:
        """The whole answer, OpenAI-shaped. Raises the error the service names, Unavailable when none
        serves the model, NoAnswer when nothing comes in time."""
        async with contextlib.aclosing(
            self._exchange({**body, "stream": False}, timeout_s, trace)
        ) as replies:
            async for reply in replies:
                return reply
        raise EngineError("the service ended the request without an answer")

    async def stream(
        self, body: Mapping[str, Any], *, timeout_s: float = DEFAULT_TIMEOUT_S, trace: str = ""
    ) -> AsyncGenerator[Body]:
        """The frames of an answer: accepted, delta…, done. `timeout_s` bounds the wait for each.

        Raises like `complete`, and MissingFrame, SlowReader. Leaving the iteration early (`aclose`,
        cancellation) cancels the request, unless it says `finish_detached`.
        """
        async with contextlib.aclosing(self._exchange({**body, "stream": True}, timeout_s, trace)) as frames:
            async for frame in frames:
                yield frame

    @property
    def waiting(self) -> int:
        """Requests whose end has not come yet."""
        return len(self._waiting)

    def fail(self, error: HeadraceError) -> None:
        """End all requests that wait, each with this error behind what has come of its answer."""
        for replies in self._waiting.values():
            replies.fail(error)

    def cancel(self, request_id: str) -> None:
        """Ask every service to stop working on a request of this tenant."""
        self.bus.publish(subjects.cancel(self.tenant, request_id), b"")

    async def ask(self, subject: str, body: Mapping[str, Any] | None = None) -> Body:
        """The one answer to a small question. Raises the error that the service names, NoResponders,
        RequestTimeout."""
        data = b"" if body is None else _json(body)
        delivery = await self.bus.request(subject, data, timeout_us=int(ASK_TIMEOUT_S * 1e6))
        answer = _message(delivery, "")
        if "error" in answer:
            raise error_of(answer)
        return answer

    async def _exchange(self, body: Body, timeout_s: float, trace: str) -> AsyncGenerator[Body]:
        """Send `body` and give every message of the reply up to its last one."""
        model = str(body.get("model", ""))
        if not model:
            raise EngineError("a request names its model: add `model`", param="model")
        request_id = str(body.setdefault("request_id", secrets.token_hex(11)))
        subject, data = self._written(model, body)
        token, order = secrets.token_hex(8), FrameOrder()
        replies = self._waiting[token] = Unread(lambda: self.cancel(request_id))
        ended = False
        try:
            headers = {"traceparent": trace} if trace else None
            self.bus.publish(subject, data, reply=f"{self._prefix}.{token}", headers=headers)
            while not ended:
                try:
                    wait_s = min(timeout_s, HOLE_S) if order.hole is not None else timeout_s
                    delivery = await self._next(replies, wait_s, request_id)
                except NoAnswer as error:
                    raise order.hole or error from None
                ended = True  # an error, or the last message: nothing is left to cancel
                message = _message(delivery, model)
                if "error" in message and not (body["stream"] and order.outdated(message)):
                    raise error_of(message)
                ended = not body["stream"]
                if ended or order.take(message):
                    ended = ended or END_HEADER in delivery.headers
                    yield message
        finally:
            del self._waiting[token]
            if not ended and body.get("finish_detached") is not True:
                self.cancel(request_id)

    def _written(self, model: str, body: Body) -> tuple[str, bytes]:
        data = _json(body)
        try:
            return subjects.generate(self.tenant, model), data
        except UnicodeEncodeError:
            raise _unwritable("holds a lone surrogate") from None

    async def _next(self, replies: Unread, timeout_s: float, request_id: str) -> Delivery:
        try:
            return await replies.get(timeout_s)
        except TimeoutError:
            raise NoAnswer(
                f"no answer to request {request_id} within {timeout_s:g} s: see `headrace status`"
            ) from None

    def _on_fault(self, fault: BusFault) -> None:
        """While we were cut off the server told the services that nobody listens, and they have stopped
        what was running: such a stream says nothing ever again."""
        if fault.kind == "reconnected":
            running = {token: each.count for token, each in self._waiting.items() if each.count > 1}
            asyncio.get_running_loop().call_later(RETURN_S, self._end_silent, running)

    def _end_silent(self, counts: Mapping[str, int]) -> None:
        for token, count in counts.items():
            replies = self._waiting.get(token)
            if replies is not None and replies.count == count:
                replies.fail(Unavailable(_CUT))

    def _on_reply(self, delivery: Delivery) -> None:
        replies = self._waiting.get(delivery.subject.rpartition(".")[2])
        if replies is not None:
            replies.put(delivery)


@dataclass(slots=True)
class FrameOrder:
    """Checks the numbers of the frames of one stream. After a hole nothing is taken until the stream
    starts over, as it does after the broker was away."""

    attempt: int = -1
    frame: int = 0  # the next one
    hole: MissingFrame | None = None

    def outdated(self, frame: Mapping[str, Any]) -> bool:
        """True for a frame, an error too, of a detokenizer that was given up and does not know it yet."""
        attempt = frame.get("attempt")
        return isinstance(attempt, int) and attempt < self.attempt

    def take(self, frame: Mapping[str, Any]) -> bool:
        """True when this is the next frame; a new attempt starts at 0 again."""
        if self.outdated(frame):
            return False
        attempt, number = int(frame["attempt"]), int(frame["frame"])
        starts_over = attempt > self.attempt or (number == 0 and frame["type"] == "accepted")
        expected = 0 if starts_over else self.frame
        if number != expected:
            self.hole = self.hole or MissingFrame(
                f"frame {expected} of request {frame.get('request_id')} is missing (frame {number} came): "
                "the reader was too slow or the connection broke; ask again"
            )
        elif starts_over:
            self.hole = None
        if self.hole is None:
            self.attempt, self.frame = attempt, number + 1
        return self.hole is None


async def probe(client: Client, model: str) -> None:
    """Ask as a user would, a chat that does not say how long its answer may be, and stop at the first text;
    a model without a chat template is asked to go on with a prompt. Returns when an answer has begun. Raises
    as `Client.stream`."""
    asked: Body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    try:
        await _begun(client, asked)
    except BadRequest as error:
        if error.message != NO_TEMPLATE:
            raise
        await _begun(client, {"model": model, "prompt": "Hello", "temperature": 0})


async def _begun(client: Client, body: Body) -> None:
    with contextlib.suppress(Cancelled):
        async for frame in client.stream(body, timeout_s=PROBE_TIMEOUT_S):
            if frame["type"] == "delta":
                client.cancel(str(frame["request_id"]))  # and hear the end: nothing of it is left then


def error_of(body: Mapping[str, Any]) -> HeadraceError:
    """The error that a public error body stands for, with its parameter."""
    fields = body["error"]
    try:
        error = from_code(int(fields["code"]), str(fields["message"]), int(fields.get("retry_after_ms") or 0))
        error.param = fields.get("param")
    except (KeyError, TypeError, ValueError, AttributeError):
        return EngineError(f"the service answered with an error of another form: {fields!r:.200}")
    return error


async def ask_all(bus: Bus, subject: str, wait_s: float) -> list[Body]:
    """The JSON replies of everybody who answers on `subject` within `wait_s`.

    Raises NoResponders when nobody listens.
    """
    inbox, got = bus.new_inbox(), list[Delivery]()
    silent = asyncio.Event()

    def collect(delivery: Delivery) -> None:
        if delivery.no_responders:
            silent.set()
        else:
            got.append(delivery)

    subscription = await bus.subscribe(inbox, collect)
    bus.publish(subject, b"", reply=inbox)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(silent.wait(), wait_s)
    await subscription.cancel()
    if silent.is_set():
        raise NoResponders(f"nobody listens to {subject}: no service runs on this server")
    found = (_read(delivery.data) for delivery in got)  # others may answer on this subject, too
    return [body for body in found if body is not None]


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        why = "holds a lone surrogate" if isinstance(error, ValueError) else "is nested too deeply"
        raise _unwritable(why) from None


def _unwritable(why: str) -> BadRequest:
    return BadRequest(f"the request {why}: send flat values of whole characters")


def _read(data: bytes) -> Body | None:
    """A JSON object, None for anything else."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _message(delivery: Delivery, model: str) -> Body:
    if delivery.no_responders:
        raise Unavailable(
            f"no service answers for model {model!r}: start one with `headrace up`, or see `headrace status`"
        )
    message = _read(delivery.data)
    if message is None:
        raise EngineError(f"the service answered with something that is not JSON: {delivery.data[:80]!r}")
    return message


class Unread:
    """What came for one request and was not read yet: a queue of at most MAX_UNREAD_BYTES and one message.

    What finds no room is the end: `on_full` is called at once, and the reader finds SlowReader in the place
    of all that waited. So neither the memory nor the work of a slow reader is at the expense of the others.
    """

    __slots__ = ("_bytes", "_came", "_deliveries", "_failure", "_on_full", "count")

    def __init__(self, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        self._deliveries: deque[Delivery] = deque()
        self._bytes = 0
        self._failure: HeadraceError | None = None
        self._came = asyncio.Event()
        self.count = 0  # messages that came

    def put(self, delivery: Delivery) -> None:
        """Keep a message for the reader."""
        self.count += 1
        if self._failure is not None:
            return
        if self._bytes > MAX_UNREAD_BYTES:
            self._deliveries.clear()
            self.fail(
                SlowReader(
                    f"{MAX_UNREAD_BYTES} bytes of the answer waited to be read, and the request was ended: "
                    "read faster, or ask without `stream`"
                )
            )
            self._on_full()
        else:
            self._deliveries.append(delivery)
            self._bytes += len(delivery.data)
        self._came.set()

    def fail(self, error: HeadraceError) -> None:
        """Nothing more comes: the reader finds this error behind what is there."""
        self._failure = error
        self._came.set()

    async def get(self, timeout_s: float) -> Delivery:
        """The oldest message. Raises TimeoutError, and what `fail` was given."""
        while not self._deliveries:
            if self._failure is not None:
                raise self._failure
            self._came.clear()
            async with asyncio.timeout(timeout_s):
                await self._came.wait()
        delivery = self._deliveries.popleft()
        self._bytes -= len(delivery.data)
        return delivery
