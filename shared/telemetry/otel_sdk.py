"""Sends spans and metrics to an OTLP collector with the OpenTelemetry SDK; the only module that imports it.

    export() ──▶ queue of the SDK's batch processor ──its thread──▶ OTLP over HTTP (or gRPC)
    put(readings) ──▶ the newest ◀── PeriodicExportingMetricReader's thread ──▶ OTLP over HTTP (or gRPC)

Imported only if the OTEL_* variables turn one of both on: see otel.py. Without a collector one line per
minute is logged: spans wait in the bounded queue, then the oldest are dropped. The SDK observes counters and
gauges. It cannot observe histograms, so the exporter adds them to the collected data; they are cumulative.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from opentelemetry.context import Context
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
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

from shared.telemetry import traces
from shared.telemetry.counters import HistogramPoint, MetricPoint, Metrics
from shared.telemetry.otel import ENDPOINTS, GRPC, METRICS, TRACES, endpoint, log
from shared.telemetry.traces import SpanData

SWITCH_S = 0.000_5  # the thread that encodes spans delays the event loop at most this long, instead of 5 ms
QUEUE_SPANS = 8_192  # defaults of OTEL_BSP_*: a second of spans, sent each second
DELAY_MS = 1_000
TEST_TIMEOUT_S = 3
MAX_RESOURCES = 256  # actors whose spans a process sends; restarted ones have new names
UNSURE_S = 0.3  # for the last metrics, while a collector has not yet answered the first ones
QUIET_S = 60.0  # between two log lines about lost spans
_KINDS = {kind.name.lower(): kind for kind in SpanKind}
_ERRNO = re.compile(r"\[Errno \d+\] ([^\"')]+)")
_SDK_LOG = logging.getLogger("opentelemetry")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OK = Status(StatusCode.UNSET)
SCOPE = "headrace"


def build(signal: str, kind: str, actor: str, protocol: str) -> OtelTracer | OtelMeterSink:
    """What sends a signal. Raises ImportError if the exporter's package is missing."""
    return (OtelTracer if signal == TRACES else OtelMeterSink)(kind, actor, protocol)


class OtelTracer:
    """See Tracer. Raises ImportError if the exporter's package is missing."""

    def __init__(self, kind: str, actor: str, protocol: str) -> None:
        self._protocol = protocol
        self._own = f"{kind}.{actor}"
        self._reasons = _Reasons()
        self._resource = lru_cache(MAX_RESOURCES)(process_resource)
        provider = TracerProvider(resource=self._resource(self._own), shutdown_on_exit=False)
        self._sampler = provider.sampler  # by OTEL_TRACES_SAMPLER
        self._ids = provider.id_generator
        sys.setswitchinterval(SWITCH_S)
        self._scope = InstrumentationScope("headrace")
        self._processor = BatchSpanProcessor(
            _Exporter(_exporter(protocol), self._reasons, endpoint(os.environ, protocol)),
            max_queue_size=None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else QUEUE_SPANS,
            schedule_delay_millis=None if "OTEL_BSP_SCHEDULE_DELAY" in os.environ else DELAY_MS,
        )

    def begin(self, given: str) -> tuple[str, str]:
        """Continue the client's trace if its flags and the sampler allow, else start one."""
        context = Context()
        trace_id, parent = self._ids.generate_trace_id(), traces.NO_PARENT
        if given:
            remote = _context(given, is_remote=True)
            context = set_span_in_context(NonRecordingSpan(remote), context)
            trace_id, parent = remote.trace_id, traces.span_id(given)
        decision = self._sampler.should_sample(context, trace_id, "request", SpanKind.SERVER).decision
        root = self._ids.generate_span_id()
        sampled = decision is Decision.RECORD_AND_SAMPLE
        return traces.make(f"{trace_id:032x}", f"{root:016x}", sampled=sampled), parent

    def export(self, trace: str, parent_span: str, spans: Sequence[SpanData]) -> None:
        """Queue one tree of spans."""
        for span in self._readable(trace, parent_span, spans):
            self._processor.on_end(span)

    def test(self) -> None:
        """Send one span by a separate exporter on a thread, so that nothing waits for it."""
        threading.Thread(target=self._test, name="trace-test", daemon=True).start()

    def stop(self, timeout_s: float) -> None:
        """Flush for at most `timeout_s`; without waiting if the collector is away."""
        self._reasons.send_last(
            "trace-flush", self._processor.shutdown, 0 if self._reasons.trouble else timeout_s
        )

    def _test(self) -> None:
        trace, _ = self.begin("")
        now_us = time.time_ns() // 1000
        exporter = _exporter(self._protocol, TEST_TIMEOUT_S)
        spans = self._readable(trace, traces.NO_PARENT, [SpanData("headrace start", now_us, now_us, None)])
        arrived = False
        with contextlib.suppress(ValueError):  # its last try may begin with no time left
            arrived = exporter.export(spans) is SpanExportResult.SUCCESS
        exporter.shutdown()
        where = endpoint(os.environ, self._protocol)
        if arrived:
            self._reasons.trouble = False
            log.info("traces: a test span arrived at %s", where)
        else:
            mend = f"start a collector there, or correct {ENDPOINTS[1]}"
            log.warning("traces: a test span did not arrive at %s (%s): %s", where, self._reasons.last, mend)

    def _resource_of(self, component: str) -> Resource:
        """The resource of a service in a span: `kind.id`, or `kind`; "" is this process."""
        return self._resource(self._own if self._own.startswith(component) else component)

    def _readable(self, trace: str, parent_span: str, spans: Sequence[SpanData]) -> list[ReadableSpan]:
        root = _context(trace)
        above = traces.span_number(parent_span)
        ids = [root.span_id, *(_child_id(root.span_id, i) for i in range(1, len(spans)))]
        contexts = [SpanContext(root.trace_id, span_id, False, _SAMPLED) for span_id in ids]
        remote = SpanContext(root.trace_id, above, True, _SAMPLED) if above else None
        return [
            ReadableSpan(
                span.name,
                contexts[i],
                remote if span.parent is None else contexts[span.parent],
                self._resource_of(str(span.attributes.get(traces.COMPONENT, ""))),
                span.attributes,
                [Event(e.name, e.attributes, e.at_us * 1000) for e in span.events],
                [Link(_context(link)) for link in span.links],
                _KINDS[span.kind],
                status=Status(StatusCode.ERROR, span.error) if span.error else _OK,
                start_time=span.start_us * 1000,
                end_time=span.end_us * 1000,
                instrumentation_scope=self._scope,
            )
            for i, span in enumerate(spans)
        ]


