"""`headrace health KIND`: does the service of this container do its work? For health checks.

The question goes to the one process that runs here, through NATS and its event loop, by its own credentials:
a process that hangs, has lost the broker, still loads or already drains is not healthy. `headrace serve`
leaves the id of its actor in the runtime folder, which a container has for itself.

It runs every few seconds beside the services, for ever: so it speaks the few lines of NATS it needs itself
(docs.nats.io, "Client Protocol") and imports neither a client nor the settings: a fifth of the CPU time.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import ssl
import tomllib
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from shared import login, subjects
from shared.errors import SetupError, Unavailable

WAIT_S = 3.0  # a step of a slow engine does not hold the event loop; a broker that is away does


def leave_note(kind: str, actor: str) -> None:
    """Say who runs here, where $XDG_RUNTIME_DIR is set."""
    if (note := _note(kind)) is not None:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(actor)


def health(kind: str) -> None:
    """Return when the service of this kind that runs here is ready. Raises SetupError, Unavailable."""
    note = _note(kind)
    if note is None or not note.exists():
        raise SetupError(f"no {kind} runs here: set XDG_RUNTIME_DIR for it and for this command")
    name = f"{login.SERVICE_PREFIX}{kind}.{subjects.token(note.read_text())}"
    try:
        state = json.loads(_ask(_url(), f"$SRV.STATS.{name}")).get("state")
    except (OSError, ValueError) as error:
        raise Unavailable(f"{name} does not answer: {error}") from None
    if state != "ready":
        raise Unavailable(f"{name} is {state}")


def _url() -> str:
    """`nats_url` as the service has it. Raises SetupError."""
    if url := os.environ.get("HEADRACE_NATS_URL"):
        return url
    try:
        path = os.environ.get("HEADRACE_CONFIG")
        return str(tomllib.loads(Path(path).read_text())["nats_url"]) if path else login.DEFAULT_NATS_URL
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(f"no nats_url in {path}: {error!r}") from None


def _ask(url: str, subject: str) -> bytes:
    """The body of the one answer. Raises OSError, ValueError."""
    who, first = login.parse(url), urlsplit(login.parse(url).servers[0])
    inbox = f"{who.inbox_prefix}.{secrets.token_hex(11)}"
    with socket.create_connection((first.hostname or "127.0.0.1", first.port or 4222), WAIT_S) as plain:
        info = json.loads(_line(plain.makefile("rb", buffering=0)).removeprefix("INFO "))
        secure = info.get("tls_required", False)
        wire = _encrypted(plain, who, first.hostname or "") if secure else plain
        hello = {"verbose": False, "pedantic": False, "user": who.user, "pass": login.password_of(url)}
        hello |= {"name": "headrace-health", "lang": "python", "version": "1"}
        hello |= {"headers": True, "no_responders": True}
        lines = [f"CONNECT {json.dumps(hello)}", f"SUB {inbox} 1", f"PUB {subject} {inbox} 0", "", "PING", ""]
        wire.sendall("\r\n".join(lines).encode())
        answers = wire.makefile("rb")
        while not (line := _line(answers)).startswith("MSG "):
            if line.startswith("HMSG"):  # headers come with the server's own 503 alone
                raise ValueError("nobody listens")
            if line.startswith("-ERR") or not line:
                raise ValueError(line or "the server ended the connection")
        return answers.read(int(line.split()[-1]))


def _encrypted(plain: socket.socket, who: login.Login, host: str) -> ssl.SSLSocket:
    return (who.tls() or ssl.create_default_context()).wrap_socket(plain, server_hostname=host)


def _line(stream: BinaryIO | socket.SocketIO) -> str:
    return stream.readline().decode().rstrip("\r\n")


def _note(kind: str) -> Path | None:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "headrace" / f"{kind}.actor" if runtime else None
