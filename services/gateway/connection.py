"""`Connection` is uvicorn's HTTP/1.1 connection with time limits for what the peer owes.

A peer owes a head, a body, or its next request. A peer that waits for an answer or reads it owes nothing:

    idle ──first byte──▶ head ──last header──▶ body ──last byte──▶ nothing owed ──answered──▶ idle
                          └──refused──▶ rest ◀──answered, and to be closed──┘

Every SWEEP_S HttpServer ends connections that owe something for too long, and the oldest ones of an address
with more than MAX_IDLE. A head over MAX_HEAD_BYTES is refused with 431 while it arrives. Nothing is read
while a request waits for the answer to an earlier one. A peer may still send after a refusal or its last
request: the server closes its own direction and drops the rest, since a full close would reset the connection
and destroy the answer on its way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.exchange import HeadTooLarge, SlowRequest, UnknownCoding
from services.gateway.native_call import BODY_TIMEOUT_S
from shared.errors import BadRequest, HeadraceError, Overloaded
from shared.openai.call import error_body, error_status
from shared.replies import to_json

MAX_HEAD_BYTES = 32_768
MAX_PIPELINED = 64  # requests of a connection that wait for the answer to an earlier one
BODY_PIECE_BYTES = 1_048_576  # of a long body: each has the time of a whole one
HEAD_TIMEOUT_S = 15.0
KEEP_ALIVE_S = 75.0  # of an idle connection: longer than a proxy in front keeps its own
LINGER_S = 5.0  # to read the rest of a refused request: else the client gets a reset instead of the error
MAX_IDLE = 512  # connections of one address that owe something; a proxy in front keeps fewer
SWEEP_S = 1.0  # between sweeps; younger debts are ignored, since the request is on its way
IDLE, HEAD, BODY, REST, NOTHING = "idle", "head", "body", "rest", ""


class Flow(FlowControl):
    """Flow control that resumes reading only if no request waits for its turn."""

    def __init__(self, transport: asyncio.Transport, waiting: Collection[object]) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


def chunk_writer(send: Callable[..., object]) -> Callable[[bytes], bool]:
    """Writes one body of a streamed response to the socket, without an ASGI message. Returns False where it
    must go through uvicorn's `send` instead, which waits for a slow client."""
    cycle: Any = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or cycle.scope["method"] == "HEAD":
        return lambda body: False

    def write(body: bytes) -> bool:
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    return write


def _unchunked(cycle: RequestResponseCycle, app: Any) -> Any:
    """The application for an HTTP/1.0 request, whose answers are not chunked: their end is that of the
    connection."""

    async def send(message: Any) -> None:
        cycle.chunked_encoding, cycle.expected_content_length = False, len(message.get("body", b""))
        await cycle.send(message)

    return lambda scope, receive, _: app(scope, receive, send)


