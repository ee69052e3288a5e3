"""What an executor shows of itself as metrics: how busy its device is, and what it copies.

`device.idle` is the time that the device thread waited for a plan: over it and `device.busy` gives the idle
share under load. It is counted when the plan comes, so it stands still while nobody asks for anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.executor.arena_side import ArenaSide
from services.executor.step import DeviceThread
from shared.readings import Attributes, Reading, Readings

OURS = "headrace.executor"
_US = 1e6


@dataclass(frozen=True, slots=True)
class Counts:
    """What the actor itself counts."""

    steps: int
    failed_steps: int
    open_slots: int


def readings(counts: Counts, device: DeviceThread, arenas: ArenaSide) -> Readings:
    """Everything, for export."""
    return [
        Reading(f"{OURS}.steps", counts.steps, "{step}", grows=True),
        Reading(f"{OURS}.failed_steps", counts.failed_steps, "{step}", grows=True),
        Reading(f"{OURS}.open_slots", counts.open_slots, "{slot}"),
        Reading(f"{OURS}.plans_queued", device.queued, "{plan}"),
        Reading(f"{OURS}.device.busy", device.busy_us / _US, "s", grows=True),
        Reading(f"{OURS}.device.idle", device.idle_us / _US, "s", grows=True),
        Reading(f"{OURS}.copies_queued", arenas.queued, "{copy}"),
        *_copied(arenas),
    ]


def _copied(arenas: ArenaSide) -> Iterator[Reading]:
    for direction, done in arenas.copied.items():
        where: Attributes = (("direction", direction),)
        yield Reading(f"{OURS}.copies", done.copies, "{copy}", where, grows=True)
        yield Reading(f"{OURS}.copied", done.bytes, "By", where, grows=True)
