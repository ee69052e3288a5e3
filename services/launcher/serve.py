"""`headrace serve KIND` runs one service as one process; `headrace up` starts its services so, too."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import secrets
import socket
import ssl
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit

from services.launcher.supervisor import leave
from shared.errors import SetupError, Unavailable
from shared.nats import access, subjects

if TYPE_CHECKING:
    from shared.actor.runtime import Actor
    from shared.config import Settings
    from shared.nats.interface import Bus

# In the order of the pipeline, which is also the order in which they drain.
BUILDERS = {
    "gateway": "services.gateway.actor",
    "tokenizer": "services.tokenizer.actor",
    "scheduler": "services.scheduler.actor",
    "executor": "services.executor.actor",
    "kv_offload": "services.kv_offload.actor",
    "detokenizer": "services.detokenizer.actor",
}
KINDS = tuple(BUILDERS)
# What a kind's libraries read when they are imported. LMCache would report its use, log each discard, and
# take a share of the device, which belongs to the executor.
ENVIRONMENT = {
    "kv_offload": {
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "CUDA_VISIBLE_DEVICES": "",
    },
}

WAIT_S = 3.0  # a step of a slow engine does not hold the event loop; a broker that is away does


def builder(kind: str) -> Callable[[Settings], Actor]:
    """The function that builds an actor of this kind from the settings. Raises SetupError."""
    if kind not in BUILDERS:
        raise SetupError(f"there is no service {kind!r}: choose one of {', '.join(KINDS)}")
    try:
        module = importlib.import_module(BUILDERS[kind])
    except ModuleNotFoundError as error:
        raise SetupError(f"the {kind} needs the package {error.name}: pip install 'headrace[all]'") from error
    build: Callable[[Settings], Actor] = module.build
    return build


def serve(kind: str, settings: Settings, *, name: str = "") -> int:
    """Run one service until a signal drains it. Returns the exit status. `name` is how the log calls it; `up`
    gives one and puts it before each line itself. Raises SetupError."""
    from shared import processes
    from shared.actor.runtime import ProcessOptions, run
    from shared.config import DEFAULT_NATS_URL

    prefixed_by_up = bool(name) and not settings.log_json
    processes.setup(
        "" if prefixed_by_up else name or kind, level=settings.log_level, as_json=settings.log_json
    )
    os.environ.update(ENVIRONMENT.get(kind, {}))
    url = settings.nats_url or DEFAULT_NATS_URL
    actor_id = secrets.token_hex(4)
    if not name:
        leave_note(kind, actor_id)
    options = ProcessOptions(
        fleet=settings.fleet,
        host_id=settings.host_id,
        actor_id=actor_id,
        beat_interval_us=settings.beat_interval_ms * 1000,
        drain_timeout_s=settings.drain_timeout_s,
    )
    return leave(run(builder(kind)(settings), partial(_connect, url), options))


async def _connect(url: str, name: str) -> Bus:
    from shared.nats.bus import NatsBus

    return await NatsBus.connect(url, name=name)


def leave_note(kind: str, actor: str) -> None:
    """Say who runs here, where $XDG_RUNTIME_DIR is set."""
    if (note := _note(kind)) is not None:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(actor)


def health(kind: str) -> None:
    """`headrace health KIND`: return when the service of this kind that runs here is ready. Raises
    SetupError, Unavailable. For the health check of a container.

    The question goes to the one process that runs here, through NATS and its event loop, by its own
    credentials: a process that hangs, has lost the broker, still loads or already drains is not healthy.
    `serve` leaves the id of its actor in the runtime folder, which a container has for itself.

    It runs every few seconds beside the services, for ever: so it speaks the few lines of NATS it needs
    itself (docs.nats.io, "Client Protocol") and imports neither a client nor the settings: a fifth of the CPU
    time.
    """
    note = _note(kind)
    if note is None or not note.exists():
        raise SetupError(f"no {kind} runs here: set XDG_RUNTIME_DIR for it and for this command")
    name = f"{access.SERVICE_PREFIX}{kind}.{subjects.token(note.read_text())}"
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
        return str(tomllib.loads(Path(path).read_text())["nats_url"]) if path else access.DEFAULT_NATS_URL
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(f"no nats_url in {path}: {error!r}") from None


def _ask(url: str, subject: str) -> bytes:
    """The body of the one answer. Raises OSError, ValueError."""
    who, first = access.parse(url), urlsplit(access.parse(url).servers[0])
    inbox = f"{who.inbox_prefix}.{secrets.token_hex(11)}"
    with socket.create_connection((first.hostname or "127.0.0.1", first.port or 4222), WAIT_S) as plain:
        info = json.loads(_line(plain.makefile("rb", buffering=0)).removeprefix("INFO "))
        secure = info.get("tls_required", False)
        wire = _encrypted(plain, who, first.hostname or "") if secure else plain
        hello = {"verbose": False, "pedantic": False, "user": who.user, "pass": access.password_of(url)}
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


def _encrypted(plain: socket.socket, who: access.Login, host: str) -> ssl.SSLSocket:
    return (who.tls() or ssl.create_default_context()).wrap_socket(plain, server_hostname=host)


def _line(stream: BinaryIO | socket.SocketIO) -> str:
    return stream.readline().decode().rstrip("\r\n")


def _note(kind: str) -> Path | None:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "headrace" / f"{kind}.actor" if runtime else None


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m services.launcher.serve KIND`: settings from the environment alone."""
    from services.launcher.console import fail
    from shared.config import load

    parser = argparse.ArgumentParser(prog="python -m services.launcher.serve", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--name", default="", help="how the log calls it")
    given = parser.parse_args(argv)
    try:
        return serve(given.kind, load().settings, name=given.name)
    except SetupError as error:
        return fail(error)


if __name__ == "__main__":
    raise SystemExit(main())
