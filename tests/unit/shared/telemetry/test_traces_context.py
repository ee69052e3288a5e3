"""Trace context by the examples of the W3C specification, and the two forms of a log line."""

from __future__ import annotations

import json
import logging
import re

import pytest

from shared import processes
from shared.telemetry import traces

EXAMPLE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"  # W3C Trace Context, section 3.2


def test_the_trace_id_is_the_second_field() -> None:
    assert traces.trace_id(EXAMPLE) == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert traces.trace_id("") == traces.trace_id("nonsense") == traces.from_headers({}) == ""


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (EXAMPLE, True),
        (EXAMPLE[:-2] + "00", True),
        ("cc" + EXAMPLE[2:] + "-what-the-future-will-be-like", True),  # higher versions may be longer
        (EXAMPLE + "-more", False),
        ("cc" + EXAMPLE[2:] + "-" + "x" * 200, True),
        ("ff" + EXAMPLE[2:], False),
        (EXAMPLE.upper(), False),
        ("00-" + "0" * 32 + EXAMPLE[35:], False),
        (EXAMPLE[:36] + "0" * 16 + "-01", False),
        (EXAMPLE[:-1], False),
        ("", False),
    ],
)
def test_accepted_trace_headers_are_these(text: str, valid: bool) -> None:
    assert traces.is_valid(text) is valid
    assert traces.from_headers({"traceparent": text}) == (text if valid else "")


def test_the_parts_of_a_traceparent() -> None:
    assert traces.span_id(EXAMPLE) == "00f067aa0ba902b7"
    assert traces.span_id("") == ""
    made = traces.make("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)
    assert made == EXAMPLE
    assert traces.make("a" * 32, "b" * 16, sampled=False)[-3:] == "-00"
    sampled = [EXAMPLE, EXAMPLE[:-1] + "3", EXAMPLE[:-1] + "0", "", "a-b-c-zz", EXAMPLE.upper()]
    assert [traces.is_sampled(trace) for trace in sampled] == [True, True, False, False, False, False]
    spans = ["00f067aa0ba902b7", "", "zz", "00f067aa0ba902b", "0" * 16]
    assert [traces.span_number(span) for span in spans] == [0xF067AA0BA902B7, 0, 0, 0, 0]


def test_a_header_too_long_to_carry_is_not_taken() -> None:
    assert traces.from_headers({"traceparent": "cc" + EXAMPLE[2:] + "-" + "x" * 300}) == ""


@pytest.fixture
def _logging_as_before() -> object:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)


@pytest.mark.usefixtures("_logging_as_before")
def test_log_lines_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    processes.setup("scheduler", level="warning")
    log = logging.getLogger("headrace.test")
    log.info("not shown")
    log.warning("%d blocks", 3)
    processes.setup("", level="info")
    log.info("ready")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} scheduler warning: 3 blocks", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}: ready", second)


@pytest.mark.usefixtures("_logging_as_before")
def test_log_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    processes.setup("executor", as_json=True)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("headrace.test").exception("it broke: ü")
    row = json.loads(capsys.readouterr().err)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row.pop("time"))
    assert row.pop("exception").endswith("ValueError: bad")
    assert row == {
        "level": "error",
        "component": "executor",
        "logger": "headrace.test",
        "message": "it broke: ü",
    }
