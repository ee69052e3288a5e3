"""What nats-py reports, as BusFaults: one for each burst, and none for what is no news."""

from __future__ import annotations

import ssl
from typing import Any

from nats import errors as nats_errors

from shared.bus import BusFault, FaultHandler

_VIOLATION = "authorization violation"
_DENIED = "permissions violation"
_DENIED_READING = "permissions violation for subscription"


class Refused(nats_errors.Error):
    """The server knows these credentials not, or we trust the server not: to try again would not help."""


class Faults:
    """Turns what nats-py reports into BusFaults."""

    def __init__(self) -> None:
        self.handlers: list[FaultHandler] = []
        self.overflowing: set[str] = set()  # patterns that dropped messages since their last delivery
        self.cause = "end of connection"  # of the next "disconnected"
        self.opened = False  # since the first connection
        self.online = False
        self.silent = False

    def report(self, kind: str, detail: str) -> None:
        """Tell every handler."""
        if not self.silent:
            for handler in self.handlers:
                handler(BusFault(kind, detail))

    async def on_error(self, error: Any) -> None:
        """What `error_cb` of nats-py gets: slow consumers, permissions, failed attempts to connect. Raises
        Refused out of the first `connect`, which would try for ever."""
        words = str(error).lower()
        if isinstance(error, nats_errors.SlowConsumerError):
            pattern = error.sub.subject
            if pattern not in self.overflowing:
                self.overflowing.add(pattern)
                self.report("slow_consumer", f"messages on {pattern} are dropped: too many unread")
        elif _VIOLATION in words or isinstance(error, ssl.SSLCertVerificationError):
            if not self.opened:
                raise Refused(text(error))
            self.report("refused", text(error))  # other credentials since
        elif _DENIED in words:
            self.report("refused" if _DENIED_READING in words else "permission", str(error))
        elif isinstance(error, OSError | nats_errors.UnexpectedEOF | nats_errors.StaleConnectionError):
            self.cause = text(error)
        elif self.online:  # a failed attempt to reconnect is no news after "disconnected"
            self.report("error", text(error))

    async def on_closed(self) -> None:
        """The server ended the connection, and nats-py does not try again."""
        self.report("closed", "the nats-server ended the connection for good")


def text(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
