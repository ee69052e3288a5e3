"""`MemoryRule` decides which models of a machine are awake while they share its memory. Pure.

    asleep, requests wait ──fits──▶ Wake
                          ──does not fit, and its work beats that of awake models──▶ Sleep them, then Wake

Work is what waits and runs, in tokens, times the priority of its class. A model stays awake for at least
LEAST_AWAKE_US, and a request that has waited for MOST_WAIT_US beats any work: so two busy models take turns
of 30 to 60 s, and neither starves. `host_agent.py` calls it once a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_AWAKE_US = 30_000_000  # five times the longest wake: 0.1 to 6 s, on a GPU or a CPU
MOST_WAIT_US = 60_000_000
SWAP_US = 60_000_000  # for others to fall asleep: a drain of 10 s, then copies; after it the swap is dropped

LOADED, ASLEEP, UNLOADED, CHANGING = "loaded", "asleep", "unloaded", "changing"


@dataclass(frozen=True, slots=True)
class ModelNow:
    """A model of this machine. `changing`: it falls asleep, wakes or loads, and counts as awake."""

    name: str
    state: str
    need_mib: int  # awake
    work: int = 0
    waits_us: int = 0  # its oldest waiting request


@dataclass(frozen=True, slots=True)
class Sleep:
    """Put a model to sleep."""

    model: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake a model, or load it."""

    model: str


class MemoryRule:
    """The awake models of one machine and the swap that is under way."""

    def __init__(self, budget_mib: int) -> None:
        self._budget_mib = budget_mib
        self._since_us: dict[str, int] = {}  # when each loaded model was first seen awake
        self._next, self._until_us = "", 0  # the model that memory is freed for

    def why_not(self, name: str, need_mib: int) -> str:
        """Why a model can never be awake here; empty if it can."""
        if need_mib <= self._budget_mib:
            return ""
        have, need = self._budget_mib / 1024, need_mib / 1024
        return f"{name} needs {need:.1f} GiB awake, and the models here share {have:.1f} (awake_gib)"

    def turn(self, models: Sequence[ModelNow], now_us: int) -> Sleep | Wake | None:
        """What to do now. The next states of the models show whether it was done."""
        awake = [model for model in models if model.state == LOADED]
        self._since_us = {model.name: self._since_us.get(model.name, now_us) for model in awake}
        used_mib = sum(model.need_mib for model in models if model.state in (LOADED, CHANGING))
        if any(model.state == CHANGING for model in models):
            return None  # one change at a time: its memory is neither free nor taken
        if used_mib > self._budget_mib and len(awake) > 1:  # one that was restarted, or all at the start
            return Sleep(min(awake, key=lambda model: (model.work, -model.need_mib, model.name)).name)
        waiting = [m for m in models if m.state in (ASLEEP, UNLOADED) and m.work and not self._too_large(m)]
        if now_us >= self._until_us or self._next not in {model.name for model in waiting}:
            self._next = ""
        for model in sorted(waiting, key=lambda m: (m.name != self._next, not _is_due(m), -m.work, m.name)):
            if used_mib + model.need_mib <= self._budget_mib:
                self._next = ""
                return Wake(model.name)
            if victims := self._victims(model, awake, used_mib, now_us):
                if not self._next:
                    self._next, self._until_us = model.name, now_us + SWAP_US
                return Sleep(victims[0].name)
            if self._next:
                return None
        return None

    def _victims(
        self, model: ModelNow, awake: Sequence[ModelNow], used_mib: int, now_us: int
    ) -> list[ModelNow]:
        """The models that must sleep for this one, those with the least work; none if they are too few."""
        victims: list[ModelNow] = []
        for other in sorted(awake, key=lambda m: (m.work, m.name)):
            rested = now_us - self._since_us[other.name] >= LEAST_AWAKE_US
            if rested and (other.work < model.work or _is_due(model) or self._next == model.name):
                victims.append(other)
                used_mib -= other.need_mib
            if used_mib + model.need_mib <= self._budget_mib:
                return victims
        return []

    def _too_large(self, model: ModelNow) -> bool:
        return bool(self.why_not(model.name, model.need_mib))


def _is_due(model: ModelNow) -> bool:
    return model.waits_us >= MOST_WAIT_US
