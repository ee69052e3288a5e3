"""A nats-py script that shares no code with the project, against real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.running_up import StartUp, Up, assert_idle

SCRIPT = Path(__file__).with_name("stranger.py")


def stranger(up: Up, *args: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), up.nats_url, *args],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_stranger_chats_streams_and_cancels(up: Up) -> None:
    answer = stranger(up, "chat")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    streamed = stranger(up, "stream")
    assert (streamed["types"][0], streamed["types"][-1]) == ("accepted", "done")
    assert streamed["usage"]["completion_tokens"] == 12
    cancelled = stranger(up, "cancel")
    assert (cancelled["last"], cancelled["code"]) == ("error", 499)
    assert_idle(up)


def test_200_streams_at_once_on_the_simulated_engine(up: Up) -> None:
    assert stranger(up, "many", "200") == {"streams": 200, "tokens": 200 * 24, "texts": 200}
    assert_idle(up)


def test_the_real_model_answers_a_stranger_and_32_at_once(start_up: StartUp) -> None:
    up = start_up("--backend", "torch", "--dtype", "f32", "--threads", "1")  # beside other tests
    assert stranger(up, "chat")["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert stranger(up, "stream")["text"] == "The capital of France is Paris."
    result = stranger(up, "many", "32")
    assert (result["streams"], result["tokens"]) == (32, 32 * 24)
    assert_idle(up)
