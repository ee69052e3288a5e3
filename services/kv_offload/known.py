"""Names that L2 is known to hold: put there by this process, or found there. Pure.

Bounded, since L2 may hold far more than this host ever asks for; of names not in here L2 itself is asked. It
may be wrong (L2 evicts as it likes): then a get finds nothing, and the name is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

from services.kv_offload.events import Name

REMEMBERED = 262_144


class Known:
    """A set that forgets what was not asked for longest."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._names: OrderedDict[Name, None] = OrderedDict()

    def __contains__(self, name: Name) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: Name) -> None:
        """L2 holds it, as of now."""
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._most:
            self._names.popitem(last=False)

    def forget(self, name: Name) -> None:
        """L2 does not hold it."""
        self._names.pop(name, None)

    def clear(self) -> None:
        """L2 may have started afresh."""
        self._names.clear()
