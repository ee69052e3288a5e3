"""The readers of this shard's streams, as the bus shows them: who has gone, who cancels, who is back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.detokenizer.commands import Command
from services.detokenizer.core import DetokenizerCore
from services.detokenizer.presence import PROBE_HEADERS, Presence
from services.detokenizer.replay import TURN_S
from shared import subjects
from shared.bus import Delivery
from shared.port import Port


class Readers:
    """What comes from clients, to the core."""

    def __init__(self, port: Port, core: DetokenizerCore, run: Callable[[list[Command]], None]) -> None:
        self._port = port
        self._core = core
        self._run = run
        self._presence = Presence()
        self._replaying = False

    async def listen(self) -> None:
        """Subscribe to the news of them."""
        await self._port.bus.subscribe(subjects.gone_all(self._port.actor), self._on_gone)
        await self._port.bus.subscribe(subjects.CANCEL_ALL, self._on_cancel)

    def upkeep(self) -> None:
        """Once a beat: ask who still waits for an answer that is not streamed."""
        self._core.replay.age()
        if self._core.replay.active:
            return  # readers are on their way back
        for probe in self._presence.turn(self._core.plain):
            reply = subjects.gone(self._port.actor, probe.name)
            self._port.bus.publish(probe.subject, b"", reply=reply, headers=PROBE_HEADERS)

    def on_broker(self, online: bool) -> None:
        """The connection was cut, or is back."""
        if online:
            self._core.replay.broker_back(self._core.streams)
        else:
            self._core.replay.broker_lost()
        self._run([])  # idle or not
        if online and not self._replaying:
            self._replaying = True
            asyncio.get_running_loop().call_later(TURN_S, self._replay)

    def _replay(self) -> None:
        self._run(self._core.replay_turn())
        self._replaying = self._core.replay.active
        if self._replaying:
            asyncio.get_running_loop().call_later(TURN_S, self._replay)

    def _on_gone(self, delivery: Delivery) -> None:
        name = delivery.subject.rpartition(".")[2]
        if not delivery.no_responders:
            return
        if name.isdecimal():
            self._run(self._core.client_gone(int(name)))
        elif (number := self._presence.unheard(name)) is not None and not self._core.replay.active:
            self._run(self._core.client_gone(number))

    def _on_cancel(self, delivery: Delivery) -> None:
        if (names := subjects.names_in(delivery.subject)) is not None:
            self._core.orphans.cancelled(*names)
