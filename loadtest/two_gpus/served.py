"""Closed loops through `headrace up`; those of two ranks of one executor against one GPU."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from loadtest.fleet import Fleet
from loadtest.gpu.readers import bodies, figures
from loadtest.two_gpus.fleets import up
from loadtest.two_gpus.load import Due, Load
from loadtest.two_gpus.record import Record

ANSWER, PER_CLIENT = 256, 3
ROUNDS = 3
FLAGS = ("--dtype", "bf16", "--max-context", "8192", "--slots", "256", "--kv-blocks", "24576")


def due(asked: Sequence[dict[str, Any]]) -> list[Due]:
    """Requests of a closed loop."""
    return [(0.0, body) for body in asked]


async def closed(fleet: Fleet, load: Load, name: str, in_flight: int, per_client: int = PER_CLIENT) -> Any:
    """So many requests in flight until all are answered, as their readers see it."""
    asked = due(bodies(name, in_flight * per_client, ANSWER))
    found = figures(await load.run(fleet.url, asked, in_flight))
    return {**found, "in_flight": in_flight, "longest": None}


async def ranks(folder: str, record: Record, device: str = "cuda", logs: str = "") -> None:
    """Closed loop 64 of one executor on two GPUs and of one on one, in turn."""
    load = Load()
    async with (
        up(folder, *FLAGS, device=f"{device}/tp2", logs=logs) as two,
        up(folder, *FLAGS, device=device, gpus="0", logs=logs) as one,
    ):
        await load.warm()
        fleets = {"tp2": two, "one": one}
        for name, fleet in fleets.items():
            await closed(fleet, load, f"warm-{name}", 64, 1)
        for number in range(ROUNDS):
            for name, fleet in fleets.items():
                record.add(f"{name}_{number}", await closed(fleet, load, f"{name}-{number}", 64))
            rates = {name: _median(record, name, number) for name in fleets}
            record.add("tp2_to_one", {**rates, "ratio": rates["tp2"] / rates["one"]})
            if not record.has(25, "round"):
                break


def _median(record: Record, name: str, last: int) -> float:
    rates = [float(record.found[f"{name}_{number}"]["tok_s"]) for number in range(last + 1)]
    return statistics.median(rates)
