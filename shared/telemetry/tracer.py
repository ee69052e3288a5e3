"""`from_env` makes the tracer of a process if its environment turns traces on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from shared.telemetry.otel import GRPC, GRPC_PACKAGE, HTTP, PROTOCOLS, is_on, log, protocol_of
from shared.telemetry.traces import SpanRecord


class Tracer(Protocol):
    """Decides which requests are traced, and sends their spans from its own thread."""

    def begin(self, given: str) -> tuple[str, str]:
        """For a request with the traceparent `given` ("" for none): the traceparent of its root span, and the
        id of that span's parent."""

    def export(self, trace: str, parent_span: str, spans: Sequence[SpanRecord]) -> None:
        """Send one tree: the traceparent `trace` identifies its root, below `parent_span`. Never blocks."""

    def test(self) -> None:
        """Send a span, and log whether it arrived. Returns at once."""

    def stop(self, timeout_s: float) -> None:
        """Send the waiting spans within `timeout_s`."""


def from_env(kind: str, actor: str) -> Tracer | None:
    """The tracer of the process `kind.actor`, None if traces are off or cannot be sent; the log then has the
    remedy."""
    if not is_on(os.environ):
        return None
    protocol = protocol_of(os.environ)
    if protocol not in (HTTP, GRPC):
        log.warning("traces: off, unknown %s=%s: use %s or %s", PROTOCOLS[1], protocol, HTTP, GRPC)
        return None

    from shared.telemetry.otel_sdk import OtelTracer

    try:
        return OtelTracer(kind, actor, protocol)
    except ImportError as error:
        mend = f"pip install {GRPC_PACKAGE}, or set {PROTOCOLS[1]}={HTTP}"
        log.warning("traces: off, the protocol %s needs a package (%s): %s", protocol, error, mend)
    except Exception as error:  # noqa: BLE001 - a bad OTEL_* value must not stop a service
        log.warning("traces: off, the OTEL_* variables cannot be used: %s", error)
    return None
