"""Which server and model a client command means: flags, then settings, then a running `headrace up`."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.launcher import run_file
from shared import login
from shared.bus import BusFault
from shared.config import DEFAULT_NATS_URL, Loaded
from shared.nats_bus import NatsBus
from shared.subjects import DEFAULT_TENANT

CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the model to ask there."""

    nats_url: str
    model: str

    @property
    def tenant(self) -> str:
        """In whose name to ask: the tenant whose credentials the URL holds."""
        return login.tenant_of(self.nats_url, DEFAULT_TENANT)


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
    """A connection for the length of a command. What the server does not let these credentials do is told.
    Raises SetupError when nobody is there."""
    bus = await NatsBus.connect(url, name="headrace-cli", timeout_s=CONNECT_TIMEOUT_S, on_fault=_tell)
    try:
        yield bus
    finally:
        await bus.drain()


def _tell(fault: BusFault) -> None:
    if fault.kind in ("permission", "refused"):
        print(f"these credentials are not for that: {fault.detail}", file=sys.stderr, flush=True)
