"""Where the readings of a process go, if its environment wants them anywhere: to an OTLP collector, to a page
for Prometheus, or both. Off costs nothing: OpenTelemetry is imported only for OTLP."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Protocol

from shared.otel_env import GRPC, GRPC_PACKAGE, HTTP, METRICS, is_on, log, prometheus_address, protocol_of
from shared.readings import Readings
from shared.scrape import ScrapePoint


class MeterSink(Protocol):
    """Sends the newest readings from a thread of its own, every OTEL_METRIC_EXPORT_INTERVAL."""

    def put(self, readings: Readings) -> None:
        """These are the newest. Never blocks."""

    def stop(self, timeout_s: float) -> None:
        """Send the newest, waiting for at most `timeout_s`."""


def from_env(kind: str, actor: str) -> MeterSink | None:
    """The sink of the process `kind.actor`, None when metrics are not asked for or cannot be sent; the log
    says then how to mend it."""
    if not is_on(os.environ, METRICS):
        return None
    protocol = protocol_of(os.environ, METRICS)
    if protocol not in (HTTP, GRPC):
        log.warning("metrics: off, the protocol %s is not known here: use %s or %s", protocol, HTTP, GRPC)
        return None
    try:
        from shared.otel_metrics import OtelMeterSink

        return OtelMeterSink(kind, actor, protocol)
    except ImportError as error:
        log.warning("metrics: off, %s needs a package (%s): pip install %s", protocol, error, GRPC_PACKAGE)
    except Exception as error:  # noqa: BLE001 - a bad OTEL_* value must not stop a service
        log.warning("metrics: off, the OTEL_* variables cannot be used: %s", error)
    return None


async def scrape_point(readings: Callable[[], Readings]) -> ScrapePoint | None:
    """The page of this process, None when it is not asked for. Raises SetupError when its port is taken."""
    address = prometheus_address(os.environ)
    if address is None:
        return None
    point = ScrapePoint(*address, readings)
    await point.start()
    logging.getLogger("headrace.process").info("metrics at %s", point.url)
    return point
