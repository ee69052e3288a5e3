"""Metrics to an OTLP collector by the OpenTelemetry SDK; beside otel.py the only file that imports it.

    put(readings) ──▶ the newest ◀── PeriodicExportingMetricReader's thread ──▶ OTLP over HTTP (or gRPC)

Counters and gauges are observed by the SDK. Histograms are counted where they happen and cannot be observed,
so the exporter adds them to what the SDK has collected; they are cumulative.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)

from shared.otel import process_resource
from shared.otel_env import GRPC, METRICS, endpoint, log
from shared.readings import Reading, Readings, Spread

SCOPE = "headrace"


class OtelMeterSink:
    """See shared.metering.MeterSink. Raises ImportError when the exporter's package is missing."""

    def __init__(self, kind: str, actor: str, protocol: str) -> None:
        self._readings: Readings = ()
        self._known: set[str] = set()
        where = endpoint(os.environ, protocol, METRICS)
        self._reader = PeriodicExportingMetricReader(_WithSpreads(_exporter(protocol), self._spreads, where))
        self._provider = MeterProvider([self._reader], process_resource(kind, actor), shutdown_on_exit=False)
        self._meter = self._provider.get_meter(SCOPE)

    def put(self, readings: Readings) -> None:
        """Replace the readings; a name that is new becomes an instrument."""
        self._readings = readings
        for reading in readings:
            if isinstance(reading, Reading) and reading.name not in self._known:
                self._known.add(reading.name)
                make: Callable[..., Any] = (
                    self._meter.create_observable_counter
                    if reading.grows
                    else self._meter.create_observable_gauge
                )
                make(reading.name, [self._observer(reading.name)], reading.unit)

    def stop(self, timeout_s: float) -> None:
        """Send once more; a collector that hangs is not waited for longer than that."""
        last = threading.Thread(target=self._provider.shutdown, name="metrics-flush", daemon=True)
        last.start()
        last.join(timeout_s)

    def _observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(r.value, dict(r.attributes))
                for r in self._readings
                if isinstance(r, Reading) and r.name == name
            ]

        return observe

    def _spreads(self) -> list[Spread]:
        return [reading for reading in self._readings if isinstance(reading, Spread)]


class _WithSpreads(MetricExporter):
    """Adds the histograms, and tells when metrics begin and cease to arrive."""

    def __init__(self, inner: Any, spreads: Callable[[], list[Spread]], where: str) -> None:
        super().__init__(inner._preferred_temporality, inner._preferred_aggregation)  # as the variables say
        self._inner, self._spreads, self._where = inner, spreads, where
        self._began_ns = time.time_ns()
        self._arrived: bool | None = None

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """On the reader's thread."""
        found: MetricExportResult = self._inner.export(
            self._completed(metrics_data), timeout_millis, **kwargs
        )
        arrived = found is MetricExportResult.SUCCESS
        if arrived is not self._arrived:
            self._arrived = arrived
            if arrived:
                log.info("metrics: arrive at %s", self._where)
            else:
                log.warning("metrics: do not arrive at %s: start a collector there", self._where)
        return found

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return bool(self._inner.force_flush(timeout_millis))

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._inner.shutdown(timeout_millis, **kwargs)

    def _completed(self, data: MetricsData) -> MetricsData:
        """In the one scope there is: the encoder takes each scope once."""
        (group,) = data.resource_metrics
        (scope,) = group.scope_metrics
        more = [_metric(spread, self._began_ns, time.time_ns()) for spread in self._spreads()]
        whole = replace(scope, metrics=[*scope.metrics, *more])
        return MetricsData([replace(group, scope_metrics=[whole])])


def _metric(spread: Spread, began_ns: int, now_ns: int) -> Metric:
    point = HistogramDataPoint(
        attributes=dict(spread.attributes),
        start_time_unix_nano=began_ns,
        time_unix_nano=now_ns,
        count=sum(spread.counts),
        sum=spread.total,
        bucket_counts=spread.counts,
        explicit_bounds=spread.bounds,
        min=None,  # type: ignore[arg-type]  # not kept, and optional on the wire
        max=None,  # type: ignore[arg-type]  # likewise
    )
    return Metric(spread.name, None, spread.unit, Histogram([point], AggregationTemporality.CUMULATIVE))


def _exporter(protocol: str) -> MetricExporter:
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()
