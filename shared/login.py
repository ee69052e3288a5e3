"""What a nats-server URL says besides the address: who connects, and by which certificates.

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
from shared.subjects import untoken

DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
SERVICE_PREFIX = "headrace-"
INBOX = "_INBOX"


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
