"""Metrics as plain data, before any export."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shared.errors import WireError

Attributes = tuple[tuple[str, str], ...]

WINDOW_US = 10_000_000
SAMPLE_US = 900_000  # just less than a heartbeat interval of a second


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """The current value of a counter or a gauge."""

    name: str
    value: float
    unit: str  # UCUM: "1", "s", "{token}"
    attributes: Attributes = ()
    is_counter: bool = False


@dataclass(frozen=True, slots=True)
class HistogramPoint:
    """A histogram since the start: `counts[i]` values in (bounds[i-1], bounds[i]], the last above them."""

    name: str
    bounds: Sequence[float]
    counts: Sequence[int]
    total: float
    unit: str
    attributes: Attributes = ()


Metrics = Sequence[MetricPoint | HistogramPoint]


Report = tuple[str, list[MetricPoint | HistogramPoint]]  # an actor `kind.id` and its metrics


@cache
def _reports() -> TypeAdapter[Report]:
    return TypeAdapter(Report, config=ConfigDict(ser_json_inf_nan="constants"))


def pack(source: str, metrics: Metrics) -> bytes:
    """The metrics of the actor `source` as a message."""
    return _reports().dump_json((source, list(metrics)))


def unpack(data: bytes) -> Report:
    """Read a message of `pack`. Raises WireError."""
    try:
        return _reports().validate_json(data)
    except ValidationError as error:
        raise WireError(f"damaged metrics: {error.error_count()} errors") from None


class Recent:
    """The change of counts within the last WINDOW_US, from a sample at each heartbeat."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, Mapping[str, int]]] = deque()

    def sample(self, now_us: int, counts: Mapping[str, int]) -> None:
        """Keep the current counts, unless the last sample is younger than SAMPLE_US."""
        samples = self._samples
        if not counts or (samples and now_us - samples[-1][0] < SAMPLE_US):
            return
        samples.append((now_us, counts))
        while len(samples) > 1 and samples[1][0] <= now_us - WINDOW_US:
            samples.popleft()

    def change(self, now_us: int, counts: Mapping[str, int]) -> dict[str, float]:
        """The increase of each count within the last `seconds`; empty before the first sample."""
        if not self._samples:
            return {}
        since_us, before = self._samples[0]
        grown = {name: count - before.get(name, 0) for name, count in counts.items()}
        return {"seconds": round((now_us - since_us) / 1e6, 1), **grown}
