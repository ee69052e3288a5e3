"""A TCP port to listen on, or a typed error that says who should change what."""

from __future__ import annotations

import socket

from shared.errors import SetupError

HTTP = "set `http` to another host:port, or to off"  # of the gateway
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # where whoever listens everywhere is found


def bind(
    host: str, port: int, who: str = "the gateway", mend: str = HTTP, *, listen: bool = True
) -> socket.socket:
    """A bound socket; port 0 is any free one. Raises SetupError when it is taken or not of this machine;
    `who` wants it, `mend` says what to set then.

    Without `listen` it only holds the port: whoever binds it here may listen on it, on Linux, and nobody is
    given it as any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refused(host, port, error, who, mend) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if listen:
            bound.listen(1)  # two may be bound with SO_REUSEADDR; only one can listen
    except OSError as error:
        bound.close()
        raise _refused(host, port, error, who, mend) from None
    return bound


def http_url(host: str, port: int) -> str:
    """How a client on this machine calls it."""
    host = _ANY.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refused(host: str, port: int, error: OSError, who: str, mend: str) -> SetupError:
    why = error.strerror or str(error)
    return SetupError(f"{who} cannot listen on {host}:{port} ({why}): free the port, or {mend}")
