"""Which pages of browsers may use this gateway. Pure.

A browser lets any page send some requests to 127.0.0.1 or the local network, and a page whose name its owner
points there afterwards (DNS rebinding) also read the answers. A gateway without keys refuses both: requests
to a host that is not its own, and those that change something from another origin. A page cannot send a key
that it does not have, so a gateway with keys takes every host.

    Host      an address; localhost; a name that cannot be registered, such as `gateway` or `gateway.ns.svc`;
              this machine's name; those in the origins of `http_cors`
    Origin    the same host, or one of `http_cors`; other programs than browsers send none
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from shared.errors import Forbidden

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
