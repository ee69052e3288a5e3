"""Starts a server with all its children as processes, waits until it is ready, measures and ends it."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.over_http import HttpTransport
from loadtest.bench.pacer import Pacer
from loadtest.bench.record import Record
from loadtest.processes import cpu_s, memory_bytes, tree
from shared.errors import BadRequest, SetupError
from shared.processes import die_with_parent

READY_S, POLL_S, STOP_S = 600.0, 0.02, 30.0
_FIRST = {"prompt": list(range(300, 308)), "max_tokens": 2, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Peer:
    """How a server is started, and where it answers."""

    name: str
    url: str
    command: str
    env: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """What it adds to the environment, `~` expanded in each part of a path list. Raises SetupError for a
        preload that is not there: the loader would go on without it and without an error."""
        made = {
            name: ":".join(os.path.expanduser(part) for part in value.split(":"))
            for name, value in self.env.items()
        }
        for path in filter(None, made.get("LD_PRELOAD", "").split(":")):
            if not Path(path).is_file():
                raise SetupError(
                    f"{self.name} preloads {path}, which does not exist: see docs/benchmarks/peers.md"
                )
        return made


@dataclass(slots=True)
class Running:
    """A server that answers, `ready_s` after its start."""

    process: subprocess.Popen[bytes]
    ready_s: float

    def memory_bytes(self) -> int:
        """The memory of all its processes; what they share counts once (PSS)."""
        return sum(memory_bytes(pid).get("Pss", 0) for pid in tree(self.process.pid))

    def cpu_s(self) -> float:
        """That all its processes have used since their start."""
        return cpu_s(*tree(self.process.pid))


def read_peers(path: Path) -> list[Peer]:
    """The servers of a TOML file, in its order. Raises BadRequest."""
    try:
        described = tomllib.loads(path.read_text())
        return [Peer(name, **each) for name, each in described.items()]
    except (OSError, ValueError, TypeError) as error:
        raise BadRequest(f"{path} describes no servers: {error}") from None


@contextmanager
def running(peer: Peer, log: Path, body: Mapping[str, Any] = _FIRST) -> Iterator[Running]:
    """A server for the length of a block, once it has answered `body`; what it prints goes to `log`. Raises
    SetupError when it ends or does not answer."""
    words = [os.path.expanduser(word) for word in shlex.split(peer.command)]
    environment = {**os.environ, **peer.environment()}
    began_s = time.monotonic()
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                words, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=die_with_parent(),
            )  # fmt: skip
        except OSError as error:
            raise SetupError(f"{peer.name} cannot be started: {error}") from None
    try:
        asyncio.run(_until_it_answers(peer, process, log, body))
        yield Running(process, time.monotonic() - began_s)
    finally:
        _end(process)


async def _until_it_answers(
    peer: Peer, process: subprocess.Popen[bytes], log: Path, body: Mapping[str, Any]
) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        transport, record = HttpTransport(peer.url, Pacer(), timeout_s=READY_S), Record("", 0)
        try:
            await transport.find_model()
            await transport.send({**body}, record)
        except SetupError as error:  # the server does not listen yet
            record.error = error.message
        finally:
            await transport.close()
        if not record.error:
            return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise SetupError(f"{peer.name} does not answer ({record.error}): see {log}")
        await asyncio.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, wait, then SIGKILL to what is left of its session."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
