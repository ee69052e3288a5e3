"""The server under load: its address, its model, and its description of itself."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from loadtest.bench import flags
from loadtest.bench.drive import Transport
from loadtest.bench.over_http import HttpTransport
from loadtest.bench.over_nats import NatsTransport
from loadtest.bench.pacer import Pacer
from loadtest.bench.server_side import Counts, counts
from services.launcher.session import connected, find_target, path_for, read
from shared.client.client import Client
from shared.config import load
from shared.errors import BadRequest, SetupError


@dataclass(frozen=True, slots=True)
class Server:
    """Ready to be asked."""

    transport: Transport
    facts: dict[str, Any]
    counts: Callable[[], Awaitable[Counts | None]] | None = None


@asynccontextmanager
async def server(given: argparse.Namespace, pacer: Pacer) -> AsyncGenerator[Server]:
    """The one that the flags name. Raises SetupError, BadRequest."""
    over_nats = not given.url or given.url.startswith(flags.NATS)
    if given.url and (given.nats_url or given.fleet):
        raise BadRequest("--url names the server: leave out --nats-url and --fleet")
    make = _over_nats if over_nats else _over_http
    async with make(given, pacer) as made:
        yield made


@asynccontextmanager
async def _over_nats(given: argparse.Namespace, pacer: Pacer) -> AsyncGenerator[Server]:
    loaded = load(None, {"nats_url": given.url or given.nats_url or None, "fleet": given.fleet or None})
    if given.fleet and not loaded.settings.nats_url and read(path_for(loaded.settings)) is None:
        raise SetupError(f"no fleet {given.fleet} runs here: name its nats-server with --nats-url")
    target = find_target(loaded)
    model = given.model or target.model
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        transport = NatsTransport(client, model, pacer, given.timeout)
        facts = {"transport": "nats", "url": flags.shown_url(target.nats_url), "model": model}
        yield Server(transport, facts, partial(counts, bus, model))


@asynccontextmanager
async def _over_http(given: argparse.Namespace, pacer: Pacer) -> AsyncGenerator[Server]:
    transport = HttpTransport(given.url, pacer, model=given.model, key=given.key, timeout_s=given.timeout)
    try:
        await transport.find_model()
        facts = {"transport": "http", "url": given.url, "model": transport.model}
        facts["version"] = await transport.get("/version")
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(connected(given.counts)) if given.counts else None
            yield Server(transport, facts, partial(counts, bus, transport.model) if bus else None)
    finally:
        await transport.close()
