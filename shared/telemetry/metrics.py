"""Exports metrics by a page for Prometheus, by OTLP to a collector, or by both, as the environment selects.

The page has the text exposition format 0.0.4. Names follow the OpenTelemetry specification for Prometheus:
dots become `_`, the unit is a suffix (`_seconds`, `_bytes`), counters end in `_total`. Metrics that vLLM has,
too, get vLLM's name with `headrace:` instead of `vllm:`, so that its dashboards work.

OpenTelemetry is imported only for OTLP, prometheus_client only for a page. The HTTP server is our own, since
prometheus_client's limits neither connections (a thread each) nor the size of request heads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

from shared.processes import bind, http_url
from shared.telemetry.counters import (
    HistogramPoint,
    MetricPoint,
    Metrics,
    ProcessCounter,
    SchedulerCounter,
    declared,
)
from shared.telemetry.otel import PROMETHEUS_HOST, PROMETHEUS_PORT, prometheus_address

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_VLLM_NAMES = {  # its production metrics, https://docs.vllm.ai/en/stable/usage/metrics
    each.metric: each.vllm for each in declared(SchedulerCounter) if each.vllm
}
_UNITS = {"s": "_seconds", "By": "_bytes", "By/s": "_bytes_per_second"}
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")

_STARTED_S = time.time()  # at import, so about the start of the process
PATH = "/metrics"
REQUEST_TIMEOUT_S = 10.0  # for one request and its answer
MAX_HEAD_BYTES = 16_384
MAX_CONNECTIONS = 16


def process_metrics() -> Iterator[MetricPoint]:
    """The resources of this process, under the names of Prometheus's client libraries: CPU time and start
    everywhere, memory and open files on Linux."""
    yield ProcessCounter.CPU.point(time.process_time())
    yield ProcessCounter.START.point(_STARTED_S)
    statm = Path("/proc/self/statm")
    if statm.exists():
        resident_pages = int(statm.read_text().split()[1])
        yield ProcessCounter.MEMORY.point(resident_pages * os.sysconf("SC_PAGE_SIZE"))
        yield ProcessCounter.FILES.point(len(os.listdir("/proc/self/fd")))


def to_prometheus(readings: Metrics) -> bytes:
    """The whole page, readings of one name together."""
    from prometheus_client.core import Metric
    from prometheus_client.exposition import generate_latest

    families: dict[str, Metric] = {}
    for each in readings:
        name, labels = _name(each), {_label(key): value for key, value in each.attributes}
        if name not in families:
            kind = (
                "histogram" if isinstance(each, HistogramPoint) else "counter" if each.is_counter else "gauge"
            )
            families[name] = Metric(name.removesuffix("_total"), f"{each.name}, {each.unit}", kind)
        for suffix, more, value in _samples(each):
            families[name].add_sample(name + suffix, labels | more, value)
    page = SimpleNamespace(collect=families.values)  # a collector
    return generate_latest(page)


def _samples(point: MetricPoint | HistogramPoint) -> Iterator[tuple[str, dict[str, str], float]]:
    """Suffixes of the name, labels besides the reading's own, values."""
    if isinstance(point, MetricPoint):
        yield "", {}, point.value
        return
    bounds = (*(f"{bound:g}" for bound in point.bounds), "+Inf")
    for bound, count in zip(bounds, accumulate(point.counts), strict=True):
        yield "_bucket", {"le": bound}, count
    yield "_sum", {}, point.total
    yield "_count", {}, sum(point.counts)


def _name(point: MetricPoint | HistogramPoint) -> str:
    if (theirs := _VLLM_NAMES.get(point.name)) is not None:
        return f"headrace:{theirs}"
    name = _label(point.name) + _UNITS.get(point.unit, "")
    return f"{name}_total" if isinstance(point, MetricPoint) and point.is_counter else name


def _label(key: str) -> str:
    return _NOT_A_NAME.sub("_", key)


async def scrape_point(readings: Callable[[], Metrics]) -> ScrapePoint | None:
    """The page of this process, None if it is off. Raises SetupError if its port is in use."""
    address = prometheus_address(os.environ)
    if address is None:
        return None
    point = ScrapePoint(*address, readings)
    await point.start()
    logging.getLogger("headrace.process").info("metrics at %s", point.url)
    return point


class ScrapePoint:
    """Serves metrics at `address` from `start` to `stop`, on the event loop of the process: an answer proves
    that the loop runs.

    One request per connection, GET or HEAD of /metrics. The page is built for each request.
    """

    def __init__(self, host: str, port: int, readings: Callable[[], Metrics]) -> None:
        """Port 0 is any free one. Raises SetupError if the port is in use."""
        self._metrics = readings
        self._bound = reserve(host, port)
        self.address: tuple[str, int] = self._bound.getsockname()[:2]
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The URL of the page, for this machine."""
        return http_url(*self.address) + PATH

    async def start(self) -> None:
        """Return when the server accepts connections."""
        to_prometheus(())  # imports prometheus_client now, before the first request
        self._server = await asyncio.start_server(self._accept, sock=self._bound, limit=MAX_HEAD_BYTES)

    async def stop(self) -> None:
        """Close the server and its connections at once."""
        if self._server is None:
            self._bound.close()
            return
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(answer(head, self._metrics))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # no valid request, or the client has gone
        finally:
            writer.transport.abort()


def reserve(host: str, port: int, *, listen: bool = True) -> socket.socket:
    """The bound socket of a page. Raises SetupError."""
    return bind(host, port, "metrics", f"set {PROMETHEUS_PORT} to another", listen=listen)


def answer(head: bytes, readings: Callable[[], Metrics]) -> bytes:
    """The HTTP response to a request head."""
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", b"GET it\n", extra="Allow: GET, HEAD\r\n")
    if path != PATH.encode():
        return _response("404 Not Found", f"{PATH} is here\n".encode(), bare=method == b"HEAD")
    return _response("200 OK", to_prometheus(readings()), kind=CONTENT_TYPE, bare=method == b"HEAD")


def _response(
    status: str, body: bytes, *, kind: str = "text/plain; charset=utf-8", extra: str = "", bare: bool = False
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"{extra}Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if bare else body)


class ScrapeTargets:
    """The address at which Prometheus reads each service: one port each, from the standard port upwards, or
    free ports if that is 0. None if `env` does not ask for Prometheus.

    A port stays reserved until the run ends, so that a restarted service keeps it: the system gives outgoing
    connections ports of the same range.
    """

    def __init__(self, env: Mapping[str, str], names: Sequence[str]) -> None:
        """Raises SetupError if a port is taken."""
        self.addresses: dict[str, tuple[str, int]] = {}
        self._held: list[socket.socket] = []
        if (address := prometheus_address(env)) is None:
            return
        host, first = address
        for i, name in enumerate(names):
            held = reserve(host, first + i if first else 0, listen=False)
            self._held.append(held)
            self.addresses[name] = (host, held.getsockname()[1])

    def variables(self, name: str) -> dict[str, str]:
        """The environment variables with the address of this service."""
        if (address := self.addresses.get(name)) is None:
            return {}
        return {PROMETHEUS_HOST: address[0], PROMETHEUS_PORT: str(address[1])}

    def shown(self) -> str:
        """All addresses in one line."""
        return ", ".join(f"{name} {http_url(*page)}{PATH}" for name, page in self.addresses.items())

    def close(self) -> None:
        """Release all ports."""
        for held in self._held:
            held.close()
