"""A recording actor, and a fleet of them on one broker with a clock by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from shared import codec
from shared.actor.mailbox import Mailbox
from shared.actor.membership import Peer
from shared.actor.runtime import Actor, HeartbeatPayload, Runtime
from shared.codec import Envelope
from shared.errors import WireError
from shared.messages import Cancel, Heartbeat, Message
from shared.nats import subjects
from support.memory_bus import MemoryBroker
from support.virtual_loop import FakeClock

INTERVAL_US = 3_600_000_000  # an hour by the fake clock; nothing heartbeats by itself


class Recorder(Actor):
    """Writes down each event that it gets."""

    def __init__(self, kind: str = "executor") -> None:
        self.kind = kind
        self.events: list[tuple[str, str]] = []
        self.mailbox: Mailbox | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_on = ""

    async def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self._note("start", "")
        await self.gate.wait()

    def _note(self, what: str, about: str) -> None:
        self.events.append((what, about))
        if what == self.fail_on:
            raise RuntimeError(f"broken in {what}")

    def receive(self, source: str, message: Message, trace: str) -> None:
        assert isinstance(message, Cancel)
        self._note("receive", message.request + trace)

    def on_peer(self, peer: Peer) -> None:
        self._note("peer", f"{peer.source} {peer.heartbeat.state}")

    def on_peer_gone(self, peer: Peer) -> None:
        self._note("gone", peer.source)

    def on_restart(self, source: str) -> None:
        self._note("restart", source)

    def on_stream_lost(self, source: str) -> None:
        self._note("lost", source)

    def on_broker(self, online: bool) -> None:
        self._note("broker", str(online))

    def heartbeat_payload(self) -> HeartbeatPayload:
        self._note("heartbeat_payload", "")
        return HeartbeatPayload(model="m", load=(("rows", 3),))

    def status(self) -> dict[str, object]:
        return {"slots": 4}

    async def drain(self) -> None:
        self._note("drain", "")
        await self.gate.wait()

    async def stop(self) -> None:
        self._note("stop", "")

    def of(self, *what: str) -> list[str]:
        return [about for name, about in self.events if name in what]


class Fleet:
    def __init__(self) -> None:
        self.broker, self.clock = MemoryBroker(), FakeClock()
        self.beats: list[tuple[str, str]] = []
        self.runtimes: list[Runtime] = []
        self.outside = self.broker.connect()

    def runtime(self, actor: Actor, actor_id: str = "a") -> Runtime:
        self.clock.advance(1)
        bus = self.broker.connect()
        runtime = Runtime(actor, bus, "f", actor_id, "host", self.clock, INTERVAL_US)
        self.runtimes.append(runtime)
        return runtime

    async def started(self, actor: Actor, actor_id: str = "a") -> Runtime:
        runtime = self.runtime(actor, actor_id)
        await runtime.start()
        await self.broker.settle()
        return runtime

    async def ask(self, subject: str) -> dict[str, Any]:
        answer = await self.outside.request(subject, b"", timeout_us=1_000_000)
        body: dict[str, Any] = json.loads(answer.data)
        return body

    def put(self, envelope: Envelope, to: str = "executor.a") -> None:
        kind, _, actor = to.partition(".")
        name = type(envelope.message).__name__
        self.outside.publish(subjects.mailbox("f", kind, actor, name), codec.encode(envelope))


def cancel(name: str) -> Cancel:
    return Cancel(tenant="t", request=name)


@contextlib.asynccontextmanager
async def watched_fleet() -> AsyncIterator[Fleet]:
    """A fleet that records every heartbeat. Its actors stop at the end of the test."""
    fleet = Fleet()

    def on_beat(delivery: Any) -> None:
        with contextlib.suppress(WireError):
            heartbeat = codec.decode(delivery.data).message
            if isinstance(heartbeat, Heartbeat):
                fleet.beats.append((f"{heartbeat.kind}.{heartbeat.actor}", heartbeat.state))

    await fleet.outside.subscribe("hr.f.beat.*.*", on_beat)
    yield fleet
    for runtime in fleet.runtimes:
        await runtime.finish(1.0)


M = TypeVar("M", bound=Message)


class Hand(Actor):
    """A neighbour moved by the test."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.received: list[Message] = []
        self._news = asyncio.Event()

    async def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def heartbeat_payload(self) -> HeartbeatPayload:
        return HeartbeatPayload(model="m")

    def receive(self, source: str, message: Message, trace: str) -> None:
        self.received.append(message)
        self._news.set()

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]

    async def until(self, kind: type[M], count: int = 1) -> M:
        async with asyncio.timeout(60):
            while len(self.of(kind)) < count:
                self._news.clear()
                await self._news.wait()
        return self.of(kind)[count - 1]
