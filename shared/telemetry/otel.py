"""Spans go to an OTLP collector by the OpenTelemetry SDK, if the standard OTEL_* variables ask for them.

The variables say whether this process sends spans and metrics, how, and where to. On:
OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, OTEL_SDK_DISABLED is not `true` and
OTEL_TRACES_EXPORTER, a list, is empty or names `otlp`; of metrics METRICS in place of TRACES. Metrics are
also served to Prometheus when their list names `prometheus`. The rest is read by the SDK itself.

Beside metrics.py this is the only file that imports OpenTelemetry.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

from shared.errors import SetupError
from shared.telemetry import traces
from shared.telemetry.traces import SpanRecord

log = logging.getLogger("headrace.tracing")

TRACES, METRICS = "traces", "metrics"  # signals
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP, GRPC = "http/protobuf", "grpc"
GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"
PROMETHEUS_HOST, PROMETHEUS_PORT = "OTEL_EXPORTER_PROMETHEUS_HOST", "OTEL_EXPORTER_PROMETHEUS_PORT"
_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 9464  # as the specification says

SWITCH_S = 0.000_5  # the thread that encodes spans may hold up the event loop so long, not the usual 5 ms
QUEUE_SPANS = 8_192  # defaults of OTEL_BSP_*: a second of spans, sent each second
DELAY_MS = 1_000
TEST_TIMEOUT_S = 3
QUIET_S = 60.0  # between two lines about spans that do not arrive
_KINDS = {kind.name.lower(): kind for kind in SpanKind}
_ERRNO = re.compile(r"\[Errno \d+\] ([^\"')]+)")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OK = Status(StatusCode.UNSET)


def is_on(env: Mapping[str, str], signal: str = TRACES) -> bool:
    """Whether these variables ask for spans, or for metrics."""
    wanted = _exporters(env, signal) or {"otlp"}
    return any(env.get(name) for name in _of(ENDPOINTS, signal)) and "otlp" in wanted and not _disabled(env)


def prometheus_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Where these variables want metrics to be served, None when they do not. Raises SetupError."""
    if "prometheus" not in _exporters(env, METRICS) or _disabled(env):
        return None
    port = env.get(PROMETHEUS_PORT) or str(_DEFAULT_PORT)
    if not port.isdecimal() or int(port) > 65_535:
        raise SetupError(f"{PROMETHEUS_PORT}={port} is not a port: set it to 1-65535, or 0 for any free one")
    return env.get(PROMETHEUS_HOST) or _DEFAULT_HOST, int(port)


def protocol_of(env: Mapping[str, str], signal: str = TRACES) -> str:
    """How they travel; not checked."""
    return next((p for name in _of(PROTOCOLS, signal) if (p := env.get(name))), HTTP)


def endpoint(env: Mapping[str, str], protocol: str, signal: str = TRACES) -> str:
    """Where they go, as the specification derives it."""
    own, common = _of(ENDPOINTS, signal)
    if given := env.get(own):
        return given
    base = env.get(common, "")
    return base if protocol == GRPC else f"{base.rstrip('/')}/v1/{signal}"


def _exporters(env: Mapping[str, str], signal: str) -> set[str]:
    names = env.get(f"OTEL_{signal.upper()}_EXPORTER", "").lower().split(",")
    return {name.strip() for name in names} - {""}


def _disabled(env: Mapping[str, str]) -> bool:
    return env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _of(names: tuple[str, ...], signal: str) -> tuple[str, ...]:
    return tuple(name.replace(TRACES.upper(), signal.upper()) for name in names)


class Tracer(Protocol):
    """Decides which requests are traced, and sends their spans from a thread of its own."""

    def begin(self, given: str) -> tuple[str, str]:
        """For a request that came with the traceparent `given` (or none): the traceparent that names
        its root span, and the id of that span's parent."""

    def export(self, trace: str, parent_span: str, spans: Sequence[SpanRecord]) -> None:
        """Send one tree: its root is the span that `trace` names, below `parent_span`. Never blocks."""

    def test(self) -> None:
        """Send a span, and log whether it arrived. Returns at once."""

    def stop(self, timeout_s: float) -> None:
        """Send what waits, for at most `timeout_s`."""


def from_env(kind: str, actor: str) -> Tracer | None:
    """The tracer of the process `kind.actor`, None when spans are not asked for or cannot be sent; the
    log says then how to mend it."""
    if not is_on(os.environ):
        return None
    protocol = protocol_of(os.environ)
    if protocol not in (HTTP, GRPC):
        log.warning("traces: off, %s=%s is not known here: use %s or %s", PROTOCOLS[1], protocol, HTTP, GRPC)
        return None

    try:
        return OtelTracer(kind, actor, protocol)
    except ImportError as error:
        mend = f"pip install {GRPC_PACKAGE}, or set {PROTOCOLS[1]}={HTTP}"
        log.warning("traces: off, the protocol %s needs a package (%s): %s", protocol, error, mend)
    except Exception as error:  # noqa: BLE001 - a bad OTEL_* value must not stop a service
        log.warning("traces: off, the OTEL_* variables cannot be used: %s", error)
    return None


