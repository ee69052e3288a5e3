"""Connection is uvicorn's HTTP/1.1 with bounds on what a peer owes: a head, a body, or its next request.

    idle ──first byte──▶ head ──last header──▶ body ──last byte──▶ nothing owed ──answered──▶ idle

What is owed for too long, or by too many connections of one address, ends the connection: HttpServer looks
once in SWEEP_S. A connection that waits for our answer, or reads it, owes nothing. A head that is too large
is refused with 431 while it comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import HeadTooLarge, SlowRequest, body_of, status_of
from services.gateway.native_call import BODY_TIMEOUT_S
from shared.errors import BadRequest, HeadraceError
from shared.replies import to_json

MAX_HEAD_BYTES = 32_768
HEAD_TIMEOUT_S = 15.0
KEEP_ALIVE_S = 75.0  # of an idle connection: longer than a proxy in front keeps its own
LINGER_S = 5.0  # for the rest of a body that was refused: else the client reads a reset and not why
MAX_IDLE = 512  # connections of one address that owe something; a proxy in front keeps fewer
SWEEP_S = 1.0  # a connection that is younger is not looked at: its request is on the way
IDLE, HEAD, BODY, NOTHING = "idle", "head", "body", ""


class Connection(HttpToolsProtocol):
    """One connection of an HTTP client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.network = _network(self.client[0] if self.client else "")
        self.owes_from(IDLE)

    def owes_from(self, what: str) -> None:
        """From now on the peer owes this."""
        self.owes = what
        self.since_s = self.loop.time()
        self._head_bytes = 0
        self._refusal: HeadraceError | None = None

    @property
    def answering(self) -> bool:
        """True while an answer is awaited or sent."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def owing(self) -> bool:
        """True when nothing but the peer is awaited."""
        return self.owes == BODY or (self.owes != NOTHING and not self.answering)

    def late(self, now_s: float) -> bool:
        """True when the peer has owed it for too long."""
        if self.owes == BODY:  # the application refuses a slow body itself, and LINGER_S later it is over
            limit_s = BODY_TIMEOUT_S + LINGER_S if self.answering else LINGER_S
        else:
            limit_s = HEAD_TIMEOUT_S if self.owes == HEAD else KEEP_ALIVE_S
        return self.owing and now_s - self.since_s > limit_s

    def end(self) -> None:
        """Close it; whoever has sent half a head hears why."""
        if self.owes == HEAD:
            self._refuse(SlowRequest(f"the head did not come within {HEAD_TIMEOUT_S:g} s: send it again"))
        else:
            self.transport.close()

    # ---- what comes -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.owes == HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.owes_from(HEAD)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refusal = _too_large()
            raise ValueError(self._refusal.message)  # the parser stops, and `send_400_response` says why
        self.owes_from(BODY)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.owes_from(IDLE if self.cycle.response_complete else NOTHING)

    def on_response_complete(self) -> None:
        if self.owes != HEAD:  # the next one has begun, behind this one
            self.owes_from(self.owes or IDLE)
        super().on_response_complete()

    # ---- refusals -------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or BadRequest("this is no HTTP/1.1 request"))

    def _refuse(self, error: HeadraceError) -> None:
        if not self.answering and not self.transport.is_closing():
            status, body = HTTPStatus(status_of(error)), to_json(body_of(error))
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def sweep(connections: Iterable[Any], now_s: float) -> None:
    """End the connections that owe something for too long, and of each address those above MAX_IDLE, the
    oldest first."""
    owing = [c for c in connections if c.owing and now_s - c.since_s > SWEEP_S]
    too_many = {
        network: n - MAX_IDLE for network, n in Counter(c.network for c in owing).items() if n > MAX_IDLE
    }
    for connection in sorted(owing, key=lambda c: c.since_s) if too_many else owing:
        left = too_many.get(connection.network, 0)
        if left > 0 or connection.late(now_s):
            too_many[connection.network] = left - 1
            connection.end()


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the head of the request is over {MAX_HEAD_BYTES} bytes: send less in its headers")


def _network(address: str) -> str:
    """Whose connections count together: an address, or what one customer has of IPv6."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return str(getattr(parsed, "ipv4_mapped", None) or parsed)
    return parsed.packed[:8].hex()
