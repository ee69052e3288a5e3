"""When is a fleet ready? When a real request of one token has been answered through NATS.

The attempts follow the beats: nothing is polled. Every kind a request passes through has to say
"ready" first; kv_offload is not among them, since without it requests are merely recomputed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.launcher.client import Client
from shared import codec, subjects
from shared.bus import Bus, Delivery
from shared.clock import SystemClock
from shared.errors import HeadraceError, WireError
from shared.messages import Beat
from shared.peers import Peers

NEEDED = ("tokenizer", "scheduler", "executor", "detokenizer")
PROBE_TIMEOUT_S = 60.0
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
                await client.complete(_probe(model), timeout_s=PROBE_TIMEOUT_S)
            except HeadraceError as error:
                if not error.retryable:
                    raise
                await self._next_beat(tell, error.message)
            else:
                return

    def missing(self) -> list[str]:
        """The kinds of which no actor is ready."""
        return [kind for kind in NEEDED if not self._peers.ready(kind)]

    async def _wait_for_beats(self, tell: Callable[[str], None]) -> None:
        while missing := self.missing():
            await self._next_beat(tell, ", ".join(missing))

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


def _probe(model: str) -> dict[str, object]:
    return {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
