"""A small OTLP/HTTP collector: keeps every span, and the last value of each metric. For tests and benches.

Parses ExportTraceServiceRequest with opentelemetry-proto, which shares no code with Headrace's span model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """One span as it came over the wire; ids are hex, times ns."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[tuple[str, int, dict[str, Any]], ...]
    links: tuple[tuple[str, str], ...]  # trace id, span id
    error: str
    resource: dict[str, Any]


class Receiver:
    """Listens on a port of 127.0.0.1 (0: any free one) in threads; `spans` grows."""

    def __init__(self, port: int = 0, *, keep: bool = True) -> None:
        self.spans: list[Received] = []
        self.metrics: dict[str, Any] = {}  # the last of each name, as it came
        self.count = 0
        self._keep = keep
        self._more = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                (receiver.take_metrics if self.path.endswith("/metrics") else receiver.take)(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        """Read one export request."""
        groups = ExportTraceServiceRequest.FromString(body).resource_spans
        with self._more:
            self.count += sum(len(scope.spans) for group in groups for scope in group.scope_spans)
            if self._keep:
                self.spans += [
                    _received(span, _values(group.resource.attributes))
                    for group in groups
                    for scope in group.scope_spans
                    for span in scope.spans
                ]
            self._more.notify_all()

    def take_metrics(self, body: bytes) -> None:
        """Read one export request of metrics."""
        groups = ExportMetricsServiceRequest.FromString(body).resource_metrics
        with self._more:
            for metric in (m for group in groups for scope in group.scope_metrics for m in scope.metrics):
                self.metrics[metric.name] = metric
            self._more.notify_all()

    def wait_for_metric(self, name: str, timeout_s: float) -> Any:
        """The metric of this name, once it is here. Raises TimeoutError."""
        with self._more:
            if not self._more.wait_for(lambda: name in self.metrics, timeout_s):
                raise TimeoutError(f"no metric {name}")
            return self.metrics[name]

    def wait_for(self, requests: Iterable[str], timeout_s: float) -> dict[str, Received]:
        """The root spans of these requests, by request id, once they are all here. Raises TimeoutError."""
        wanted = set(requests)
        with self._more:
            if not self._more.wait_for(lambda: wanted <= self.roots().keys(), timeout_s):
                raise TimeoutError(f"no span of {sorted(wanted - self.roots().keys())}")
            return {name: root for name, root in self.roots().items() if name in wanted}

    def roots(self) -> dict[str, Received]:
        """The root spans of all requests so far. Raises AssertionError when one has two."""
        found = [s for s in self.spans if "gen_ai.operation.name" in s.attributes]
        by_request = {s.attributes["request.id"]: s for s in found}
        assert len(by_request) == len(found), "a request with two root spans"
        return by_request

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events=tuple((e.name, e.time_unix_nano, _values(e.attributes)) for e in span.events),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        error=span.status.message if span.status.code == 2 else "",
        resource=resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: _value(a.value) for a in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(v) for v in value.array_value.values]
    return getattr(value, kind) if kind else None
