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

import re
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

# Each subject below `headrace.v1` with its senders and receivers: services, or all of them; the operator; a
# tenant; `leaf`, the server of an edge. T is a tenant's name: its own for the tenant, any for the others.
PUBLIC = (
    ("generate.T.*", "tenant operator gateway leaf keeper tokenizer", "tokenizer"),
    ("cancel.T.*", "tenant operator gateway leaf keeper", "tokenizer scheduler detokenizer keeper"),
    ("tokenize.T.*", "tenant operator gateway leaf tokenizer", "tokenizer"),
    ("detokenize.T.*", "tenant operator gateway leaf tokenizer", "tokenizer detokenizer"),
    ("attach.T.*", "tenant operator gateway leaf", "detokenizer"),
    ("submit.T.*", "tenant operator gateway", "keeper"),
    ("result.T.*", "tenant operator gateway", "keeper"),
    ("delete.T.*", "tenant operator gateway", "keeper"),
    ("files.T.*", "tenant operator gateway leaf", "keeper"),
    ("batches.T.*", "tenant operator gateway leaf", "keeper"),
    ("forward.T.*", "keeper leaf", "keeper"),
    ("keep.T.*", "gateway", "keeper"),  # a tenant has `submit`, and needs no way to fill the store
    ("done.T.*", "keeper", "keeper operator tenant"),
    ("session.T.*", "tenant operator gateway", "scheduler"),
    ("sessions.T", "tenant operator gateway", "scheduler"),
    ("sessions", "operator", "scheduler"),
    ("models.T", "tenant operator gateway leaf", "tokenizer"),
    ("models", "operator gateway leaf keeper tokenizer", "tokenizer"),
    ("status", "operator gateway", "all"),
    ("trace.*", "operator gateway", "scheduler"),
    ("events.*", "scheduler", "operator"),
    ("events.*.snapshot", "operator", "scheduler"),
    ("policy.*", "operator", "scheduler"),
    ("sleep.*", "operator", "scheduler"),
    ("alias.*", "operator", "tokenizer"),
    ("adapter.*", "operator gateway", "tokenizer"),
    ("load.*", "operator", "operator"),  # `headrace up` answers
)
_STORED = (subjects.WORK_STREAM, subjects.RECORD_STREAM, subjects.FILE_STREAM, subjects.STATE_STREAM)
_PULLED = (subjects.WORK_STREAM, subjects.HOOK_STREAM)
_MADE = (*_STORED, subjects.HOOK_STREAM, subjects.ALIAS_STREAM)
# The others: F is a fleet, K the kind of a service or the operator, with its prefix in the names of users.
_INTERNAL = (
    ("hr.F.beat.K.*", "all", ""),
    ("hr.F.beat.*.*", "", "all operator"),
    ("hr.F.beat_ask", "all operator", "all"),
    ("hr.*.beat.tokenizer.*", "", "tokenizer"),
    ("hr.beat_ask", "tokenizer", "all"),
    ("hr.F.metrics", "gateway", "all"),
    ("hr.F.K.*.in.*", "", "all"),
    ("_R.*.*", "", "detokenizer"),
    # The inbox of a request travels to the detokenizer in a message; the tokenizer's answer may follow late.
    (f"{INBOX}.>", "tokenizer detokenizer", "leaf"),
    (f"{INBOX}.T.>", "", "tenant"),
    (f"{INBOX}.{SERVICE_PREFIX}K.>", "", "all operator"),
    (f"{INBOX}.*.{SERVICE_PREFIX}K.>", "", "gateway keeper operator"),  # they send requests of all tenants
    (f"{INBOX}.*.{MAPPED}.>", "keeper", ""),  # the permission to answer is for the subject before `mapped`
    *(
        (f"$SRV.{verb}{which}", "", "all")
        for verb in ("PING", "INFO", "STATS")
        for which in ("", f".{SERVICE_PREFIX}K", f".{SERVICE_PREFIX}K.*")
    ),
    ("$SRV.>", "operator", ""),
    (f"{subjects.STORE}.>", "keeper", ""),
    (f"{subjects.STORE}.check.*.*", "", "tokenizer"),
    (f"{subjects.STORE}.runs.*.*", "", "keeper"),
    (f"{subjects.STORE}.state.*.*", "detokenizer", ""),
    (f"{subjects.STORE}.resume.*.*", "", "detokenizer"),
    (subjects.ALIAS_ALL, "tokenizer", "tokenizer gateway keeper"),
    (f"{subjects.STORE}.adapter.*", "tokenizer", "executor"),
    (subjects.ALIASES, "tokenizer gateway", "tokenizer gateway keeper"),
    *(
        (f"$JS.{call.format(stream)}", "tokenizer" if stream == subjects.ALIAS_STREAM else "keeper", "")
        for call, streams in (
            ("API.STREAM.INFO.{}", _MADE),
            ("API.STREAM.CREATE.{}", _MADE),
            ("API.STREAM.MSG.GET.{}", (*_STORED, subjects.ALIAS_STREAM)),
            ("API.DIRECT.GET.{}.>", (*_STORED, subjects.ALIAS_STREAM)),
            ("API.STREAM.PURGE.{}", (subjects.FILE_STREAM, subjects.STATE_STREAM, subjects.HOOK_STREAM)),
            ("API.CONSUMER.LIST.{}", (subjects.WORK_STREAM,)),
            ("API.CONSUMER.DELETE.{}.*", (subjects.WORK_STREAM,)),
            (f"API.CONSUMER.CREATE.{{}}.*.{subjects.STORE}.work.*.>", (subjects.WORK_STREAM,)),
            (f"API.CONSUMER.CREATE.{{}}.*.{subjects.STORE}.hook.*.>", (subjects.HOOK_STREAM,)),
            ("API.CONSUMER.MSG.NEXT.{}.*", _PULLED),
            ("ACK.{}.>", _PULLED),
        )
        for stream in streams
    ),
)
_NAMES = re.compile(r"\b[TFK]\b")
_IN_A_NAME = frozenset(row[0].partition(".")[0] for row in PUBLIC if ".T" in row[0])  # the tenant follows


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
    return _of(kind, subjects.token(fleet))


