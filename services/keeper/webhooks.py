"""Webhooks: which URLs may be called, what is sent there and how it is signed, when it is tried again. Pure.

An event has OpenAI's form and the signature of the Standard Webhooks specification
(https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md): the libraries of
both verify it. The setting `webhooks` names a file of the hosts that may be called, each with its secrets:

    hooks.example.com        whsec_MfKQ…          https alone
    hooks.example.com:8443   whsec_C2FV… whsec_MfKQ…   a new secret, and the one that it replaces
    http://127.0.0.1:9000    whsec_plJ3…
"""

from __future__ import annotations

import hmac
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from services.keeper.records import COMPLETED, RESPONSE, Body, Hook
from shared.errors import BadRequest

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
    if hook.kind == RESPONSE and status == COMPLETED and _cut(record):
        status = "incomplete"
    named = "\0".join((hook.tenant, hook.kind, hook.id, str(hook.submitted)))
    return {
        "id": f"evt_{sha256(named.encode()).hexdigest()[:32]}",
        "object": "event",
        "created_at": record.get("ended_at") or record.get(f"{status}_at"),
        "type": f"{hook.kind}.{status}",
        "data": {"id": hook.id},
    }


def _cut(record: Mapping[str, object]) -> bool:
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
