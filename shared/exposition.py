"""Readings as Prometheus reads them. Pure. Spec: the text exposition format 0.0.4.

Names follow the OpenTelemetry specification's way to Prometheus: dots become `_`, the unit is the end of the
name (`_seconds`, `_bytes`), counters end in `_total`. What vLLM counts, too, has vLLM's name with `headrace:`
in place of `vllm:`, so that a dashboard made for the one shows the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

from shared.readings import Attributes, Reading, Readings, Spread

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OURS = "headrace.scheduler"
_AS_IN_VLLM = {  # its production metrics, https://docs.vllm.ai/en/stable/usage/metrics
    "gen_ai.server.time_to_first_token": "time_to_first_token_seconds",
    "gen_ai.server.time_per_output_token": "request_time_per_output_token_seconds",
    "gen_ai.server.request.duration": "e2e_request_latency_seconds",
    f"{_OURS}.inter_token.duration": "inter_token_latency_seconds",
    f"{_OURS}.queue.duration": "request_queue_time_seconds",
    f"{_OURS}.queue.requests": "num_requests_waiting",
    f"{_OURS}.running": "num_requests_running",
    f"{_OURS}.blocks_used": "kv_cache_usage_perc",
    f"{_OURS}.preemptions": "num_preemptions_total",
    f"{_OURS}.prefix.lookup_tokens": "prefix_cache_queries_total",
    f"{_OURS}.prefix.hit_tokens": "prefix_cache_hits_total",
    f"{_OURS}.generated_tokens": "generation_tokens_total",
}
_UNITS = {"s": "_seconds", "By": "_bytes", "By/s": "_bytes_per_second"}
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


def to_prometheus(readings: Readings) -> str:
    """The whole page, readings of one name together."""
    groups: dict[str, list[Reading | Spread]] = {}
    for reading in readings:
        groups.setdefault(_name(reading), []).append(reading)
    return "".join(line + "\n" for name, group in groups.items() for line in _lines(name, group))


def _lines(name: str, group: list[Reading | Spread]) -> Iterator[str]:
    first = group[0]
    kind = "histogram" if isinstance(first, Spread) else "counter" if first.grows else "gauge"
    yield f"# TYPE {name} {kind}"
    for reading in group:
        if isinstance(reading, Reading):
            yield f"{name}{_labels(reading.attributes)} {_number(reading.value)}"
        else:
            yield from _histogram(name, reading)


def _histogram(name: str, spread: Spread) -> Iterator[str]:
    bounds = [*(_number(bound) for bound in spread.bounds), "+Inf"]
    for bound, count in zip(bounds, accumulate(spread.counts), strict=True):
        yield f"{name}_bucket{_labels((*spread.attributes, ('le', bound)))} {count}"
    labels = _labels(spread.attributes)
    yield f"{name}_sum{labels} {_number(spread.total)}"
    yield f"{name}_count{labels} {sum(spread.counts)}"


def _name(reading: Reading | Spread) -> str:
    if (theirs := _AS_IN_VLLM.get(reading.name)) is not None:
        return f"headrace:{theirs}"
    name = _NOT_A_NAME.sub("_", reading.name) + _UNITS.get(reading.unit, "")
    return f"{name}_total" if isinstance(reading, Reading) and reading.grows else name


def _labels(attributes: Attributes) -> str:
    if not attributes:
        return ""
    pairs = (f'{_NOT_A_NAME.sub("_", key)}="{_escaped(value)}"' for key, value in attributes)
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(value) if isinstance(value, float) and not value.is_integer() else str(int(value))
