"""`headrace batch run`, killed and continued: one answer to each line, the same as in one undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.running_up import HEADRACE, Up, running_up

LINES = 400


def request(number: int) -> dict[str, Any]:
    body = {"prompt": f"request {number}", "max_tokens": 20, "seed": number, "ignore_eos": True}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def answers(out: Path) -> dict[str, dict[str, Any]]:
    """The lines by their id, which no two have."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    by_id = {line["custom_id"]: line["response"] for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def texts(out: Path) -> dict[str, str]:
    return {name: response["body"]["choices"][0]["text"] for name, response in answers(out).items()}


def run(up: Up, *args: str) -> subprocess.CompletedProcess[str]:
    command = [*HEADRACE, "batch", "run", *args]
    return subprocess.run(command, env=up.env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.timeout(240)
def test_a_batch_that_is_killed_goes_on(tmp_path: Path) -> None:
    given, out, whole = (str(tmp_path / name) for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    Path(given).write_text("".join(json.dumps(request(i)) + "\n" for i in range(LINES)))
    with running_up(tmp_path) as up:
        done = run(up, given, whole)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert done.stderr.startswith(f"{LINES} of {LINES} requests, ")
        wanted = texts(Path(whole))
        assert len(wanted) == LINES

        command = [*HEADRACE, "batch", "run", given, out, "--window", "4"]
        with subprocess.Popen(command, env=up.env, stderr=subprocess.DEVNULL) as killed:
            while not Path(out).exists() or Path(out).read_bytes().count(b"\n") < LINES / 4:
                time.sleep(0.01)
            killed.kill()
        kept = len(answers(Path(out)))
        assert LINES / 4 <= kept < LINES
        with Path(out).open("a") as torn:
            torn.write('{"custom_id": "r1", "resp')
        assert "exists: continue it with --resume" in run(up, given, out).stderr
        done = run(up, given, out, "--resume")
        assert done.returncode == 0, done.stderr
        assert texts(Path(out)) == wanted
        assert sorted(path.name for path in tmp_path.glob("*.jsonl*")) == [
            "in.jsonl",
            "out.jsonl",
            "whole.jsonl",
        ]


@pytest.mark.timeout(120)
def test_refused_requests_are_told_and_sent_again(tmp_path: Path) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad, good = request(1), request(2)
    bad["body"]["temperature"] = 9
    given.write_text(json.dumps(bad) + "\n" + json.dumps(good) + "\n")
    with running_up(tmp_path) as up:
        for more in ([], ["--resume"]):
            done = run(up, str(given), str(out), *more)
            assert done.returncode == 1
            assert "2 of 2 requests, 1 refused" in done.stderr
            found = answers(out)
            assert found["r1"]["status_code"] == 400
            assert found["r1"]["body"]["error"]["param"] == "temperature"
            assert found["r2"]["body"]["usage"]["completion_tokens"] == 20
        given.write_text(json.dumps(good) + "\n")
        assert "has answers to another input" in run(up, str(given), str(out), "--resume").stderr

        slow = request(3)
        slow["body"]["max_tokens"] = 8000
        given.write_text(json.dumps(slow) + "\n")
        command = [*HEADRACE, "batch", "run", str(given), str(tmp_path / "second.jsonl")]
        with subprocess.Popen(command, env=up.env, stderr=subprocess.PIPE, text=True) as process:
            while not (tmp_path / "second.jsonl").exists():
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=120)
        assert process.returncode == 130
        assert said.endswith("0 of 1 requests, 0 tokens/s; --resume continues\n")