class OtelTracer:
    """See Tracer. Raises ImportError when the exporter's package is missing.

        export() ──▶ queue of the SDK's batch processor ──its thread──▶ OTLP over HTTP (or gRPC)

    A collector that is away costs a line of the log each minute: spans wait in the bounded queue, then the
    oldest are dropped.
    """

    def __init__(self, kind: str, actor: str, protocol: str) -> None:
        self._protocol = protocol
        self._resource = process_resource(kind, actor)
        self._reasons = _Reasons()
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._sampler = provider.sampler  # as OTEL_TRACES_SAMPLER says
        self._ids = provider.id_generator
        sys.setswitchinterval(SWITCH_S)
        self._scope = InstrumentationScope("headrace")
        self._processor = BatchSpanProcessor(
            _Exporter(_exporter(protocol), self._reasons, endpoint(os.environ, protocol)),
            max_queue_size=None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else QUEUE_SPANS,
            schedule_delay_millis=None if "OTEL_BSP_SCHEDULE_DELAY" in os.environ else DELAY_MS,
        )

    def begin(self, given: str) -> tuple[str, str]:
        """The client's trace goes on where its flags and the sampler say so; else one begins here."""
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

    def export(self, trace: str, parent_span: str, spans: Sequence[SpanRecord]) -> None:
        """Queue one tree of spans."""
        for span in self._readable(trace, parent_span, spans):
            self._processor.on_end(span)

    def test(self) -> None:
        """Send one span by an exporter of its own, so that nothing waits for it."""
        threading.Thread(target=self._test, name="trace-test", daemon=True).start()

    def stop(self, timeout_s: float) -> None:
        """Flush; a collector that hangs is not waited for longer than that, one that is away not at all."""
        flush = threading.Thread(target=self._processor.shutdown, name="trace-flush", daemon=True)
        flush.start()
        flush.join(0 if self._reasons.trouble else timeout_s)

    def _test(self) -> None:
        trace, _ = self.begin("")
        now_us = time.time_ns() // 1000
        exporter = _exporter(self._protocol, TEST_TIMEOUT_S)
        spans = self._readable(trace, traces.NO_PARENT, [SpanRecord("headrace start", now_us, now_us, None)])
        arrived = exporter.export(spans) is SpanExportResult.SUCCESS
        exporter.shutdown()
        where = endpoint(os.environ, self._protocol)
        if arrived:
            self._reasons.trouble = False
            log.info("traces: a test span arrived at %s", where)
        else:
            mend = f"start a collector there, or correct {ENDPOINTS[1]}"
            log.warning("traces: a test span did not arrive at %s (%s): %s", where, self._reasons.last, mend)

    def _readable(self, trace: str, parent_span: str, spans: Sequence[SpanRecord]) -> list[ReadableSpan]:
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
                self._resource,
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
    """Tells of spans that do not arrive, once a minute, and of the first that do again."""

    def __init__(self, inner: SpanExporter, reasons: _Reasons, where: str) -> None:
        self._inner, self._reasons, self._where = inner, reasons, where
        self._lost = 0
        self._quiet_until_s = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """On the processor's thread."""
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info("traces: %s takes spans again; %d were lost", self._where, self._lost)
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
    """Keeps what the SDK would log about a failed export, each time it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "no answer"
        self.trouble = False  # since the last export that arrived
        sdk = logging.getLogger("opentelemetry")
        sdk.handlers[:] = [self]
        sdk.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Remember the line in place of printing it; what is not about an export is for the user."""
        text = record.getMessage()
        if not record.name.startswith(("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")):
            log.warning("traces: %s", text)
            return
        self.trouble = True
        if "retries or shutdown" not in text:  # says less than the attempts before it
            cause = _ERRNO.search(text)  # the rest of such a line is the names of classes around it
            self.last = cause.group(1) if cause else text[:200]


def _exporter(protocol: str, timeout_s: float | None = None) -> SpanExporter:
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(timeout=timeout_s)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(timeout=timeout_s)


def process_resource(kind: str, actor: str) -> Resource:
    """What the variables say, and for the rest this process."""
    own = Resource({traces.SERVICE_INSTANCE: f"{kind}.{actor}"})
    found = own.merge(Resource.create())
    if str(found.attributes[traces.SERVICE_NAME]).startswith("unknown_service"):
        found = found.merge(Resource({traces.SERVICE_NAME: f"headrace-{kind}"}))
    return _ProcessResource(found.attributes, found.schema_url)


class _ProcessResource(Resource):
    """The one resource of a process. The encoder looks it up for each span, and the SDK's own hash dumps
    all attributes as JSON each time: a sixth of the whole encoding."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _context(trace: str, *, is_remote: bool = False) -> SpanContext:
    _, trace_id, span_id, flags = trace.split("-")[:4]
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(int(flags, 16)))


def _child_id(root: int, index: int) -> int:
    """The id of the span `index` below a root: the same whoever builds it."""
    digest = hashlib.blake2b(root.to_bytes(8, "big") + index.to_bytes(4, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1
