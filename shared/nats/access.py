"""Each service, tenant and operator has a login at the nats-server and the permissions it needs, no more.

    tenant ──generate, cancel, tokenize, … of its own name──▶ tokenizer, detokenizer, scheduler
    tenant ◀──────────── replies below its own inbox ──────── tokenizer, detokenizer
    service ──mailboxes of those it works with──▶ service

So a tenant can neither ask in another's name nor read another's replies, and no tenant reaches a mailbox. A
service that answers only whoever asks it may publish to that reply subject once, and to no other inbox.
The tokenizer and the detokenizer may publish to every inbox, so a service looks itself where an answer would
go: the reply subject must lie below the inbox of the tenant in the subject (`answerable`). The gateway and
the operator ask in the name of others, and hear the answers below those inboxes, at a place of their own
(`reply_inbox`).

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
from shared.nats.interface import Bus, Delivery
from shared.nats.subjects import PUBLIC, is_inbox, token, untoken

DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
SERVICE_PREFIX = "headrace-"
OPERATOR = "operator"
INBOX = "_INBOX"
CLASSES = ("interactive", "standard", "batch")  # service classes, the highest first
DEFAULT_CLASSES = ("standard", "batch")  # of a tenant whose credentials name none

_MAILBOXES = {
    "tokenizer": ("scheduler", "tokenizer"),
    "scheduler": ("tokenizer", "executor", "kv_offload", "detokenizer"),
    "executor": ("scheduler",),
    "kv_offload": ("scheduler",),
    "detokenizer": ("scheduler", "detokenizer"),
    "gateway": (),
}  # who sends to whom
SERVICES = tuple(_MAILBOXES)
_READS = {
    "tokenizer": (
        f"{PUBLIC}.generate.*.*",
        f"{PUBLIC}.cancel.*.*",
        f"{PUBLIC}.tokenize.*.*",
        f"{PUBLIC}.models",
        f"{PUBLIC}.models.*",
        "hr.*.beat.tokenizer.*",
    ),
    "scheduler": (f"{PUBLIC}.cancel.*.*", f"{PUBLIC}.trace.*", f"{PUBLIC}.events.*.snapshot"),
    "detokenizer": (f"{PUBLIC}.detokenize.*.*", f"{PUBLIC}.cancel.*.*", "_R.*.*"),
}
# The inbox of a request travels to the detokenizer in a message; the tokenizer's answer comes seconds later.
_WRITES = {
    "tokenizer": (f"{INBOX}.>", "hr.beat_ask", f"{PUBLIC}.tokenize.*.*"),  # the last: does anybody listen?
    "scheduler": (f"{PUBLIC}.events.*",),
    "detokenizer": (f"{INBOX}.>",),
}
_VERBS = ("generate", "cancel", "tokenize", "detokenize")
_ASKS = (*(f"{PUBLIC}.{verb}.*.*" for verb in _VERBS), f"{PUBLIC}.models.*")
_IN_A_NAME = frozenset((*_VERBS, "models"))  # the tenant follows the verb
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


def reply_inbox(user: str, tenant: str, own: str) -> str:
    """Where `user` hears the answers to what it asks in the name of `tenant`, a subject token; `own` is a
    fresh inbox of its connection."""
    if not user.startswith(SERVICE_PREFIX):
        return own
    return f"{INBOX}.{tenant}.{user}.{own.rpartition('.')[2]}"


def answerable(bus: Bus, asked: Delivery) -> bool:
    """True when `asked` has a reply subject to which an answer may go. With the users of `headrace auth` it
    must lie below the inbox of the tenant in the subject, or, for what only services and the operator may
    ask, below one of theirs: its sender may not be able to publish anywhere else, but we are."""
    if not is_inbox(asked.reply):
        return False
    if not bus.user.startswith(SERVICE_PREFIX):
        return True
    verb, _, name = asked.subject.removeprefix(f"{PUBLIC}.").partition(".")
    below = f"{name.partition('.')[0]}." if verb in _IN_A_NAME and name else SERVICE_PREFIX
    return asked.reply.startswith(f"{INBOX}.{below}")


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
        *(_inboxes(kind) if kind == "gateway" else (f"{INBOX}.{name}.>",)),
    )
    return Permissions(publish, subscribe, answers=True)


def of_operator(fleet: str) -> Permissions:
    """The command line of whoever runs the fleet: asks in any tenant's name, sees every service."""
    f = token(fleet)
    return Permissions(
        publish=(*_ASKS, *_LOOKS, f"{PUBLIC}.events.*.snapshot", f"hr.{f}.beat_ask", "$SRV.>"),
        subscribe=(*_inboxes(OPERATOR), f"hr.{f}.beat.*.*", f"{PUBLIC}.events.*"),
    )


def of_tenant(tenant: str) -> Permissions:
    """A client: requests in its own name, replies of its own."""
    name = token(tenant)
    own = tuple(f"{PUBLIC}.{verb}.{name}.*" for verb in _VERBS)
    return Permissions(publish=(*own, f"{PUBLIC}.models.{name}"), subscribe=(f"{INBOX}.{name}.>",))


def _inboxes(service: str) -> tuple[str, ...]:
    """Of one that asks in its own name and in that of every tenant."""
    name = user_of(service)
    return f"{INBOX}.{name}.>", f"{INBOX}.*.{name}.>"


def user_of(service: str) -> str:
    """The name under which a service or the operator connects."""
    return SERVICE_PREFIX + service
