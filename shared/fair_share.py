"""Fair queues: a full one refuses the tenants that have their equal share of it, and tenants take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def is_over_share(own: int, held: int, most: int, tenants: int) -> bool:
    """True if a tenant must be refused that would have `own` of the `held` items: more than `most` are held,
    and the tenant has more than its equal share of `most`."""
    return held > most and own * tenants > most


def has_no_room(own: int, more: int, held: int, most: int, tenants: int) -> bool:
    """True if a tenant with `own` of the `held` items gets no room for `more`. A tenant without items is
    accepted up to twice `most`, and no further, since clients may invent tenants."""
    return is_over_share(own + more, held + more, most, tenants) if own else held >= 2 * most


class Turns(Generic[T]):
    """A queue in which tenants take turns; the items of a tenant keep their order."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()  # the next tenant first
        self._count = 0

    def put(self, tenant: str, item: T) -> None:
        """Queue an item of a tenant."""
        self._queues.setdefault(tenant, deque()).append(item)
        self._count += 1

    def pop(self, skips: Callable[[str], bool] = lambda tenant: False) -> T:
        """The next item of the first tenant that is not skipped. Raises KeyError if there is none."""
        tenant = next((tenant for tenant in self._queues if not skips(tenant)), None)
        if tenant is None:
            raise KeyError("nothing waits, or only what is skipped")
        queue = self._queues.pop(tenant)
        item = queue.popleft()
        self._count -= 1
        if queue:
            self._queues[tenant] = queue
        return item

    def count_of(self, tenant: str) -> int:
        """The number of a tenant's items."""
        return len(self._queues.get(tenant, ()))

    @property
    def tenants(self) -> int:
        """The number of tenants with items."""
        return len(self._queues)

    def __len__(self) -> int:
        return self._count
