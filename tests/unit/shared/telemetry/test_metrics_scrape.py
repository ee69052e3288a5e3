"""The page for Prometheus: its variables, its ports, its names, and which answer each client gets."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from shared.errors import SetupError
from shared.telemetry import metrics
from shared.telemetry.counters import HistogramPoint, MetricPoint, Metrics
from shared.telemetry.metrics import (
    MAX_CONNECTIONS,
    ScrapePoint,
    ScrapeTargets,
    answer,
    process_metrics,
    to_prometheus,
)
from shared.telemetry.otel import METRICS, is_on, prometheus_address

ON = {"OTEL_METRICS_EXPORTER": "prometheus"}
COUNTED: Metrics = (MetricPoint("n", 3, "1", is_counter=True),)
PAGE = "# HELP n_total n, 1\n# TYPE n_total counter\nn_total 3.0\n"


@pytest.mark.parametrize(
    ("variables", "address", "otlp"),
    [
        ({}, None, True),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, None, True),
        ({"OTEL_METRICS_EXPORTER": "none"}, None, False),
        (ON, ("127.0.0.1", 9464), False),
        ({"OTEL_METRICS_EXPORTER": " Prometheus , OTLP"}, ("127.0.0.1", 9464), True),
        ({**ON, "OTEL_EXPORTER_PROMETHEUS_HOST": "0.0.0.0"}, ("0.0.0.0", 9464), False),
        ({**ON, "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}, ("127.0.0.1", 0), False),
        ({**ON, "OTEL_SDK_DISABLED": "true"}, None, False),
    ],
)
def test_standard_variables_choose_the_page(
    variables: dict[str, str], address: tuple[str, int] | None, otlp: bool
) -> None:
    assert prometheus_address(variables) == address
    assert is_on({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", **variables}, METRICS) is otlp


@pytest.mark.parametrize("port", ["http", "-1", "65536"])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(SetupError, match=f"OTEL_EXPORTER_PROMETHEUS_PORT={port} is not a port"):
        prometheus_address({**ON, "OTEL_EXPORTER_PROMETHEUS_PORT": port})


def test_each_service_has_its_port_from_the_first_upwards() -> None:
    assert ScrapeTargets({}, ["gateway"]).addresses == {}
    assert ScrapeTargets({}, ["gateway"]).variables("gateway") == {}
    first = 20_000 + os.getpid() % 10_000
    found = ScrapeTargets({**ON, "OTEL_EXPORTER_PROMETHEUS_PORT": str(first)}, ["gateway", "executor-0"])
    assert found.addresses == {"gateway": ("127.0.0.1", first), "executor-0": ("127.0.0.1", first + 1)}
    found_variables = found.variables("executor-0")
    assert prometheus_address({**ON, **found_variables}) == ("127.0.0.1", first + 1)
    assert found.shown() == (
        f"gateway http://127.0.0.1:{first}/metrics, executor-0 http://127.0.0.1:{first + 1}/metrics"
    )
    found.close()


async def test_a_free_port_is_held_for_the_service_that_comes_later() -> None:
    pages = ScrapeTargets({**ON, "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}, ["a", "b", "c"])
    assert len({port for _, port in pages.addresses.values()} - {0}) == 3
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(pages.addresses["a"])
    for _ in range(2):  # started, and started again
        point = ScrapePoint(*pages.addresses["a"], lambda: COUNTED)
        await point.start()
        assert (await read(point, b"GET /metrics HTTP/1.1\r\n\r\n")).endswith(PAGE.encode())
        with pytest.raises(SetupError, match="metrics cannot listen on"):
            ScrapeTargets({**ON, "OTEL_EXPORTER_PROMETHEUS_PORT": str(point.address[1])}, ["another fleet's"])
        await point.stop()
    pages.close()
    with socket.socket() as stranger:
        stranger.bind(pages.addresses["b"])


def test_counters_of_vllm_have_its_names() -> None:
    page = to_prometheus(
        [
            MetricPoint("headrace.scheduler.preemptions", 4, "{preemption}", is_counter=True),
            MetricPoint("headrace.scheduler.running", 2, "{sequence}", (("executor", "e1"),)),
            MetricPoint("headrace.scheduler.blocks_used", 0.25, "1"),
            HistogramPoint("gen_ai.server.time_to_first_token", (0.5,), (1, 2), 3.5, "s"),
            MetricPoint("headrace.scheduler.prefill_tokens", 9, "{token}", is_counter=True),
        ]
    )
    assert [line for line in page.decode().splitlines() if not line.startswith("# HELP")] == [
        "# TYPE headrace:num_preemptions_total counter",
        "headrace:num_preemptions_total 4.0",
        "# TYPE headrace:num_requests_running gauge",
        'headrace:num_requests_running{executor="e1"} 2.0',
        "# TYPE headrace:kv_cache_usage_perc gauge",
        "headrace:kv_cache_usage_perc 0.25",
        "# TYPE headrace:time_to_first_token_seconds histogram",
        'headrace:time_to_first_token_seconds_bucket{le="0.5"} 1.0',
        'headrace:time_to_first_token_seconds_bucket{le="+Inf"} 3.0',
        "headrace:time_to_first_token_seconds_sum 3.5",
        "headrace:time_to_first_token_seconds_count 3.0",
        "# TYPE headrace_scheduler_prefill_tokens_total counter",
        "headrace_scheduler_prefill_tokens_total 9.0",
    ]


def test_the_process_shows_itself_under_the_usual_names() -> None:
    lines = to_prometheus(list(process_metrics())).decode().splitlines()
    values = dict(line.split() for line in lines if not line.startswith("#"))
    assert float(values["process_cpu_seconds_total"]) > 0
    assert float(values["process_resident_memory_bytes"]) > 10_000_000
    assert float(values["process_open_fds"]) >= 3
    assert float(values["process_start_time_seconds"]) > 1.6e9


@pytest.mark.parametrize(
    ("head", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n", b"200 OK", PAGE.encode()),
        (b"GET /metrics?name=x HTTP/1.0\r\n\r\n", b"200 OK", PAGE.encode()),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200 OK", b""),
        (b"GET / HTTP/1.1\r\n\r\n", b"404 Not Found", b"/metrics is here\n"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed", b"GET it\n"),
        (b"\x00\xff\r\n\r\n", b"405 Method Not Allowed", b"GET it\n"),
    ],
)
def test_scrape_answers_by_path_and_method(head: bytes, status: bytes, body: bytes) -> None:
    first, _, rest = answer(head, lambda: COUNTED).partition(b"\r\n")
    headers, _, found = rest.partition(b"\r\n\r\n")
    assert (first, found) == (b"HTTP/1.1 " + status, body)
    length = len(PAGE) if status == b"200 OK" else len(body)
    assert b"Content-Length: %d" % length in headers.split(b"\r\n")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


async def read(point: ScrapePoint, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*point.address)
    writer.write(request)
    answered = await reader.read()
    writer.close()
    return answered


async def test_a_page_on_a_socket_lives_from_start_to_stop(env: pytest.MonkeyPatch) -> None:
    assert await metrics.scrape_point(lambda: COUNTED) is None
    env.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    env.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    point = await metrics.scrape_point(lambda: COUNTED)
    assert point is not None
    assert (await read(point, b"GET /metrics HTTP/1.1\r\n\r\n")).endswith(PAGE.encode())
    assert await read(point, b"x" * 40_000) == b""  # no end of a head
    with pytest.raises(SetupError, match="metrics cannot listen on"):
        ScrapePoint(*point.address, lambda: COUNTED)
    silent = await asyncio.open_connection(*point.address)
    assert (await read(point, b"GET /metrics HTTP/1.1\r\n\r\n")).endswith(PAGE.encode())
    await point.stop()
    assert await silent[0].read() == b""
    silent[1].close()
    with pytest.raises(ConnectionRefusedError):
        await read(point, b"")


async def test_so_many_connections_and_no_more() -> None:
    point = ScrapePoint("127.0.0.1", 0, lambda: COUNTED)
    await point.start()
    held = [socket.create_connection(point.address) for _ in range(MAX_CONNECTIONS)]
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        reader, writer = await asyncio.open_connection(*point.address)
        try:
            await reader.readexactly(1)
        finally:
            writer.close()
    for connection in held:
        connection.close()
    await point.stop()
