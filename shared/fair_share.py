"""Tenants share what is bounded: a full queue refuses who has an equal part of it, and serves all in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def over_share(own: int, held: int, most: int, tenants: int) -> bool:
    """Whether a tenant that would have `own` of the `held` has to be refused: more than `most` are held then,
    and more than an equal part of that by this one of so many `tenants`."""
    return held > most and own * tenants > most


def finds_no_room(own: int, more: int, held: int, most: int, tenants: int) -> bool:
    """Whether a tenant that has `own` of the `held` is refused `more`. One that has nothing yet is taken
    beyond `most`, but only up to twice that: anybody may invent names."""
    return over_share(own + more, held + more, most, tenants) if own else held >= 2 * most


class Turns(Generic[T]):
    """A queue from which tenants are served in turn, each in the order in which it came."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()  # whose turn it is first
        self._count = 0

    def put(self, tenant: str, item: T) -> None:
        """Queue an item behind those of its tenant."""
        self._queues.setdefault(tenant, deque()).append(item)
        self._count += 1

    def pop(self, skips: Callable[[str], bool] = lambda tenant: False) -> T:
        """The next one of the first tenant that is not skipped. Raises KeyError when there is none."""
        tenant = next((tenant for tenant in self._queues if not skips(tenant)), None)
        if tenant is None:
            raise KeyError("nothing waits, or only what is skipped")
        queue = self._queues.pop(tenant)
        item = queue.popleft()
        self._count -= 1
        if queue:
            self._queues[tenant] = queue
        return item

    def of(self, tenant: str) -> int:
        """How many of a tenant wait."""
        return len(self._queues.get(tenant, ()))

    @property
    def tenants(self) -> int:
        """Of how many something waits."""
        return len(self._queues)

    def __len__(self) -> int:
        return self._count
