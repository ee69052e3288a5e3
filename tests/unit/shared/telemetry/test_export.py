"""OTEL_* variables, the sampler, and spans as the SDK gets them; no collector needed."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator

import pytest
from support.otlp_receiver import Receiver

from shared.telemetry import otel_sdk, traces
from shared.telemetry.counters import MetricPoint
from shared.telemetry.export import Tracer, tracer_from_env
from shared.telemetry.otel import is_on
from shared.telemetry.traces import SpanData, SpanEvent

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def otel_env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


def started(env: pytest.MonkeyPatch, receiver: Receiver, **more: str) -> Tracer:
    for name, value in {ENDPOINT: receiver.url, **more}.items():
        env.setenv(name, value)
    tracer = tracer_from_env("detokenizer", "d1")
    assert tracer is not None
    return tracer


@pytest.mark.parametrize(
    ("env", "on"),
    [
        ({}, False),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": " TRUE"}, False),
        ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": "false"}, True),
        ({ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_SERVICE_NAME": "x"}, False),
    ],
)
def test_export_is_turned_on_by_these_variables(env: dict[str, str], on: bool) -> None:
    assert is_on(env) is on


def test_a_request_without_a_trace_gets_one(otel_env: pytest.MonkeyPatch, receiver: Receiver) -> None:
    tracer = started(otel_env, receiver)
    first, second = tracer.begin(""), tracer.begin("")
    assert traces.is_valid(first[0])
    assert (traces.is_sampled(first[0]), first[1]) == (True, "0" * 16)
    assert traces.trace_id(first[0]) != traces.trace_id(second[0])
    tracer.stop(2)


@pytest.mark.parametrize(
    ("sampler", "flags", "sampled"),
    [
        ("", "01", True),
        ("", "00", False),  # parentbased_always_on: the client rules
        ("always_on", "00", True),
        ("always_off", "01", False),
        ("parentbased_always_off", "01", True),
    ],
)
def test_a_clients_trace_goes_on_under_the_sampler(
    otel_env: pytest.MonkeyPatch, receiver: Receiver, sampler: str, flags: str, sampled: bool
) -> None:
    tracer = started(otel_env, receiver, **({"OTEL_TRACES_SAMPLER": sampler} if sampler else {}))
    trace, parent = tracer.begin(CLIENT[:-2] + flags)
    assert traces.trace_id(trace) == traces.trace_id(CLIENT)
    assert (parent, traces.is_sampled(trace)) == ("00f067aa0ba902b7", sampled)
    assert traces.span_id(trace) != parent
    tracer.stop(2)


def test_a_tree_arrives_as_it_was_built(otel_env: pytest.MonkeyPatch, receiver: Receiver) -> None:
    resource = "deployment.environment=test,service.instance.id=i7"
    tracer = started(otel_env, receiver, OTEL_RESOURCE_ATTRIBUTES=resource)
    trace, parent = tracer.begin(CLIENT)
    root = SpanData("chat m", 10, 40, None, {"a": "x", "n": 3, "l": ["p", "q"]}, kind="server")
    root.events.append(SpanEvent("admit", 12, {"why": "room"}))
    child = SpanData("prefill", 12, 30, 0, links=(CLIENT,))
    leaf = SpanData("prefill chunk 1", 13, 20, 1, error="broken")
    tracer.export(trace, parent, [root, child, leaf])
    tracer.stop(5)
    by_name = {span.name: span for span in receiver.spans}
    assert len(receiver.spans) == 3
    top, middle, last = by_name["chat m"], by_name["prefill"], by_name["prefill chunk 1"]
    assert {s.trace_id for s in receiver.spans} == {traces.trace_id(CLIENT)}
    assert (top.span_id, top.parent_id) == (traces.span_id(trace), "00f067aa0ba902b7")
    assert (middle.parent_id, last.parent_id) == (top.span_id, middle.span_id)
    assert (top.start_ns, top.end_ns) == (10_000, 40_000)
    assert (top.attributes, top.events) == (
        {"a": "x", "n": 3, "l": ["p", "q"]},
        (("admit", 12_000, {"why": "room"}),),
    )
    assert middle.links == ((traces.trace_id(CLIENT), traces.span_id(CLIENT)),)
    assert [s.error for s in (top, middle, last)] == ["", "", "broken"]
    names = ("service.name", "service.instance.id", "deployment.environment")
    assert [top.resource[name] for name in names] == ["headrace-detokenizer", "i7", "test"]


def test_each_span_is_of_the_service_that_spends_the_time(
    otel_env: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    tracer = started(otel_env, receiver)
    trace, parent = tracer.begin("")
    of = ("", "executor.host.1", "scheduler", "detokenizer")
    spans = [SpanData(f"of {name}", 10, 40, 0 if name else None, {traces.COMPONENT: name}) for name in of]
    tracer.export(trace, parent, spans)
    tracer.stop(5)
    names = ("service.name", "service.instance.id")
    own = ("headrace-detokenizer", "detokenizer.d1")
    assert {s.name: tuple(s.resource.get(name) for name in names) for s in receiver.spans} == {
        "of ": own,
        "of executor.host.1": ("headrace-executor", "executor.host.1"),
        "of scheduler": ("headrace-scheduler", None),
        "of detokenizer": own,
    }


def test_self_test_prints_where_the_span_arrived(
    otel_env: pytest.MonkeyPatch, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = started(otel_env, receiver)
    with caplog.at_level(logging.INFO, "headrace.tracing"):
        tracer.test()
        _join("trace-test")
    assert [r.getMessage() for r in caplog.records] == [
        f"traces: a test span arrived at {receiver.url}/v1/traces"
    ]
    assert [s.name for s in receiver.spans] == ["headrace start"]
    tracer.stop(2)


def test_absent_collector_is_reported_once(
    otel_env: pytest.MonkeyPatch, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.stop()
    fast = {"OTEL_BSP_SCHEDULE_DELAY": "1", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}
    tracer = started(otel_env, receiver, **fast)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            tracer.export(tracer.begin("")[0], "", [SpanData("s", 1, 2, None)])
        tracer.stop(5)
        _join("trace-flush")
    (line,) = [r.getMessage() for r in caplog.records]
    assert f"spans did not arrive at {receiver.url}/v1/traces (Connection refused)" in line


def test_a_stop_ends_at_the_first_try_that_a_collector_refuses(
    otel_env: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    """The services of a fleet stop one after the other, and the SDK tries again for ten seconds."""
    receiver.stop()
    tracer = started(otel_env, receiver)
    metrics = otel_sdk.OtelMeterSink("scheduler", "s", "http/protobuf")
    metrics.put((MetricPoint("a", 1, "1"),))
    tracer.export(tracer.begin("")[0], "", [SpanData("s", 1, 2, None)])
    for stop, flush in ((metrics.stop, "metrics-flush"), (tracer.stop, "trace-flush")):
        stop(60)
        assert flush in [thread.name for thread in threading.enumerate()], "it still tries"


def test_the_first_metrics_are_sent_at_once(otel_env: pytest.MonkeyPatch, receiver: Receiver) -> None:
    """And not after the minute of the SDK's interval, which is the first that reports a collector."""
    otel_env.setenv(ENDPOINT, receiver.url)
    metrics = otel_sdk.OtelMeterSink("scheduler", "s", "http/protobuf")
    metrics.put((MetricPoint("a", 1, "1"),))
    _join("metrics-first")
    assert metrics._exporter.arrived is True
    metrics.stop(5)


