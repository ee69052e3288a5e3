"""Discovery by the NATS services protocol ($SRV.PING, INFO, STATS), as `nats micro ls` asks for it.

Spec: nats-architecture-and-design ADR-32. Answered over Bus, so it works on any transport.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shared import subjects
from shared.bus import Bus, Delivery
from shared.replies import to_json

if TYPE_CHECKING:
    from shared.port import Port

VERSION = "0.1.0"


def identity(port: Port) -> dict[str, object]:
    """Who answers."""
    return {"kind": port.kind, "id": port.actor, "epoch": port.epoch, "fleet": port.fleet}


async def answer(
    bus: Bus, port: Port, state: Callable[[], str], status: Callable[[], dict[str, object]]
) -> None:
    """Answer PING, INFO and STATS for everybody, for this kind, and for this actor."""
    name = f"headrace-{port.kind}"
    head: dict[str, object] = {"name": name, "id": port.actor, "version": VERSION, "metadata": {}}

    def ping() -> dict[str, object]:
        return {"type": "io.nats.micro.v1.ping_response", **head}

    def info() -> dict[str, object]:
        return {"type": "io.nats.micro.v1.info_response", **head, "description": name, "endpoints": []}

    def stats() -> dict[str, object]:
        started = datetime.fromtimestamp(port.epoch / 1e6, UTC).isoformat()
        body = {"type": "io.nats.micro.v1.stats_response", **head, "endpoints": [], "started": started}
        return {**body, "state": state(), "data": status()}

    for verb, make in (("PING", ping), ("INFO", info), ("STATS", stats)):
        for subject in (
            f"$SRV.{verb}",
            f"$SRV.{verb}.{name}",
            f"$SRV.{verb}.{name}.{subjects.token(port.actor)}",
        ):
            await bus.subscribe(subject, _replier(bus, make))


def _replier(bus: Bus, make: Callable[[], dict[str, object]]) -> Callable[[Delivery], None]:
    def reply(delivery: Delivery) -> None:
        if subjects.is_inbox(delivery.reply):
            bus.publish(delivery.reply, to_json(make()))

    return reply
