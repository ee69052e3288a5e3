"""Logins and permissions at the nats-server: each service, tenant and operator gets only what it needs.

    tenant ──generate, cancel, tokenize, … with its own name──▶ tokenizer, detokenizer, scheduler
    tenant ◀──────────── replies below its own inbox ────────── tokenizer, detokenizer
    service ──mailboxes of the services it works with──▶ service

A tenant can neither send requests as another tenant nor read another's replies, and no tenant reaches a
mailbox. A service that only answers requests may publish one message to each reply subject it receives. The
tokenizer and the detokenizer may publish to every inbox, so they check the reply subject: it must lie below
the inbox of the tenant in the request's subject (`can_answer`). The gateway, the keeper and the operator send
requests for any tenant, and read the replies in a part of the tenant's inbox (`reply_inbox`).

A nats-server URL includes the user and the certificates:

    nats://USER:PASSWORD@HOST:PORT            a user of `headrace auth`, or any other
    tls://USER:PASSWORD@HOST:PORT?ca=FILE     the same, with the server's certificate checked by FILE
    …?tenants=accounts                        of a service, at a server where each tenant has an account

A user reads replies below its own inbox, `_INBOX.USER`; the server forbids other users to subscribe there.
The user name of a tenant is its (escaped) name; the names of services start with `headrace-`.

With an account for each tenant (services/launcher/commands/auth.py) the server alone keeps tenants apart:
requests in a tenant's name can only come from its account, and what lies below `_INBOX.TENANT` reaches no
other. There a tenant may read replies at any inbox, so services map each of them below the tenant's
(`mapped`).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, urlsplit

from shared.errors import SetupError
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery

DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
SERVICE_PREFIX = "headrace-"
OPERATOR = "operator"
LEAF = "leaf"
INBOX = "_INBOX"
MAPPED = f"{SERVICE_PREFIX}account"  # `_INBOX.TENANT.MAPPED.x` of the services is `_INBOX.x` of the tenant
_ACCOUNTS = "tenants=accounts"  # in the query of a URL
CLASSES = ("interactive", "standard", "batch")  # service classes, the highest first
DEFAULT_CLASSES = ("standard", "batch")  # of a tenant without an entry in `tenant_classes`

_STREAMS = (subjects.WORK_STREAM, subjects.RECORD_STREAM, subjects.FILE_STREAM, subjects.STATE_STREAM)
_MAILBOXES = {  # sender -> receivers
    "tokenizer": ("scheduler", "tokenizer"),
    "scheduler": ("tokenizer", "executor", "kv_offload", "detokenizer"),
    "executor": ("scheduler",),
    "kv_offload": ("scheduler", "kv_offload"),
    "detokenizer": ("scheduler", "detokenizer"),
    "gateway": (),
    "keeper": (),
}
SERVICES = tuple(_MAILBOXES)
_READS = {
    "tokenizer": (
        f"{subjects.PUBLIC}.generate.*.*",
        f"{subjects.PUBLIC}.cancel.*.*",
        f"{subjects.PUBLIC}.tokenize.*.*",
        f"{subjects.PUBLIC}.detokenize.*.*",  # of aliases, to forward
        f"{subjects.PUBLIC}.alias.*",
        f"{subjects.PUBLIC}.models",
        f"{subjects.PUBLIC}.models.*",
        "hr.*.beat.tokenizer.*",
        f"{subjects.STORE}.check.*.*",
    ),
    "scheduler": (
        f"{subjects.PUBLIC}.cancel.*.*",
        f"{subjects.PUBLIC}.trace.*",
        f"{subjects.PUBLIC}.events.*.snapshot",
        f"{subjects.PUBLIC}.policy.*",
        f"{subjects.PUBLIC}.sleep.*",
    ),
    "detokenizer": (
        *(f"{subjects.PUBLIC}.{verb}.*.*" for verb in ("detokenize", "cancel", "attach")),
        "_R.*.*",
        f"{subjects.STORE}.resume.*.*",
    ),
    "keeper": (
        *(
            f"{subjects.PUBLIC}.{verb}.*.*"
            for verb in ("submit", "result", "cancel", "delete", "keep", "files", "batches", "forward")
        ),
        f"{subjects.PUBLIC}.done.*.*",
        f"{subjects.STORE}.runs.*.*",
    ),
}
# The inbox of a request travels to the detokenizer in a message; the tokenizer's answer may follow late.
_WRITES = {
    "tokenizer": (
        *(f"{INBOX}.>", "hr.beat_ask", f"{subjects.PUBLIC}.models"),  # see queries.py
        *(
            f"{subjects.PUBLIC}.{verb}.*.*" for verb in ("generate", "tokenize", "detokenize")
        ),  # forwarded: aliases.py
        *(subjects.ALIASES, subjects.ALIAS_ALL),
        *(f"$JS.API.STREAM.{verb}.{subjects.ALIAS_STREAM}" for verb in ("INFO", "CREATE")),
        *(f"$JS.API.DIRECT.GET.{subjects.ALIAS_STREAM}.>", f"$JS.API.STREAM.MSG.GET.{subjects.ALIAS_STREAM}"),
    ),
    "gateway": (subjects.ALIASES,),
    "scheduler": (f"{subjects.PUBLIC}.events.*",),
    "detokenizer": (f"{INBOX}.>", f"{subjects.STORE}.state.*.*"),
    "keeper": (
        f"{subjects.PUBLIC}.generate.*.*",
        f"{subjects.PUBLIC}.cancel.*.*",
        f"{subjects.PUBLIC}.models",
        f"{subjects.PUBLIC}.done.*.*",
        f"{subjects.PUBLIC}.forward.*.*",
        f"{subjects.STORE}.>",
        f"{INBOX}.*.{MAPPED}.>",  # the permission to answer is for the subject before `mapped`
        *(
            f"$JS.API.STREAM.{verb}.{stream}"
            for verb in ("INFO", "CREATE")
            for stream in (*_STREAMS, subjects.HOOK_STREAM)
        ),
        *(f"$JS.API.DIRECT.GET.{stream}.>" for stream in _STREAMS),
        *(f"$JS.API.STREAM.MSG.GET.{stream}" for stream in _STREAMS),
        *(
            f"$JS.API.STREAM.PURGE.{stream}"
            for stream in (subjects.FILE_STREAM, subjects.STATE_STREAM, subjects.HOOK_STREAM)
        ),
        f"$JS.API.CONSUMER.CREATE.{subjects.WORK_STREAM}.*.{subjects.STORE}.work.*.>",
        f"$JS.API.CONSUMER.CREATE.{subjects.HOOK_STREAM}.*.{subjects.STORE}.hook.*.>",
        f"$JS.API.CONSUMER.DELETE.{subjects.WORK_STREAM}.*",
        f"$JS.API.CONSUMER.LIST.{subjects.WORK_STREAM}",
        *(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*" for stream in (subjects.WORK_STREAM, subjects.HOOK_STREAM)),
        *(f"$JS.ACK.{stream}.>" for stream in (subjects.WORK_STREAM, subjects.HOOK_STREAM)),
    ),
}
# The gateway alone may have an answer stored: a tenant has `submit`, and needs no way to fill the store.
_KEEPS = f"{subjects.PUBLIC}.keep.*.*"
_VERBS = (
    "generate", "cancel", "tokenize", "detokenize", "submit", "result", "delete", "attach", "files",
    "batches",
)  # fmt: skip
_ASKS = (*(f"{subjects.PUBLIC}.{verb}.*.*" for verb in _VERBS), f"{subjects.PUBLIC}.models.*")
_IN_A_NAME = frozenset((*_VERBS, "models", "keep", "forward"))  # the tenant follows the verb
_LOOKS = (f"{subjects.PUBLIC}.models", f"{subjects.PUBLIC}.status", f"{subjects.PUBLIC}.trace.*")


@dataclass(frozen=True, slots=True)
class Login:
    """Servers without URL parameters, the user ("" for none), a file of certificates ("" for none)."""

    servers: tuple[str, ...]
    user: str = ""
    ca: str = ""
    accounts: bool = False  # each tenant has an account

    @property
    def inbox_prefix(self) -> str:
        """The prefix of this user's reply subjects."""
        return f"{INBOX}.{self.user}" if self.user else INBOX

    def tls(self) -> ssl.SSLContext | None:
        """A context that checks the server with `ca`; None: the system's certificates. Raises SetupError."""
        if not self.ca:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise SetupError(f"no certificates in {self.ca} ({error}): name another after `?ca=`") from None


