"""Logins at the nats-server, and inboxes that an answer may go to. permissions.py has what each may do.

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


def user_of(service: str) -> str:
    """The user name of a service or of the operator."""
    return SERVICE_PREFIX + service