class Connection(HttpToolsProtocol):
    """One connection of an HTTP client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.flow = Flow(transport, self.pipeline)
        self.network = _network(self.client[0] if self.client else "")
        self._running: RequestResponseCycle | None = None  # `self.cycle` is the newest one
        self._last = False  # the newest request is the last one
        self._plain = b""  # a head without its `Upgrade` header
        self._refusal: HeadraceError | None = None
        self.owes_from(IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    def owes_from(self, what: str) -> None:
        """The peer owes `what` from now on."""
        self.owes = what
        self.since_s = self.loop.time()
        self._head_bytes = self._body_bytes = 0

    @property
    def is_answering(self) -> bool:
        """True while an answer is prepared or sent."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_owing(self) -> bool:
        """True if the connection waits only for the peer."""
        if self.owes == BODY:
            return not self.pipeline
        return self.owes != NOTHING and not self.is_answering

    def is_late(self, now_s: float) -> bool:
        """True if the peer has owed something for too long."""
        if self.owes == BODY and self.is_answering:  # the application refuses a slow body itself
            limit_s = BODY_TIMEOUT_S + LINGER_S
        else:
            limit_s = {HEAD: HEAD_TIMEOUT_S, IDLE: KEEP_ALIVE_S}.get(self.owes, LINGER_S)
        return self.is_owing and now_s - self.since_s > limit_s

    def end(self) -> None:
        """Close the connection, with an error for a peer that has sent half a head."""
        if self.owes == HEAD:
            self._refuse(SlowRequest(f"the head did not come within {HEAD_TIMEOUT_S:g} s: send it again"))
        self.transport.close()

    # ---- received data --------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self.owes == REST:
            return
        self._alone = True  # this piece holds only a part of a head, or of chunk headers and trailers
        self._parse(data)
        if self._alone and self.owes in (HEAD, BODY):
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:  # ignored: the request is parsed again without it
                data, self._plain = self._plain + data[offer.args[0] :], b""
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            except httptools.HttpParserError:
                what = "body is not in chunks" if self.owes == BODY else "request is not HTTP/1.1"
                self._refuse(self._refusal or BadRequest(f"the {what}"))
                return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.owes_from(HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.owes == HEAD:  # else a trailer, which is dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refusal = _too_large()
        elif len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = Overloaded(f"over {MAX_PIPELINED} requests wait on this connection: send fewer")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        *others, last = b",".join(codings).split(b",")
        if others and last.strip().lower() == b"chunked":  # another last one is an error of the parser
            self._refusal = UnknownCoding("the body has a transfer coding beside chunked: send it without")
        if self._refusal is not None:
            raise ValueError(self._refusal.message)  # the parser stops
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._plain = self._without_offer()
            return
        super().on_headers_complete()
        self._alone = False
        self.owes_from(BODY)
        self._last, self.cycle.keep_alive = not self.cycle.keep_alive, True  # until the body has arrived

    def on_body(self, body: bytes) -> None:
        self._alone, self._head_bytes = False, 0
        super().on_body(body)
        self._body_bytes += len(body)
        if self._body_bytes >= BODY_PIECE_BYTES and self.is_answering:  # an upload, not refused so far
            self.owes_from(BODY)

    def on_message_complete(self) -> None:
        if self._plain:
            return
        self._alone = False
        if self._last:
            self.cycle.keep_alive = False
        super().on_message_complete()
        self.owes_from(IDLE if self.cycle.response_complete else NOTHING)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self.owes = self.owes or IDLE
        self.since_s = self.loop.time()
        if not self.is_answering and (self.owes == REST or (self._last and self.owes == BODY)):
            self._half_close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if old else app)

    def _without_offer(self) -> bytes:
        """The received head without `Upgrade`: with it the parser expects no HTTP after the head."""
        version = self.parser.get_http_version().encode()
        asked = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
        headers = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([asked, *headers, b"", b""])

    # ---- refusals -------------------------------------------------------------------------------

    def _refuse(self, error: HeadraceError) -> None:
        """Read no more, and send the error after the answers that are still due."""
        if self.owes == BODY:
            if self.cycle.response_started:
                self.transport.close()
                return
            if self.pipeline:  # its request waits for an earlier one
                self.pipeline.popleft()
                self.cycle = self.pipeline[0][0] if self.pipeline else self._running or self.cycle
            else:  # to the application the peer has gone
                self.cycle.disconnected = self.cycle.response_complete = True
                self.cycle.message_event.set()
        self._refusal = error
        self.owes_from(REST)
        if not self.is_answering and not self.transport.is_closing():
            self._half_close()

    def _half_close(self) -> None:
        """Send the error, if any, and close the sending direction."""
        self.owes_from(REST)
        if self._refusal is not None:
            status, body = HTTPStatus(error_status(self._refusal)), to_json(error_body(self._refusal))
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS has no half-closed connections
            self.transport.close()


def sweep(connections: Iterable[Any], now_s: float) -> None:
    """End the connections that owe something for too long, and the oldest ones above MAX_IDLE by address."""
    owing = [c for c in connections if c.is_owing and now_s - c.since_s > SWEEP_S]
    too_many = {
        network: n - MAX_IDLE for network, n in Counter(c.network for c in owing).items() if n > MAX_IDLE
    }
    for connection in sorted(owing, key=lambda c: c.since_s) if too_many else owing:
        left = too_many.get(connection.network, 0)
        if left > 0 or connection.is_late(now_s):
            too_many[connection.network] = left - 1
            connection.end()


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the head of the request is over {MAX_HEAD_BYTES} bytes: send less in its headers")


def _network(address: str) -> str:
    """The key of connections that count together: an IPv4 address, or an IPv6 /64 prefix."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return str(getattr(parsed, "ipv4_mapped", None) or parsed)
    return parsed.packed[:8].hex()
