"""What the detokenizer's core tells its shell to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.messages import Detached, Ended, StopFound


@dataclass(slots=True)
class Publish:
    """Send bytes to a client. `number` is the request's, for the reply subject on which the server
    says that the client has gone; 0 for the last message, after which nobody cares."""

    inbox: str
    data: bytes
    number: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to a scheduler (`kind.id`)."""

    scheduler: str
    message: StopFound | Ended | Detached


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to log: a stream that could not be continued."""

    detail: str


Command = Publish | Tell | Fault
