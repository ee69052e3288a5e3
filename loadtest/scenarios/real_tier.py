"""The real core of kv_offload as the tier of a virtual world, over an arena and an L2 that only count."""

from __future__ import annotations

from loadtest.simulator.kv_virtual import VirtualKv, VirtualL2
from loadtest.simulator.tiers import Answer, Moved, TierSpec
from services.kv_offload.backends.arena import Arena
from services.kv_offload.events import Send
from shared.messages import KvPrefetch, KvReserve, Message

EPOCH = 1  # of the scheduler


class RealTier:
    """See `loadtest.simulator.tiers.Tier`. `block_bytes`: of each value."""

    generation = 1

    def __init__(self, spec: TierSpec, block_bytes: int) -> None:
        self.name, self.host_id = spec.name, spec.host_id
        self.tiers = ("l1", "l2") if spec.l2_bytes_s else ("l1",)
        l2 = VirtualL2(bytes_per_s=spec.l2_bytes_s, call_us=spec.l2_delay_us) if spec.l2_bytes_s else None
        self._kv = VirtualKv(Arena(spec.l1_bytes, self.generation), l2)
        self._block_bytes = block_bytes
        self._messages = 0

    @property
    def moved(self) -> Moved:
        """Its counters."""
        figures = self._kv.core.state.counters
        return Moved(
            l2_put_bytes=figures.l2_puts * self._block_bytes,
            l2_get_bytes=figures.l2_gets * self._block_bytes,
            stored_blocks=figures.stored,
            refused_blocks=figures.no_room,
            evicted_blocks=self._kv.core.state.l1.evictions,
            messages=self._messages,
        )

    @property
    def due_us(self) -> int | None:
        """When something is to happen by itself."""
        return self._kv.due_us()

    def handle(self, source: str, message: Message, now_us: int) -> list[Answer]:
        """Take a message of the actor `source`."""
        self._messages += 1
        assert not isinstance(message, KvReserve) or message.value_bytes == self._block_bytes
        assert not isinstance(message, KvPrefetch) or message.deadline_us > 0
        return _answers(self._kv.arrive(source, EPOCH, message, now_us))

    def advance(self, now_us: int) -> list[Answer]:
        """Time has come to `due_us`."""
        return _answers(self._kv.tick(now_us))


def _answers(sends: list[Send]) -> list[Answer]:
    return [(0, send.to, send.message) for send in sends]