def parse(url: str) -> Login:
    """Read a URL, or several joined by commas of one user. Raises SetupError."""
    parts = parts_of(url)
    ca = parse_qs(parts[0].query).get("ca", [""])[0]
    servers = tuple(p._replace(query="").geturl() for p in parts)
    return Login(servers, parts[0].username or "", ca, _ACCOUNTS in parts[0].query.split("&"))


def parts_of(url: str) -> list[SplitResult]:
    """The parts of a URL, or of several joined by commas. Raises SetupError for one that cannot be read."""
    try:
        return [urlsplit(part.strip()) for part in url.split(",")]
    except ValueError:  # its text may have the password
        raise SetupError(
            "the URL of a nats-server cannot be read: nats://host:port is expected, with brackets around the "
            "host only if it is an IPv6 address"
        ) from None


def with_accounts(url: str, *, on: bool) -> str:
    """The URL for a server where each tenant has an account or, not `on`, for one where none has."""
    first, comma, others = url.partition(",")
    (parts,) = parts_of(first)
    query = [each for each in parts.query.split("&") if each and each != _ACCOUNTS]
    query += [_ACCOUNTS] if on else []
    return parts._replace(query="&".join(query)).geturl() + comma + others


def shown(url: str) -> str:
    """The URL without its passwords, for people and logs."""
    return ",".join(_at(each, user="").geturl() for each in parts_of(url))


