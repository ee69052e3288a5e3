"""The adapters of the simulated engine: a digest changes the tokens, and nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass

from services.executor.adapters.peft import read_folder
from shared.messages import SlotOpen


@dataclass(frozen=True, slots=True)
class SimAdapter:
    """An adapter by its files."""

    digest: str
    rank: int
    size_bytes: int


class SimPlaces:
    """See services.executor.engine.Adapters."""

    def __init__(self, places: int, most_rank: int) -> None:
        self.count, self._most_rank = places, most_rank
        self.held: list[SimAdapter | None] = [None] * (places + 1)
        self._of_slot: dict[int, int] = {}

    def read(self, path: str) -> SimAdapter:
        folder = read_folder(path, self._most_rank)
        return SimAdapter(folder.digest, folder.rank, len(folder.weights))

    def bind(self, place: int, adapter: SimAdapter | None) -> None:
        self.held[place] = adapter

    def open(self, opened: SlotOpen) -> None:
        self._of_slot[opened.slot] = opened.adapter

    def reset(self) -> None:
        self.held = [None] * (self.count + 1)

    def seed(self, slot: int) -> int:
        """What the adapter of a slot adds to its seed; 0 without one."""
        adapter = self.held[self._of_slot.get(slot, 0)]
        return int(adapter.digest[:16], 16) if adapter is not None else 0


def build(places: int, most_rank: int) -> SimPlaces:
    """The places of a simulated engine."""
    return SimPlaces(places, most_rank)
