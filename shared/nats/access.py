"""Each service, tenant and operator has a login at the nats-server and the permissions it needs, no more.

    tenant ──generate, cancel, tokenize, detokenize of its own name──▶ tokenizer, detokenizer, scheduler
    tenant ◀──────────────── replies below its own inbox ───────────── tokenizer, detokenizer
    service ──mailboxes of those it works with──▶ service

So a tenant can neither ask in another's name nor read another's replies, and no tenant reaches a mailbox. A
service that answers only whoever asks it may publish to that reply subject once, and to no other inbox.

A nats-server URL says besides the address who connects, and by which certificates:

    nats://USER:PASSWORD@HOST:PORT            a user of `headrace auth`, or any other
    tls://USER:PASSWORD@HOST:PORT?ca=FILE     the same, the server's certificate checked with FILE

A user reads replies below an inbox of its own, `_INBOX.USER`: the server lets nobody else subscribe there.
Tenants are users by their (escaped) name; the names of services begin with `headrace-`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, urlsplit

from shared.errors import SetupError
from shared.nats.subjects import PUBLIC, token, untoken

DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
SERVICE_PREFIX = "headrace-"
OPERATOR = "operator"
INBOX = "_INBOX"

_MAILBOXES = {
    "tokenizer": ("scheduler",),
    "scheduler": ("tokenizer", "executor", "kv_offload", "detokenizer"),
    "executor": ("scheduler",),
    "kv_offload": ("scheduler",),
    "detokenizer": ("scheduler",),
    "gateway": (),
}  # who sends to whom
SERVICES = tuple(_MAILBOXES)
_READS = {
    "tokenizer": (
        f"{PUBLIC}.generate.*.*",
        f"{PUBLIC}.cancel.*.*",
        f"{PUBLIC}.tokenize.*.*",
        f"{PUBLIC}.models",
        "hr.*.beat.tokenizer.*",
    ),
    "scheduler": (f"{PUBLIC}.cancel.*.*", f"{PUBLIC}.trace.*", f"{PUBLIC}.events.*.snapshot"),
    "detokenizer": (f"{PUBLIC}.detokenize.*.*", f"{PUBLIC}.cancel.*.*", "_R.*.*"),
}
# The inbox of a request travels to the detokenizer in a message; the tokenizer's answer comes seconds later.
_WRITES = {
    "tokenizer": (f"{INBOX}.>", "hr.beat_ask"),
    "scheduler": (f"{PUBLIC}.events.*",),
    "detokenizer": (f"{INBOX}.>",),
}
_ASKS = tuple(f"{PUBLIC}.{verb}.*.*" for verb in ("generate", "cancel", "tokenize", "detokenize"))
_LOOKS = (f"{PUBLIC}.models", f"{PUBLIC}.status", f"{PUBLIC}.trace.*")


@dataclass(frozen=True, slots=True)
class Login:
    """How to connect: the servers without parameters, the user ("" for none), a file of certificates."""

    servers: tuple[str, ...]
    user: str = ""
    ca: str = ""

    @property
    def inbox_prefix(self) -> str:
        """Where the replies to this user go."""
        return f"{INBOX}.{self.user}" if self.user else INBOX

    def tls(self) -> ssl.SSLContext | None:
        """Checks the server with `ca`; None where the system's certificates do. Raises SetupError."""
        if not self.ca:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise SetupError(f"no certificates in {self.ca} ({error}): name another after `?ca=`") from None


def parse(url: str) -> Login:
    """Read a URL, or several joined by commas of one user."""
    parts = [urlsplit(part.strip()) for part in url.split(",")]
    ca = parse_qs(parts[0].query).get("ca", [""])[0]
    return Login(tuple(p._replace(query="").geturl() for p in parts), parts[0].username or "", ca)


def shown(url: str) -> str:
    """The URL without its passwords, for people and logs."""
    return ",".join(_at(urlsplit(part.strip()), user="").geturl() for part in url.split(","))


def as_user(url: str, user: str, password: str) -> str:
    """The URL with this user in place of whom it names."""
    login = f"{user}:{password}"
    return ",".join(_at(urlsplit(part.strip()), login).geturl() for part in url.split(","))


def password_of(url: str) -> str:
    """The password in a URL, "" without one."""
    return urlsplit(url.split(",")[0].strip()).password or ""


def tenant_of(url: str, default: str) -> str:
    """The tenant whose credentials a URL holds; `default` for services and nobody. Raises SetupError."""
    user = parse(url).user
    if not user or user.startswith(SERVICE_PREFIX):
        return default
    try:
        return untoken(user)
    except ValueError:
        raise SetupError(f"the user in nats_url is no tenant of `headrace auth`: {user!r:.80}") from None


def _at(parts: SplitResult, user: str) -> SplitResult:
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}@{host}" if user else host)


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subject patterns. `answers`: besides `publish`, one message to the reply subject of each that came."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def of_service(kind: str, fleet: str) -> Permissions:
    """A service of `kind`, one of SERVICES."""
    f, name = token(fleet), SERVICE_PREFIX + kind
    asks = (*_ASKS, *_LOOKS) if kind == "gateway" else ()
    publish = (
        *(f"hr.{f}.{other}.*.in.*" for other in _MAILBOXES[kind]),
        *_WRITES.get(kind, ()),
        *asks,
        f"hr.{f}.beat.{kind}.*",
        f"hr.{f}.beat_ask",
        f"$SRV.STATS.{name}.*",  # its own health check
    )
    subscribe = (
        f"hr.{f}.{kind}.*.in.*",
        *_READS.get(kind, ()),
        f"hr.{f}.beat.*.*",
        f"hr.{f}.beat_ask",
        "hr.beat_ask",
        f"{PUBLIC}.status",
        *(
            f"$SRV.{verb}{tail}"
            for verb in ("PING", "INFO", "STATS")
            for tail in ("", f".{name}", f".{name}.*")
        ),
        f"{INBOX}.{name}.>",
    )
    return Permissions(publish, subscribe, answers=True)


def of_operator(fleet: str) -> Permissions:
    """The command line of whoever runs the fleet: asks in any tenant's name, sees every service."""
    f = token(fleet)
    return Permissions(
        publish=(*_ASKS, *_LOOKS, f"{PUBLIC}.events.*.snapshot", f"hr.{f}.beat_ask", "$SRV.>"),
        subscribe=(f"{INBOX}.{user_of(OPERATOR)}.>", f"hr.{f}.beat.*.*", f"{PUBLIC}.events.*"),
    )


def of_tenant(tenant: str) -> Permissions:
    """A client: requests in its own name, replies of its own."""
    name = token(tenant)
    own = tuple(f"{PUBLIC}.{verb}.{name}.*" for verb in ("generate", "cancel", "tokenize", "detokenize"))
    return Permissions(publish=(*own, f"{PUBLIC}.models"), subscribe=(f"{INBOX}.{name}.>",))


def user_of(service: str) -> str:
    """The name under which a service or the operator connects."""
    return SERVICE_PREFIX + service
