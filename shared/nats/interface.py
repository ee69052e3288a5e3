"""The transport as services see it. NatsBus and the tests' MemoryBus keep one contract (tests/contract).

Publishing never suspends and never blocks: bytes leave when the caller next yields to the event
loop, in the order of the calls. A handler is a plain function called serially per subscription;
it puts the delivery into the actor's mailbox and returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from shared.errors import HeadraceError, PayloadTooLarge, Unavailable

_HEADER_FRAME = len(b"NATS/1.0\r\n\r\n")
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
NO_RESPONDERS = "503"  # value of the header `Status` on a request that no subscription matches


class Delivery(NamedTuple):
    """One message as it arrives."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] = NO_HEADERS

    @property
    def has_no_responders(self) -> bool:
        """True for the server's own answer that nothing listened (`headers["Nats-Subject"]`)."""
        return not self.data and self.headers.get("Status") == NO_RESPONDERS


class NoResponders(Unavailable):
    """No subscription matches the subject of a request."""


class RequestTimeout(HeadraceError):
    """A bus request got no answer in time."""

    code, type, retryable = 504, "timeout", True


@dataclass(frozen=True, slots=True)
class BusFault:
    """Something the transport lost or refused; a fault is reported, never swallowed."""

    # overflow, disconnected, reconnected, permission (a message was not let through), refused
    # (a subscription was not, or the credentials are), closed, error
    kind: str
    detail: str


def check_payload(subject: str, data: bytes, headers: Mapping[str, str] | None, most: int) -> None:
    """Raise PayloadTooLarge for a message over the server's limit `most`, which counts headers too: the
    server would end the connection of its sender."""
    size = len(data)
    if headers:
        size += _HEADER_FRAME + sum(len(n.encode()) + len(v.encode()) + 4 for n, v in headers.items())
    if size > most:
        raise PayloadTooLarge(
            f"{size} bytes for {subject} are over the server's limit of {most}: "
            "send less, or raise max_payload in the server's configuration"
        )


Handler = Callable[[Delivery], None]
FaultHandler = Callable[[BusFault], None]


class Subscription(Protocol):
    """A live subscription."""

    async def cancel(self) -> None:
        """Stop deliveries. A second call does nothing."""

    async def drain(self) -> None:
        """Stop deliveries once what is on its way here has been handled; others of a queue group get the
        rest. After it, or `cancel`, does nothing."""


class Bus(Protocol):
    """A connection to the broker."""

    @property
    def user(self) -> str:
        """Under which name it is connected; empty without credentials."""

    @property
    def max_payload(self) -> int:
        """Largest body in bytes that the server accepts, as read at connect."""

    @property
    def backlog_bytes(self) -> int:
        """Bytes published and not yet handed to the operating system."""

    def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Queue a message. Raises PayloadTooLarge when `data` is over `max_payload`."""

    async def subscribe(self, pattern: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Call `handler` for each message on `pattern`; with `queue`, as one member of a group."""

    async def request(
        self, subject: str, data: bytes, *, timeout_us: int, headers: Mapping[str, str] | None = None
    ) -> Delivery:
        """Publish and await one reply. Raises NoResponders at once, RequestTimeout, PayloadTooLarge."""

    async def another(self, suffix: str, timeout_s: float, turn_messages: int = ...) -> Bus:
        """A second connection to the same broker, as the same user. `suffix` is added to its name, and other
        tasks run after each `turn_messages` that it brings. Raises SetupError when there is none within
        `timeout_s`."""

    def new_inbox(self) -> str:
        """A fresh reply subject."""

    def on_fault(self, handler: FaultHandler) -> None:
        """Call `handler` for each BusFault from now on."""

    async def flush(self) -> None:
        """Return when the server has received everything published before. Never on a hot path. Raises
        Unavailable when it does not in a time far above any round trip."""

    async def drain(self) -> None:
        """Deliver what is pending, unsubscribe, close. A second call does nothing."""