class _Exporter(SpanExporter):
    """Logs lost spans once a minute, and the first spans that arrive again."""

    def __init__(self, inner: SpanExporter, reasons: _Reasons, where: str) -> None:
        self._inner, self._reasons, self._where = inner, reasons, where
        self._lost = 0
        self._quiet_until_s = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """On the processor's thread."""
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info("traces: spans arrive again at %s; %d were lost", self._where, self._lost)
            self._lost, self._quiet_until_s, self._reasons.trouble = 0, 0.0, False
            return result
        self._lost += len(spans)
        if time.monotonic() >= self._quiet_until_s:
            self._quiet_until_s = time.monotonic() + QUIET_S
            why = self._reasons.last
            log.warning("traces: %d spans did not arrive at %s (%s)", self._lost, self._where, why)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class _Reasons(logging.Handler):
    """Keeps the SDK's log line about a failed export instead of printing each one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "no answer"
        self.trouble = False  # since the last export that arrived
        self._settled = threading.Event()  # a flush has ended, or a try to send has failed
        _SDK_LOG.handlers[:] = [self]
        _SDK_LOG.propagate = False

    def send_last(self, name: str, send: Callable[[], object], timeout_s: float) -> None:
        """Send what waits, on the thread `name`. Returns when it is sent, at the first try that fails, and at
        the latest after `timeout_s`: the services of a fleet stop one after the other."""
        self._settled.clear()

        def run() -> None:
            send()
            self._settled.set()

        threading.Thread(target=run, name=name, daemon=True).start()
        self._settled.wait(timeout_s)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line about an export; log any other."""
        text = record.getMessage()
        if not record.name.startswith(("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")):
            log.warning("traces: %s", text)
            return
        self.trouble = True
        self._settled.set()
        if "retries or shutdown" not in text:  # the lines of the attempts before have the cause
            cause = _ERRNO.search(text)  # the rest of such a line is names of classes
            self.last = cause.group(1) if cause else text[:200]


def _exporter(protocol: str, timeout_s: float | None = None) -> SpanExporter:
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(timeout=timeout_s)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(timeout=timeout_s)


def process_resource(actor: str) -> Resource:
    """The resource of the actor `kind.id`: the OTEL_* variables, with defaults for service and instance; of a
    `kind` alone the instance is not known."""
    own = Resource({traces.SERVICE_INSTANCE: actor} if "." in actor else {})
    found = own.merge(Resource.create())
    if str(found.attributes[traces.SERVICE_NAME]).startswith("unknown_service"):
        found = found.merge(Resource({traces.SERVICE_NAME: f"headrace-{actor.partition('.')[0]}"}))
    return _ProcessResource(found.attributes, found.schema_url)


