"""Blocks of a group, to and from the arena: every rank copies its part of each.

    a block in the arena:  [rank][layer][K|V][token][kv_head of that rank][head_dim]

For the tiers a block is one thing, of the bytes of all ranks: a copy has ended when it has on every rank, and
failed if it has on any. So a block is in a tier whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.executor.arena import Arena
from services.executor.backend import Copier
from services.executor.members import Members
from services.executor.orders import Attach, Copies, Move
from shared.errors import EngineError


class GroupCopier:
    """The leader's. See services.executor.backend.Copier."""

    def __init__(self, own: Copier, members: Members, size: int) -> None:
        self._own, self._members = own, members
        self.piece_bytes = size * own.piece_bytes

    def attach(self, arena: Arena) -> None:
        self._members.tell(Attach(arena.name, arena.generation))
        try:
            self._with_all(lambda: self._own.attach(arena))
        except Exception:
            self.detach()
            raise

    def detach(self) -> None:
        self._members.tell(Copies.DETACH)
        self._with_all(self._own.detach)

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        self._members.tell(Move(True, blocks, offsets))
        self._own.store(blocks, offsets)

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        self._members.tell(Move(False, blocks, offsets))
        self._own.load(blocks, offsets)

    def finish(self) -> int:
        self._members.tell(Copies.FINISH)
        return self._with_all(self._own.finish)

    def _with_all(self, here: Callable[[], int | None]) -> int:
        """Do it here, too, and wait for all; the longest time. An error here must not leave answers behind,
        which would be taken for those of the next order."""
        try:
            own_us = here()
        finally:
            others_us = self._members.answers()
        return max(own_us or 0, others_us)


class PartCopier:
    """A follower's: its part lies `before` bytes into each block in the arena."""

    def __init__(self, own: Copier, before: int) -> None:
        self._own, self._before = own, before
        self._arena: Arena | None = None
        self._flaw = ""  # of a move since the last finish; an error itself would keep a view of the arena

    def attach(self, name: str, generation: int) -> None:
        """Map an arena. Raises ArenaError, or what the device's driver says."""
        arena = Arena(name, generation)
        try:
            self._own.attach(arena)
        except Exception:
            arena.close()
            raise
        self._arena = arena

    def detach(self) -> None:
        """Unmap it, if there is one."""
        arena, self._arena = self._arena, None
        if arena is not None:
            self._own.detach()
            arena.close()

    def move(self, order: Move) -> None:
        """Copy; what goes wrong is kept for `finish`."""
        try:
            copy = self._own.store if order.to_arena else self._own.load
            copy(order.blocks, [offset + self._before for offset in order.offsets])
        except Exception as error:  # noqa: BLE001 - the leader asks for it
            self._flaw = f"{type(error).__name__}: {error}"

    def finish(self) -> int:
        """As Copier.finish. Raises EngineError for what a move since the last one has met."""
        took_us = self._own.finish()
        flaw, self._flaw = self._flaw, ""
        if flaw:
            raise EngineError(flaw)
        return took_us
