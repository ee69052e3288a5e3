"""The shell of kv_offload: one per host, answers the scheduler's mailbox messages."""

from __future__ import annotations

from services.kv_offload.core import KvCore, Tiers
from services.kv_offload.memory import MemoryTiers
from shared.actor import Actor, Facts
from shared.config import Settings
from shared.messages import Message
from shared.port import Port


class KvOffloadActor(Actor):
    """Answers each lookup, reservation and prefetch to whoever asked."""

    kind = "kv_offload"

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._core = KvCore(tiers)

    async def start(self, port: Port) -> None:
        self._port = port

    def receive(self, source: str, message: Message, trace: str) -> None:
        answer = self._core.handle(message)
        if answer is not None:
            self._port.send(source, answer, trace)

    def facts(self) -> Facts:
        return Facts(tiers=self._tiers.names)

    def status(self) -> dict[str, object]:
        return {
            "tiers": list(self._tiers.names),
            "lookups": self._core.lookups,
            "hits": self._core.hits,
        }


def build(settings: Settings) -> KvOffloadActor:
    """kv_offload without an arena: every lookup answers that nothing is stored."""
    return KvOffloadActor(MemoryTiers())
