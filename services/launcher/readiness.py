"""When is a fleet ready? When a real request of one token has been answered through NATS.

The attempts follow the beats: nothing is polled. Every kind a request passes through has to say
"ready" first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared import codec, subjects
from shared.bus import Bus, Delivery
from shared.client import Client
from shared.clock import SystemClock
from shared.errors import HeadraceError, WireError
from shared.messages import Beat
from shared.peers import Peers
from shared.readiness import PROBE_TIMEOUT_S, missing, probe

TELL_EVERY_S = 10.0


class Readiness:
    """Watches the beats of a fleet, and probes it."""

    def __init__(self, bus: Bus, fleet: str) -> None:
        self._bus = bus
        self._fleet = fleet
        self._peers = Peers()
        self._clock = SystemClock()
        self._beaten = asyncio.Event()

    async def wait(self, model: str, tell: Callable[[str], None]) -> None:
        """Return once a request to `model` has been answered. `tell` hears what is missing, at times.

        Raises the request's error when it is not of the kind that passes.
        """
        await self._bus.subscribe(subjects.beat_all(self._fleet), self._on_beat)
        client = await Client.open(self._bus)
        self._bus.publish(subjects.beat_ask(self._fleet), b"")
        while True:
            await self._wait_for_beats(tell)
            try:
                await client.complete(probe(model), timeout_s=PROBE_TIMEOUT_S)
            except HeadraceError as error:
                if not error.retryable:
                    raise
                await self._next_beat(tell, error.message)
            else:
                return

    async def gateway_port(self, tell: Callable[[str], None]) -> int:
        """The port on which a gateway serves HTTP, once one is ready; after `wait`."""
        while True:
            for actor in self._peers.ready("gateway"):
                peer = self._peers.get(f"gateway.{actor}")
                load = dict(peer.beat.load) if peer is not None else {}
                if "http_port" in load:
                    return load["http_port"]
            await self._next_beat(tell, "gateway")

    async def _wait_for_beats(self, tell: Callable[[str], None]) -> None:
        while gone := missing(self._peers):
            await self._next_beat(tell, ", ".join(gone))

    async def _next_beat(self, tell: Callable[[str], None], why: str) -> None:
        self._beaten.clear()
        while not self._beaten.is_set():
            try:
                await asyncio.wait_for(self._beaten.wait(), TELL_EVERY_S)
            except TimeoutError:
                tell(f"waiting for: {why}")

    def _on_beat(self, delivery: Delivery) -> None:
        try:
            envelope = codec.decode(delivery.data)
        except WireError:
            return  # not of this version
        if isinstance(envelope.message, Beat):
            self._peers.hear(envelope.epoch, envelope.message, self._clock.now_us())
            self._beaten.set()
