"""Which server and model a client command means: flags, then settings, then a running `headrace up`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.launcher import run_file
from shared.config import DEFAULT_NATS_URL, Loaded
from shared.nats_bus import NatsBus

CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the model to ask there."""

    nats_url: str
    model: str


def find_target(loaded: Loaded) -> Target:
    """Where to connect, and the model to ask for when a request names none."""
    from shared.model_files import served_name

    settings = loaded.settings
    note = run_file.read(run_file.path_for(settings))
    here = note if note is not None and settings.nats_url in ("", note.nats_url) else None
    named = settings.model_name or served_name(settings.model)
    chosen = loaded.origins["model"] != "default" or loaded.origins["model_name"] != "default"
    return Target(
        settings.nats_url or (here.nats_url if here else DEFAULT_NATS_URL),
        here.model if here and not chosen else named,
    )


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[NatsBus]:
    """A connection for the length of a command. Raises SetupError when nobody is there."""
    bus = await NatsBus.connect(url, name="headrace-cli", timeout_s=CONNECT_TIMEOUT_S)
    try:
        yield bus
    finally:
        await bus.drain()
