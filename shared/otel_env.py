"""What the standard OTEL_* variables say: whether this process sends spans and metrics, how, and where to.

On: OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, OTEL_SDK_DISABLED is not
`true` and OTEL_TRACES_EXPORTER is not `none`; of metrics METRICS in place of TRACES. The rest is read by
the SDK itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger("headrace.tracing")

TRACES, METRICS = "traces", "metrics"  # signals
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP, GRPC = "http/protobuf", "grpc"
GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"


def is_on(env: Mapping[str, str], signal: str = TRACES) -> bool:
    """Whether these variables ask for spans, or for metrics."""
    return (
        any(env.get(name) for name in _of(ENDPOINTS, signal))
        and env.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
        and env.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() != "none"
    )


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


def _of(names: tuple[str, ...], signal: str) -> tuple[str, ...]:
    return tuple(name.replace(TRACES.upper(), signal.upper()) for name in names)
