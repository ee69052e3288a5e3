"""`Keys`: the API keys of tenants. `Visitors`: which pages of browsers may use this gateway.

A browser lets any page send some requests to 127.0.0.1 or the local network, and a page whose name its owner
points there afterwards (DNS rebinding) also read the answers. A gateway without keys refuses both: requests
to a host that is not its own, and those that change something from another origin. A page cannot send a key
that it does not have, so a gateway with keys takes every host.

    Host      an address; localhost; a name that cannot be registered, such as `gateway` or `gateway.ns.svc`;
              this machine's name; those in the origins of `http_cors`
    Origin    the same host, or one of `http_cors`; other programs than browsers send none
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Mapping, Sequence
from hashlib import sha256
from ipaddress import ip_address
from urllib.parse import urlsplit

from services.gateway.exchange import NotAuthorized
from shared.config import WatchedFile
from shared.errors import Forbidden
from shared.nats import access
from shared.nats.subjects import DEFAULT_TENANT, MAX_NAME_CHARS

log = logging.getLogger("headrace.gateway")

OPERATOR = access.user_of(access.OPERATOR)
HASHED = "sha256:"
_HEX = re.compile(r"[0-9a-f]{64}")

ANY = "*"
SAFE = ("GET", "HEAD", "OPTIONS")
# Names below these cannot be registered: https://www.iana.org/assignments/special-use-domain-names, and
# `internal`; `lan` and `svc` (of Kubernetes) are no top-level domains.
_PRIVATE = (".localhost", ".local", ".internal", ".lan", ".svc", ".home.arpa")
_OWN = ("same-origin", "none")  # values of `Sec-Fetch-Site`, which no page can set


def is_from_browser(headers: Mapping[str, str]) -> bool:
    """True for a request that a page may have caused."""
    return "origin" in headers or "sec-fetch-site" in headers


class Visitors:
    """The check of a gateway's requests."""

    def __init__(self, origins: Sequence[str] = (), *, keys: bool = False) -> None:
        """`origins`: those of `http_cors`; ANY for all. `keys`: every request needs one."""
        self._origins = {*origins}
        self._all = keys or ANY in self._origins
        self._names = {socket.gethostname().lower(), *(_name(urlsplit(each).netloc) for each in origins)}

    def refusal(self, method: str, headers: Mapping[str, str]) -> Forbidden | None:
        """Why a request is refused; None for one that is welcome."""
        if self._all:
            return None
        host = headers.get("host", "")
        if not self._is_own(name := _name(host)):
            return Forbidden(
                f"a gateway without API keys is not used as {name!r:.80}: add its origin to `http_cors`"
            )
        if method in SAFE or (origin := headers.get("origin")) is None:
            return None
        same = headers.get("sec-fetch-site") in _OWN or origin.partition("://")[2] == host
        if same or origin in self._origins or not _is_site(origin):
            return None
        return Forbidden(f"pages of {origin!r:.80} may not use this gateway: add the origin to `http_cors`")

    def _is_own(self, name: str) -> bool:
        private = not name or "." not in name or name.endswith(_PRIVATE)
        return private or name in self._names or _is_address(name)


def _name(host: str) -> str:
    """The host of a `Host` header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_site(origin: str) -> bool:
    """False for extensions and desktop programs, which have schemes of their own. `null` may be any page."""
    return origin == "null" or urlsplit(origin).scheme in ("http", "https")


def read_keys(text: str) -> dict[str, str]:
    """Tenants by the hash of their keys. Raises ValueError with the line number."""
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        if len(fields) != 2 or len(fields[0]) > MAX_NAME_CHARS:
            raise ValueError(f"line {number}: `tenant key` is expected")
        tenant, key = fields
        name = key.removeprefix(HASHED) if key.startswith(HASHED) else _hash(key)
        if not _HEX.fullmatch(name):
            raise ValueError(f"line {number}: {HASHED} and 64 hex digits are expected")
        if tenants.setdefault(name, tenant) != tenant:
            raise ValueError(f"line {number}: this key is another tenant's, too")
    return tenants


class Keys:
    """The API keys: a file of lines `tenant key`, read again when it changes. With an empty path all requests
    are allowed, as the default tenant.

        acme   hr-3f9c…                    the key that a client sends as `Authorization: Bearer hr-3f9c…`
        acme   sha256:9b74c9897bac…        or its SHA-256 in hex, so that the file holds no secret
        headrace-operator   hr-77aa…       may read /metrics; its other requests are the default tenant's
        # a comment

    Keys are looked up by their hash, so that the time of a lookup reveals nothing about them.
    """

    def __init__(self, path: str) -> None:
        """Raises SetupError if the file is invalid."""
        self.demanded = bool(path)
        self._file = WatchedFile("http_keys", path, read_keys, log) if path else None

    def tenant_of(self, authorization: str) -> str:
        """The tenant of the key in an `Authorization` header. Raises NotAuthorized."""
        if self._file is None:
            return DEFAULT_TENANT
        name = self._name_of(authorization)
        return DEFAULT_TENANT if name == OPERATOR else name

    def viewer_of(self, authorization: str) -> str | None:
        """The tenant whose requests a key may see; None: those of all. Raises NotAuthorized."""
        name = OPERATOR if self._file is None else self._name_of(authorization)
        return None if name == OPERATOR else name

    def only_operator(self, authorization: str) -> None:
        """Raises NotAuthorized, and Forbidden for a tenant's key."""
        if self._file is not None and self._name_of(authorization) != OPERATOR:
            raise Forbidden(f"this is for operators alone: send the key of {OPERATOR} in http_keys")

    def _name_of(self, authorization: str) -> str:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise NotAuthorized("no API key: send `Authorization: Bearer KEY` or `X-Api-Key: KEY`")
        name = self._file.value.get(_hash(key.strip())) if self._file is not None else None
        if name is None:
            raise NotAuthorized("unknown API key")
        return name

    def refresh(self) -> None:
        """Read the file again if it has changed; an invalid file is logged and ignored."""
        if self._file is not None:
            self._file.refresh()


def _hash(key: str) -> str:
    return sha256(key.encode()).hexdigest()