def of_operator(fleet: str) -> Permissions:
    """The permissions of the operator's command line: requests for any tenant, the state of all services."""
    return _of(OPERATOR, subjects.token(fleet))


def of_tenant(tenant: str) -> Permissions:
    """The permissions of a tenant: its own requests and replies. With accounts they are what the two accounts
    exchange."""
    return _of("tenant", tenant=subjects.token(tenant))


def of_leaf() -> Permissions:
    """The permissions of the nats-server of an edge: requests for any tenant go up, replies to any tenant
    come down. Allowed subjects are those that services subscribe to, as wide as they do: a server compares
    patterns, and `generate.acme.*` is no part of `generate.*.MODEL`."""
    return _of(LEAF)


def _of(name: str, fleet: str = "", tenant: str = "*") -> Permissions:
    """What the tables allow to one of their names; tokens of subjects."""
    own, names = {"T": tenant, "F": fleet, "K": name}, {name, *(("all",) if name in SERVICES else ())}
    rows = [*((f"{subjects.PUBLIC}.{row[0]}", *row[1:]) for row in PUBLIC), *_INTERNAL]
    publish, subscribe = (
        [_NAMES.sub(lambda found: own[found[0]], row[0]) for row in rows if names & {*row[column].split()}]
        for column in (1, 2)
    )
    publish += [f"hr.{fleet}.{receiver}.*.in.*" for receiver in _MAILBOXES.get(name, ())]
    return Permissions(tuple(publish), tuple(subscribe), answers=name in (*SERVICES, OPERATOR))


def user_of(service: str) -> str:
    """The user name of a service or of the operator."""
    return SERVICE_PREFIX + service
