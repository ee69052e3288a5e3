"""What the detokenizer's core tells its shell to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.detokenizer.request import RequestText
from shared.messages import Cancel, Detached, Ended, StopFound, Tokenized


@dataclass(slots=True)
class Publish:
    """Send bytes to a client. `number` is the request's, for the reply subject on which the server
    says that nobody listens."""

    inbox: str
    data: bytes
    number: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to a scheduler (`kind.id`)."""

    scheduler: str
    message: StopFound | Ended | Detached | Tokenized | Cancel
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to log: a stream that could not be continued."""

    detail: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last frame of a request precedes this. The Ended that follows, if any, is its last one."""

    request: RequestText


Command = Publish | Tell | Fault | Finished
