"""`headrace trace` against real processes, and a running scheduler's log, recorded from its subject by one
command and recomputed by another; services without a collector import nothing of OpenTelemetry."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running_up import HEADRACE, Up, ignoring, running_up

LONG_PROMPT = list(range(300, 1000))  # 700 tokens: chunks of at most 256

CHECK = """
import sys
from shared.config import load
from shared.telemetry import export
from services.launcher.serve import KINDS, builder
for kind in KINDS:
    builder(kind)
assert export.tracer_from_env("tokenizer", "a") is None
assert not [m for m in sys.modules if m.startswith("opentelemetry")], "imported"
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(tmp_path_factory.mktemp("up"), HEADRACE_EVENT_LOG="nats") as up:
        yield up


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_tracing_imports_no_sdk_when_it_is_off(env: dict[str, str], up: Up) -> None:
    plain = {k: v for k, v in up.env.items() if not k.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env={**plain, **env}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_trace_command_draws_a_request(up: Up, tmp_path: Path) -> None:
    body = {"prompt": LONG_PROMPT, "max_tokens": 8, "ignore_eos": True, "request_id": "traced"}
    assert up.run("request", json.dumps(body)).returncode == 0
    shown = up.run("trace", "traced")
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert re.match(r"traced  text_completion smollm2-135m-instruct  tenant public  ended: length", lines[0])
    assert "prompt 700 tokens (0 cached), answer 8 tokens" in lines[2]
    stages = [re.sub(r" *[█▏].*", "", line).strip() for line in lines if re.search(r"[█▏]", line)]
    chunks = [name for name in stages if name.startswith("prefill chunk")]
    assert chunks == [f"prefill chunk {i}" for i in range(1, len(chunks) + 1)]
    assert [name for name in stages if name != "prefill wait"] == [
        "received", "tokenize", "transit", "queue", "prefill", *chunks, "decode", "first token", "detokenize",
        "send",
    ]  # fmt: skip
    assert [line for line in lines if "admit: ttft: executor." in line and "blocks free" in line]
    data = json.loads(up.run("trace", "traced", "--json").stdout)
    assert (data["state"], data["choices"][0]["tokens"]) == ("ended", 8)
    (steps,) = data["steps"].values()
    assert sum(steps["prefill_tokens"]) == 700
    file = tmp_path / "timeline.json"
    assert (
        f"{file} has the timeline with {len(steps['step'])} steps"
        in up.run("trace", "traced", "--perfetto", str(file)).stdout
    )
    events = json.loads(file.read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes >= {"in flight 0", "in flight 1", "waiting for a plan", "request", "stages"}
    forwards = [e for e in events if e["name"].startswith("forward ")]
    assert len(forwards) == len(steps["step"])


def test_trace_command_prints_each_error(up: Up, tmp_path: Path) -> None:
    unknown = up.run("trace", "never-asked")
    assert unknown.returncode == 1
    assert "error (request not found): no request 'never-asked' is running" in unknown.stderr
    alone = up.run("trace", "r", "--nats-url", "nats://127.0.0.1:9")
    assert alone.returncode == 1
    assert "no connection to the nats-server" in alone.stderr
    no_folder = up.run("trace", "never-asked", "--perfetto", str(tmp_path / "no" / "folder"))
    assert no_folder.returncode == 1


def test_a_recorded_log_replays(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    before = {"prompt": "before", "max_tokens": 4, "request_id": "before"}
    assert up.run("request", json.dumps(before)).returncode == 0
    with subprocess.Popen(
        [*HEADRACE, "record", str(path)],
        env=up.env,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=ignoring(signal.SIGINT),  # as scripts and some CI runners start it
    ) as record:
        assert record.stdout is not None
        assert record.stdout.readline().startswith("recording ")
        for i in range(3):
            body = {"prompt": "hello " * 40, "max_tokens": 20, "ignore_eos": True, "request_id": f"r{i}"}
            assert up.run("request", json.dumps(body)).returncode == 0
        record.send_signal(signal.SIGINT)
        assert f"headrace replay {path}" in record.stdout.read()
        assert record.wait(60) == 0
    replayed = up.run("replay", str(path), "--json")
    assert replayed.returncode == 0, replayed.stdout
    report = json.loads(replayed.stdout)
    assert report["difference"] is None
    assert report["snapshots"] == 2, "where it began and where it ended"
    assert report["first_event"] > 1, "what came before the recording is in its snapshot"
    compared = json.loads(up.run("replay", str(path), "--policy", "batching=static", "--json").stdout)
    assert (compared["requests"], compared["happened"]["served"], compared["changed"]["served"]) == (3, 3, 3)
    lanes = up.run("trace", "r1", "--overlap")
    assert lanes.returncode == 0, lanes.stderr
    assert [line.split()[0] for line in lanes.stdout.splitlines()[2:4]] == ["transport", "compute"]
