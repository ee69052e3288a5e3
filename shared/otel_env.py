"""What the standard OTEL_* variables say: whether this process sends spans, how, and where to.

On: OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, OTEL_SDK_DISABLED is not
`true` and OTEL_TRACES_EXPORTER is not `none`. The rest is read by the SDK itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger("headrace.tracing")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP, GRPC = "http/protobuf", "grpc"
GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"


def is_on(env: Mapping[str, str]) -> bool:
    """Whether these variables ask for spans."""
    return (
        any(env.get(name) for name in ENDPOINTS)
        and env.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
        and env.get("OTEL_TRACES_EXPORTER", "").strip().lower() != "none"
    )


def protocol_of(env: Mapping[str, str]) -> str:
    """How spans travel; not checked."""
    return next((p for name in PROTOCOLS if (p := env.get(name))), HTTP)


def endpoint(env: Mapping[str, str], protocol: str) -> str:
    """Where the spans go, as the specification derives it."""
    if given := env.get(ENDPOINTS[0]):
        return given
    base = env.get(ENDPOINTS[1], "")
    return base if protocol == GRPC else f"{base.rstrip('/')}/v1/traces"
