"""What the gateway counts, as OpenTelemetry names it; `/metrics` writes it for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from services.gateway.visit import Visit
from shared import conventions as c
from shared.readings import Attributes, Reading, Readings, Spread
from shared.unread import SlowReader

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
OURS = "headrace.gateway"


@dataclass(slots=True)
class Durations:
    """A histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, took_s: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.total_s += took_s

    def spread(self, name: str, attributes: Attributes = ()) -> Spread:
        """As others read it."""
        return Spread(name, BOUNDS_S, list(self.counts), self.total_s, "s", attributes)


class Meter:
    """The counts of one gateway."""

    def __init__(self) -> None:
        self.active = 0
        self.slow_readers = 0
        self.chunks = 0
        self._took: dict[tuple[str, int], Durations] = {}
        self._first: dict[str, Durations] = {}

    def begin(self) -> None:
        """A request came."""
        self.active += 1

    def end(self, visit: Visit) -> None:
        """It was answered, or its client has gone."""
        self.active -= 1
        self.slow_readers += isinstance(visit.error, SlowReader)
        took = self._took.setdefault((visit.route, visit.status), Durations())
        took.add((visit.ended_us - visit.started_us) / 1e6)
        if visit.first_us:
            first = self._first.setdefault(visit.route, Durations())
            first.add((visit.first_us - visit.started_us) / 1e6)

    @property
    def requests(self) -> int:
        """Requests that have ended."""
        return sum(sum(took.counts) for took in self._took.values())

    def readings(self) -> Readings:
        """Everything, now."""
        counted = [
            Reading("http.server.active_requests", self.active, "{request}"),
            Reading(f"{OURS}.chunks", self.chunks, "{chunk}", grows=True),
            Reading(f"{OURS}.slow_readers", self.slow_readers, "{stream}", grows=True),
        ]
        took = [
            durations.spread(
                "http.server.request.duration", ((c.HTTP_ROUTE, route), (c.HTTP_STATUS, str(status)))
            )
            for (route, status), durations in sorted(self._took.items())
        ]
        first = [
            durations.spread(f"{OURS}.time_to_first_chunk", ((c.HTTP_ROUTE, route),))
            for route, durations in sorted(self._first.items())
        ]
        return [*counted, *took, *first]