def test_missing_grpc_package_is_an_error_with_the_mend(
    otel_env: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    otel_env.setenv(ENDPOINT, "http://127.0.0.1:4317")
    otel_env.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    otel_env.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    assert tracer_from_env("scheduler", "s") is None
    (line,) = [r.getMessage() for r in caplog.records]
    assert "pip install opentelemetry-exporter-otlp-proto-grpc" in line
    assert "\n" not in line


def test_another_protocol_is_refused(otel_env: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    otel_env.setenv(ENDPOINT, "http://127.0.0.1:4318")
    otel_env.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    assert tracer_from_env("scheduler", "s") is None
    assert "use http/protobuf or grpc" in caplog.text


def test_bad_sampler_is_reported_and_does_not_stop_the_service(
    otel_env: pytest.MonkeyPatch, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = started(otel_env, receiver, OTEL_TRACES_SAMPLER="sometimes")
    assert "sometimes" in caplog.text
    tracer.stop(2)


def _join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(30)


def test_an_exporter_without_time_left_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`requests` refuses a time limit that has passed, and the exporter computes one before its last try."""

    class OutOfTime:
        def export(self, spans: object) -> object:
            raise ValueError("Attempted to set connect timeout to -0.0002")

        def shutdown(self) -> None:
            pass

    tracer = otel_sdk.OtelTracer("scheduler", "s", "http/protobuf")
    monkeypatch.setattr(otel_sdk, "_exporter", lambda *_: OutOfTime())
    tracer._test()
    tracer.stop(0)
    assert "a test span did not arrive" in caplog.text
