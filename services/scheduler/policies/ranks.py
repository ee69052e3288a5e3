"""Policies of kind `rank`: who is admitted next within a class. Less is sooner.

A rank sees one waiting unit and what its client has been served; it must not fall while a unit waits.
Signature: (unit: Unit, served_tokens: int) -> tuple[int, ...]
"""

from __future__ import annotations

from services.scheduler.waiting import Unit


def vtc(unit: Unit, served_tokens: int) -> tuple[int, ...]:
    """The client that has been served least, then arrival: see vtc.py."""
    return served_tokens, unit.request.arrival_us, unit.number


def fcfs(unit: Unit, served_tokens: int) -> tuple[int, ...]:
    """First come, first served, whoever asks."""
    return unit.order
