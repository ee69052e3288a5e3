"""The kv_offload of a virtual world, and its next wake-up time."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.simulator.tiers import Tier
from services.scheduler.state.requests import OffloadReady
from shared.messages import Message

SCHEDULER = "scheduler.s"


@dataclass(frozen=True, slots=True)
class ToTier:
    """A message that reaches kv_offload; None: it asked to be woken."""

    message: Message | None


class TierSide:
    """Hands messages to a tier, and answers back."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.source = f"kv_offload.{tier.name}"
        self._woken_us = 0  # it is to be woken then; 0: not at all

    @property
    def ready(self) -> OffloadReady:
        """The answers for the scheduler."""
        tier = self.tier
        return OffloadReady(tier.name, tier.generation, tier.host_id, tier.generation, tier.tiers)

    def answer(self, event: ToTier, now_us: int) -> list[tuple[int, Message]]:
        """Answers: after how long, and what."""
        if event.message is None:
            self._woken_us = 0
            answers = self.tier.advance(now_us)
        else:
            answers = self.tier.handle(SCHEDULER, event.message, now_us)
        return [(delay_us, message) for delay_us, _, message in answers]

    def wake_us(self) -> int:
        """When to wake it, if that is not planned yet; else 0."""
        due_us = self.tier.due_us
        if due_us is None or (self._woken_us and self._woken_us <= due_us):
            return 0
        self._woken_us = due_us
        return due_us
