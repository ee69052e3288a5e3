"""What a network may do to the messages of one actor: lose, double, reorder them, or hold them all back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from support.memory_bus import MemoryBroker, MemoryBus

from shared.nats.interface import Delivery


@dataclass
class LossyBroker(MemoryBroker):
    """Loses, doubles and delays each a share of the messages between the mailbox of `victim` and others."""

    victim: str = ""  # kind
    share: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    harmed: int = 0

    def put(self, delivery: Delivery) -> None:
        _, _, kind, _, inward, *_ = [*delivery.subject.split("."), *[""] * 4]
        if inward == "in" and (
            kind == self.victim or f"{self.victim}." in delivery.data[:40].decode("latin")
        ):
            draw = self.dice.random()
            if draw < 3 * self.share:
                self.harmed += 1
                harm = (self.drop, self.duplicate, lambda subject: self.delay(subject, by=5))
                harm[int(draw / self.share)](delivery.subject)
        super().put(delivery)


class Hang:
    """An actor that neither receives nor sends anything for a while, as one that is stopped."""

    def __init__(self, bus: MemoryBus) -> None:
        self._publish = bus.publish
        self._hung = False
        self._held: list[Callable[[], None]] = []
        bus.publish = self._later(bus.publish)  # type: ignore[method-assign]
        for subscription in bus._mine:
            subscription.handler = self._later(subscription.handler)
        self._mine = bus._mine

    def hang(self) -> None:
        """From now on all that comes or goes waits."""
        self._hung = True

    def wake(self) -> None:
        """What has waited happens now, in its order."""
        self._hung = False
        held, self._held = self._held, []
        for each in held:
            each()

    def stops(self, timer: Callable[[], None]) -> Callable[[], None]:
        """The same, which does not run meanwhile."""
        return lambda: None if self._hung else timer()

    async def die(self) -> None:
        """For good: its connection ends."""
        self._hung = True
        for subscription in self._mine:
            await subscription.cancel()

    def _later(self, does: Callable[..., None]) -> Callable[..., None]:
        def run(*args: object, **more: object) -> None:
            if self._hung:
                self._held.append(lambda: does(*args, **more))
            else:
                does(*args, **more)

        return run