def as_user(url: str, user: str, password: str) -> str:
    """The URL with this user instead of its own."""
    login = f"{user}:{password}"
    return ",".join(_at(each, login).geturl() for each in parts_of(url))


def password_of(url: str) -> str:
    """The password in a URL, "" without one."""
    return parts_of(url)[0].password or ""


def tenant_of(url: str, default: str) -> str:
    """The tenant in the credentials of a URL; `default` for services and no user. Raises SetupError."""
    user = parse(url).user
    if not user or user.startswith(SERVICE_PREFIX):
        return default
    try:
        return subjects.untoken(user)
    except ValueError:
        raise SetupError(f"the user in nats_url is not a tenant of `headrace auth`: {user!r:.80}") from None


def _at(parts: SplitResult, user: str) -> SplitResult:
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}@{host}" if user else host)


def reply_inbox(user: str, tenant: str, own: str) -> str:
    """The inbox of `user` for replies to requests as `tenant`, a subject token; `own` is a fresh inbox of its
    connection."""
    if not user.startswith(SERVICE_PREFIX):
        return own
    return f"{INBOX}.{tenant}.{user}.{own.rpartition('.')[2]}"


def mapped(asked: Delivery) -> Delivery:
    """The request with the subject at which a reply reaches its sender, at a server where each tenant has an
    account: `_INBOX.x` there is another subject in the account of the services; below `_INBOX.TENANT` both
    are the same. A reply subject that is no inbox stays, and is refused."""
    verb, _, name = asked.subject.removeprefix(f"{subjects.PUBLIC}.").partition(".")
    own = f"{INBOX}.{name.partition('.')[0]}."
    inbox = asked.reply.removeprefix(f"{INBOX}.")
    if verb not in _IN_A_NAME or not name or inbox == asked.reply or asked.reply.startswith(own):
        return asked
    return asked._replace(reply=f"{own}{MAPPED}.{inbox}")


def is_keepers(inbox: str) -> bool:
    """True for an inbox of a keeper's requests as a tenant."""
    return inbox.split(".")[2:3] == [user_of("keeper")]


