"""The last requests that ended: answers late resends and `headrace.v1.trace.<request>`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from shared.request_spans import RequestFacts

KEPT = 1_000


@dataclass(frozen=True, slots=True)
class Trace:
    """What is left of a request."""

    inbox: str
    trace: str  # the traceparent of its root span, empty when not traced
    facts: RequestFacts


@dataclass(slots=True)
class Recent:
    """A ring of the last KEPT requests by (tenant, request)."""

    traces: OrderedDict[tuple[str, str], Trace] = field(default_factory=OrderedDict)

    def add(self, key: tuple[str, str], trace: Trace) -> None:
        """Remember an ended request, forget the oldest."""
        self.traces[key] = trace
        self.traces.move_to_end(key)
        while len(self.traces) > KEPT:
            self.traces.popitem(last=False)

    def find(self, request: str) -> Trace | None:
        """The newest ended request with this id, of any tenant."""
        keys = [key for key in reversed(self.traces) if key[1] == request]
        return self.traces[keys[0]] if keys else None
