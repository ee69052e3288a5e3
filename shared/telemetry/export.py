"""What a process sends its spans and its metrics with, if its environment turns them on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, Protocol

from shared.telemetry import otel
from shared.telemetry.counters import Metrics
from shared.telemetry.traces import SpanData

EXPORTERS = {  # by their protocols
    (otel.HTTP, otel.GRPC): "shared.telemetry.otel_sdk:build",
}


class Tracer(Protocol):
    """Decides which requests are traced, and sends their spans from its own thread."""

    def begin(self, given: str) -> tuple[str, str]:
        """For a request with the traceparent `given` ("" for none): the traceparent of its root span, and the
        id of that span's parent."""

    def export(self, trace: str, parent_span: str, spans: Sequence[SpanData]) -> None:
        """Send one tree: the traceparent `trace` identifies its root, below `parent_span`. Never blocks."""

    def test(self) -> None:
        """Send a span, and log whether it arrived. Returns at once."""

    def stop(self, timeout_s: float) -> None:
        """Send the waiting spans within `timeout_s`."""


class MeterSink(Protocol):
    """Sends the newest metrics from its own thread, every OTEL_METRIC_EXPORT_INTERVAL."""

    def put(self, readings: Metrics) -> None:
        """Replace the newest metrics. Never blocks."""

    def stop(self, timeout_s: float) -> None:
        """Send the newest metrics within `timeout_s`."""


def tracer_from_env(kind: str, actor: str) -> Tracer | None:
    """The tracer of the process `kind.actor`, None if traces are off or cannot be sent."""

    return _made(otel.TRACES, kind, actor)  # type: ignore[no-any-return]  # of the table


def meter_sink_from_env(kind: str, actor: str) -> MeterSink | None:
    """The sink of the process `kind.actor`, None if metrics are off or cannot be sent."""

    return _made(otel.METRICS, kind, actor)  # type: ignore[no-any-return]  # of the table


def _made(signal: str, kind: str, actor: str) -> Any:
    """What sends a signal, None if that is off or cannot be made; the log then has the remedy."""
    if not otel.is_on(os.environ, signal):
        return None
    protocol = otel.protocol_of(os.environ, signal)
    exporter = next((build for protocols, build in EXPORTERS.items() if protocol in protocols), "")
    if not exporter:
        known = " or ".join(name for protocols in EXPORTERS for name in protocols)
        otel.log.warning("%s: off, unknown %s=%s: use %s", signal, otel.PROTOCOLS[1], protocol, known)
        return None
    try:
        return resolve_name(exporter)(signal, kind, actor, protocol)
    except ImportError as error:
        mend = f"pip install {otel.GRPC_PACKAGE}, or set {otel.PROTOCOLS[1]}={otel.HTTP}"
        otel.log.warning("%s: off, the protocol %s needs a package (%s): %s", signal, protocol, error, mend)
    except Exception as error:  # noqa: BLE001 - a bad OTEL_* value must not stop a service
        otel.log.warning("%s: off, the OTEL_* variables cannot be used: %s", signal, error)
    return None