def can_answer(bus: Bus, asked: Delivery) -> bool:
    """True if an answer may go to the reply subject of `asked`. With the users of `headrace auth` it must lie
    below the inbox of the tenant in the subject or, for requests of services and the operator, below one of
    theirs: this service may publish where the sender of the request may not."""
    if not subjects.is_inbox(asked.reply):
        return False
    if not bus.user.startswith(SERVICE_PREFIX):
        return True
    verb, _, name = asked.subject.removeprefix(f"{subjects.PUBLIC}.").partition(".")
    below = f"{name.partition('.')[0]}." if verb in _IN_A_NAME and name else SERVICE_PREFIX
    return asked.reply.startswith(f"{INBOX}.{below}")


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subject patterns. `answers`: may also publish one message to the reply subject of each request."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def of_service(kind: str, fleet: str) -> Permissions:
    """The permissions of a service `kind`, one of SERVICES."""
    f, name = subjects.token(fleet), SERVICE_PREFIX + kind
    asks = (*_ASKS, _KEEPS, *_LOOKS, f"hr.{f}.metrics") if kind == "gateway" else ()
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
        *((subjects.ALIAS_ALL, subjects.ALIASES) if kind in ("tokenizer", "gateway", "keeper") else ()),
        f"hr.{f}.beat.*.*",
        f"hr.{f}.beat_ask",
        "hr.beat_ask",
        f"hr.{f}.metrics",
        f"{subjects.PUBLIC}.status",
        *(
            f"$SRV.{verb}{tail}"
            for verb in ("PING", "INFO", "STATS")
            for tail in ("", f".{name}", f".{name}.*")
        ),
        *(_inboxes(kind) if kind in ("gateway", "keeper") else (f"{INBOX}.{name}.>",)),
    )
    return Permissions(publish, subscribe, answers=True)


def of_operator(fleet: str) -> Permissions:
    """The permissions of the operator's command line: requests for any tenant, the state of all services."""
    f = subjects.token(fleet)
    return Permissions(
        publish=(
            *(
                *_ASKS,
                *_LOOKS,
                f"{subjects.PUBLIC}.events.*.snapshot",
                f"{subjects.PUBLIC}.policy.*",
                f"{subjects.PUBLIC}.alias.*",
            ),
            *(f"{subjects.PUBLIC}.sleep.*", subjects.LOAD_ALL),
            *(f"hr.{f}.beat_ask", "$SRV.>"),
        ),
        subscribe=(
            *(
                *_inboxes(OPERATOR),
                f"hr.{f}.beat.*.*",
                f"{subjects.PUBLIC}.events.*",
                f"{subjects.PUBLIC}.done.*.*",
            ),
            subjects.LOAD_ALL,  # `headrace up` answers
        ),
        answers=True,
    )


def of_tenant(tenant: str) -> Permissions:
    """The permissions of a tenant: its own requests and replies. With accounts they are what the two accounts
    exchange."""
    name = subjects.token(tenant)
    own = tuple(f"{subjects.PUBLIC}.{verb}.{name}.*" for verb in _VERBS)
    return Permissions(
        publish=(*own, f"{subjects.PUBLIC}.models.{name}"),
        subscribe=(f"{INBOX}.{name}.>", f"{subjects.PUBLIC}.done.{name}.*"),
    )


def of_leaf() -> Permissions:
    """The permissions of the nats-server of an edge: requests for any tenant go up, replies to any tenant
    come down. Allowed subjects are those that services subscribe to, as wide as they do: a server compares
    patterns, and `generate.acme.*` is no part of `generate.*.MODEL`."""
    verbs = ("generate", "cancel", "tokenize", "detokenize", "attach", "forward", "files", "batches")
    return Permissions(
        publish=(
            *(f"{subjects.PUBLIC}.{verb}.*.*" for verb in verbs),
            f"{subjects.PUBLIC}.models",
            f"{subjects.PUBLIC}.models.*",
        ),
        subscribe=(f"{INBOX}.>",),
    )


def _inboxes(service: str) -> tuple[str, ...]:
    """The inboxes of a service that sends requests as itself and as every tenant."""
    name = user_of(service)
    return f"{INBOX}.{name}.>", f"{INBOX}.*.{name}.>"


def user_of(service: str) -> str:
    """The user name of a service or of the operator."""
    return SERVICE_PREFIX + service
