"""A span as plain data: what is measured is built here and tested as a table, and sent elsewhere.

A list of records is one tree: the first is its root, `parent` is an index into the list. Times are
wall-clock microseconds, from stamps that the messages carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
ROOT = 0


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment on a span."""

    name: str
    at_us: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(slots=True)
class SpanRecord:
    """One span of a list. `error` is empty for a success."""

    name: str
    start_us: int
    end_us: int
    parent: int | None = ROOT  # None: the root
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    links: tuple[str, ...] = ()  # traceparents
    kind: str = "internal"  # internal, server, client, producer, consumer
    error: str = ""

    @property
    def took_us(self) -> int:
        return self.end_us - self.start_us


def leaves(spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    """The spans without children."""
    parents = {span.parent for span in spans}
    return [span for i, span in enumerate(spans) if i not in parents]


def covered_us(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of (start, end) intervals."""
    total, reached = 0, -(2**63)
    for start, end in sorted(intervals):
        if end > max(start, reached):
            total += end - max(start, reached)
            reached = end
    return total


def gaps(intervals: Iterable[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of [start, end] that no interval covers."""
    found, reached = [], start
    for begin, stop in sorted(intervals):
        if min(begin, end) > reached:
            found.append((reached, min(begin, end)))
        reached = max(reached, stop)
    if reached < end:
        found.append((reached, end))
    return found


def to_body(spans: Sequence[SpanRecord]) -> list[dict[str, Any]]:
    """The spans as JSON has them, for `headrace.v1.trace`."""
    return [
        {
            "name": span.name,
            "start_us": span.start_us,
            "end_us": span.end_us,
            "parent": span.parent,
            "attributes": span.attributes,
            "events": [
                {"name": e.name, "at_us": e.at_us, "attributes": dict(e.attributes)} for e in span.events
            ],
            "error": span.error,
        }
        for span in spans
    ]
