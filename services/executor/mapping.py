"""Which arena a copier is attached to: at most one, changed as a whole."""

from __future__ import annotations

import logging

from services.executor.arena import Arena
from services.executor.backend import Copier

log = logging.getLogger("headrace.executor")

NO_ARENA = ("", 0)  # name and generation


class Mapping:
    """The arena in use, None where there is none or it could not be had."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self.of = NO_ARENA  # what was asked for last
        self.arena: Arena | None = None

    def change(self, name: str, generation: int) -> int:
        """Use this arena instead, or none. The generation of which no mapping is left now, 0 if there was
        none. An arena that cannot be had is logged: nothing is stored then, and the engine goes on."""
        released = self._unmap()
        self.of = (name, generation)
        if self.of != NO_ARENA:
            self._map(name, generation)
        return released

    def _map(self, name: str, generation: int) -> None:
        arena = None
        try:
            arena = Arena(name, generation)
            self._copier.attach(arena)
        except Exception as error:  # noqa: BLE001 - of a device's driver, too
            log.error("no arena: %s", error)
        else:
            self.arena, arena = arena, None
        if arena is not None:
            _close(arena)

    def _unmap(self) -> int:
        arena, self.arena = self.arena, None
        if arena is None:
            return 0
        self._copier.detach()
        return arena.generation if _close(arena) else 0


def _close(arena: Arena) -> bool:
    try:
        arena.close()
    except BufferError:  # a copier that keeps a view: its memory is lost until the process ends
        log.error("the arena of generation %d is still in use and stays mapped", arena.generation)
        return False
    return True