class _ProcessResource(Resource):
    """The only resource of an actor. The encoder hashes it for each span, and the SDK's hash dumps all
    attributes as JSON: a sixth of the encoding time."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _context(trace: str, *, is_remote: bool = False) -> SpanContext:
    _, trace_id, span_id, flags = trace.split("-")[:4]
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(int(flags, 16)))


def _child_id(root: int, index: int) -> int:
    """The id of the span `index` below a root: the same in each process."""
    digest = hashlib.blake2b(root.to_bytes(8, "big") + index.to_bytes(4, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1


class OtelMeterSink:
    """See MeterSink. Raises ImportError if the exporter's package is missing."""

    def __init__(self, kind: str, actor: str, protocol: str) -> None:
        self._metrics: Metrics = ()
        self._known: set[str] = set()
        self._reasons = next((h for h in _SDK_LOG.handlers if isinstance(h, _Reasons)), None) or _Reasons()
        where = endpoint(os.environ, protocol, METRICS)
        self._exporter = _WithHistograms(_metric_exporter(protocol), self._histograms, where)
        self._reader = PeriodicExportingMetricReader(self._exporter)
        self._provider = MeterProvider(
            [self._reader], process_resource(f"{kind}.{actor}"), shutdown_on_exit=False
        )
        self._meter = self._provider.get_meter(SCOPE)

    def put(self, readings: Metrics) -> None:
        """Replace the metrics; a new name becomes an instrument. The first ones are sent at once, so that the
        log and `stop` know whether a collector is there."""
        first, self._metrics = not self._metrics, readings
        for point in readings:
            if isinstance(point, MetricPoint) and point.name not in self._known:
                self._known.add(point.name)
                make: Callable[..., Any] = (
                    self._meter.create_observable_counter
                    if point.is_counter
                    else self._meter.create_observable_gauge
                )
                make(point.name, [self._observer(point.name)], point.unit)
        if first and readings:
            threading.Thread(target=self._reader.collect, name="metrics-first", daemon=True).start()

    def stop(self, timeout_s: float) -> None:
        """Send once more, for at most `timeout_s`; without waiting if the collector is away."""
        arrived, trouble = self._exporter.arrived, self._reasons.trouble
        wait_s = timeout_s if arrived else UNSURE_S if arrived is None and not trouble else 0
        self._reasons.send_last("metrics-flush", self._provider.shutdown, wait_s)

    def _observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(r.value, dict(r.attributes))
                for r in self._metrics
                if isinstance(r, MetricPoint) and r.name == name
            ]

        return observe

    def _histograms(self) -> list[HistogramPoint]:
        return [point for point in self._metrics if isinstance(point, HistogramPoint)]


class _WithHistograms(MetricExporter):
    """Adds the histograms to each export, and logs when metrics start and stop to arrive."""

    def __init__(self, inner: Any, histograms: Callable[[], list[HistogramPoint]], where: str) -> None:
        super().__init__(inner._preferred_temporality, inner._preferred_aggregation)  # by OTEL_* variables
        self._inner, self._histograms, self._where = inner, histograms, where
        self._began_ns = time.time_ns()
        self.arrived: bool | None = None  # the last export; None before the first

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """On the reader's thread."""
        found: MetricExportResult = self._inner.export(
            self._completed(metrics_data), timeout_millis, **kwargs
        )
        arrived = found is MetricExportResult.SUCCESS
        if arrived is not self.arrived:
            self.arrived = arrived
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
        """The data with the histograms, in the only scope: the encoder writes each scope once."""
        (group,) = data.resource_metrics
        (scope,) = group.scope_metrics
        more = [_metric(histogram, self._began_ns, time.time_ns()) for histogram in self._histograms()]
        whole = replace(scope, metrics=[*scope.metrics, *more])
        return MetricsData([replace(group, scope_metrics=[whole])])


def _metric(histogram: HistogramPoint, began_ns: int, now_ns: int) -> Metric:
    point = HistogramDataPoint(
        attributes=dict(histogram.attributes),
        start_time_unix_nano=began_ns,
        time_unix_nano=now_ns,
        count=sum(histogram.counts),
        sum=histogram.total,
        bucket_counts=histogram.counts,
        explicit_bounds=histogram.bounds,
        min=None,  # type: ignore[arg-type]  # not kept, and optional on the wire
        max=None,  # type: ignore[arg-type]  # likewise
    )
    return Metric(histogram.name, None, histogram.unit, Histogram([point], AggregationTemporality.CUMULATIVE))


def _metric_exporter(protocol: str) -> MetricExporter:
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()
