"""A running scheduler's log, recorded from its subject by one command and recomputed by another."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from support.running_up import HEADRACE, StartUp, ignoring


def test_a_recorded_log_replays(start_up: StartUp, tmp_path: Path) -> None:
    up = start_up(HEADRACE_EVENT_LOG="nats")
    path = tmp_path / "events.log"
    before = {"prompt": "before", "max_tokens": 4, "request_id": "before"}
    assert up.run("request", json.dumps(before)).returncode == 0
    with subprocess.Popen(
        [*HEADRACE, "record", str(path)],
        env=up.env,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=ignoring(signal.SIGINT),  # by whoever starts it: a script, some CI runners
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
