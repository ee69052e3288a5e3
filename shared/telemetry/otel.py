"""Reads the standard OTEL_* variables: whether this process sends spans and metrics, how, and where.

Traces are on if OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, OTEL_SDK_DISABLED
is not `true`, and the list OTEL_TRACES_EXPORTER is empty or has `otlp`. Metrics have the same variables with
METRICS instead of TRACES, and are served to Prometheus if their list has `prometheus`. The SDK reads the
other variables. Only otel_sdk.py imports OpenTelemetry, and it is imported only if traces or metrics are on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shared.errors import SetupError

log = logging.getLogger("headrace.tracing")

TRACES, METRICS = "traces", "metrics"  # signals
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP, GRPC = "http/protobuf", "grpc"
GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"
PROMETHEUS_HOST, PROMETHEUS_PORT = "OTEL_EXPORTER_PROMETHEUS_HOST", "OTEL_EXPORTER_PROMETHEUS_PORT"
_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 9464  # as in the specification


def is_on(env: Mapping[str, str], signal: str = TRACES) -> bool:
    """Whether OTLP export of the signal is on."""
    wanted = _exporters(env, signal) or {"otlp"}
    return any(env.get(name) for name in _of(ENDPOINTS, signal)) and "otlp" in wanted and not _is_off(env)


def prometheus_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """The address of the metrics page, None if it is off. Raises SetupError."""
    if "prometheus" not in _exporters(env, METRICS) or _is_off(env):
        return None
    port = env.get(PROMETHEUS_PORT) or str(_DEFAULT_PORT)
    if not port.isdecimal() or int(port) > 65_535:
        raise SetupError(f"{PROMETHEUS_PORT}={port} is not a port: set it to 1-65535, or 0 for any free one")
    return env.get(PROMETHEUS_HOST) or _DEFAULT_HOST, int(port)


def protocol_of(env: Mapping[str, str], signal: str = TRACES) -> str:
    """The OTLP protocol of the signal, not validated."""
    return next((p for name in _of(PROTOCOLS, signal) if (p := env.get(name))), HTTP)


def endpoint(env: Mapping[str, str], protocol: str, signal: str = TRACES) -> str:
    """The OTLP endpoint of the signal, derived as in the specification."""
    own, common = _of(ENDPOINTS, signal)
    if given := env.get(own):
        return given
    base = env.get(common, "")
    return base if protocol == GRPC else f"{base.rstrip('/')}/v1/{signal}"


def _exporters(env: Mapping[str, str], signal: str) -> set[str]:
    names = env.get(f"OTEL_{signal.upper()}_EXPORTER", "").lower().split(",")
    return {name.strip() for name in names} - {""}


def _is_off(env: Mapping[str, str]) -> bool:
    return env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _of(names: tuple[str, ...], signal: str) -> tuple[str, ...]:
    return tuple(name.replace(TRACES.upper(), signal.upper()) for name in names)
