"""A person's session: `up` in one shell; chat, request, status, doctor in a second one, without flags."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running_up import HEADRACE, Terminal, Up, assert_idle

MODEL = "smollm2-135m-instruct"


def status_of(up: Up) -> dict[str, dict[str, object]]:
    done = up.run("status", "--json")
    assert done.returncode == 0, done.stderr
    return {service["kind"]: service for service in json.loads(done.stdout)["services"]}


def test_up_prints_where_to_publish(up: Up) -> None:
    text = "\n".join(up.printed)
    assert re.search(r"NATS: +nats://127\.0\.0\.1:\d+\n", text)
    assert re.search(r"monitoring: +http://127\.0\.0\.1:\d+\n", text)
    assert f"headrace.v1.generate.public.{MODEL}" in text


def test_chat_answers_one_question(up: Up) -> None:
    done = up.run("chat", "-q", "Hi", "--max-tokens", "5", "--seed", "7")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    assert up.run("chat", "-q", "Hi", "--max-tokens", "5", "--seed", "7").stdout == done.stdout


def test_a_request_gets_one_json_answer(up: Up) -> None:
    done = up.run("request", stdin='{"prompt": "Hello", "max_tokens": 4, "seed": 1}')
    answer = json.loads(done.stdout)
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_streamed_request_prints_the_same_text_in_frames(up: Up) -> None:
    body = '{"prompt": "Hello", "max_tokens": 40, "seed": 1}'
    done = up.run("request", "--stream", body)
    frames = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f["type"] for f in frames] == ["accepted", *["delta"] * (len(frames) - 2), "done"]
    assert [f["frame"] for f in frames] == list(range(len(frames)))
    text = "".join(c["text"] for f in frames[1:-1] for c in f["choices"])
    assert text == json.loads(up.run("request", body).stdout)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"prompt": "x", "model": "absent"}', "error (model not found): "),
        ('{"prompt": "x", "temperature": 9}', "error (invalid request): "),
        ("{}", "error (invalid request): "),
    ],
)
def test_errors_go_to_stderr_with_their_kind(up: Up, body: str, reason: str) -> None:
    done = up.run("request", body)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(reason), done.stderr


def test_an_interrupted_request_is_cancelled(up: Up) -> None:
    asking = subprocess.Popen(
        [*HEADRACE, "request", "--stream", '{"prompt": "Hello", "max_tokens": 4000}'],
        env=up.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert asking.stdout is not None
    assert json.loads(asking.stdout.readline())["type"] == "accepted"
    asking.send_signal(signal.SIGINT)
    asking.communicate(timeout=120)
    assert asking.returncode == 130
    assert_idle(up)


@pytest.mark.parametrize("while_it", ["waits", "answers"])
def test_sigterm_ends_a_chat(up: Up, while_it: str) -> None:
    """Its input stays open."""
    chat = subprocess.Popen(
        [*HEADRACE, "chat", "--max-tokens", "4000" if while_it == "answers" else "4"],
        env=up.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("Hello\n")
    chat.stdin.flush()
    assert chat.stdout.read(1)
    if while_it == "waits":
        chat.stdout.readline()
    chat.send_signal(signal.SIGTERM)
    assert chat.wait(timeout=30) == 128 + signal.SIGTERM
    chat.communicate()
    assert_idle(up)


def test_status_names_every_service(up: Up) -> None:
    kinds = ["tokenizer", "scheduler", "executor", "kv_offload", "detokenizer"]
    for _ in range(10):  # a service of a busy machine may answer too late: status shows it
        head, *table = up.run("status").stdout.splitlines()
        services = status_of(up)
        if not any("Try again" in line for line in table) and set(services) >= set(kinds):
            break
    assert head == f"fleet default at {up.nats_url}, {MODEL}: no problems", table
    assert [line.split(".")[0] for line in table if " ready " in line] == kinds
    assert set(services) == set(kinds)
    assert {s["state"] for s in services.values()} == {"ready"}
    up.env["HEADRACE_LINKS"] = "Jaeger=http://j:1/?a=b,Wiki=https://w"
    assert up.run("status").stdout.splitlines()[-2:] == ["Jaeger: http://j:1/?a=b", "Wiki: https://w"]
    other = up.run("status", "--fleet", "other", "--nats-url", up.nats_url)
    assert other.stderr.startswith("error (unavailable): no service of fleet 'other' answers")


def test_status_of_one_service_has_every_fact(up: Up) -> None:
    asked = f"executor.{status_of(up)['executor']['id']}"
    facts = dict(line.split(maxsplit=1) for line in up.run("status", asked).stdout.splitlines()[1:])
    answer = json.loads(up.run("status", "exec", "--json").stdout)["services"][0]
    assert (facts["kind"], facts["model"]) == ("executor", MODEL)
    assert set(answer) - {"last_10_s"} <= set(facts)
    assert "last_10_s.steps" in facts
    unknown = up.run("status", "gpu")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr.startswith(
        "error (invalid request): there is no service 'gpu' in fleet default: choose"
    )


def test_the_last_seconds_have_the_tokens_of_a_request(up: Up) -> None:
    recent = 0
    for _ in range(10):  # a busy machine may take longer for the request and the status after it
        before = status_of(up)["scheduler"]["measured"]["tokens"]["generated"]
        assert up.run("request", '{"prompt": "Hello", "max_tokens": 200}').returncode == 0
        scheduler = status_of(up)["scheduler"]
        assert scheduler["measured"]["tokens"]["generated"] - before == 200
        if (recent := scheduler["last_10_s"]["generated"]) >= 200:
            break
    assert recent >= 200


def test_the_log_lines_of_a_service(up: Up) -> None:
    executor = status_of(up)["executor"]["id"]
    done = up.run("logs", "executor", "-n", "1000")
    assert (done.returncode, done.stderr) == (0, "")
    assert f": executor.{executor} is ready\n" in done.stdout
    assert done.stdout.splitlines()[-1:] == up.run("logs", "exec", "-n", "1").stdout.splitlines()
    heads = {line.partition(" ")[0] for line in up.run("logs").stdout.splitlines()}
    assert heads == {"tokenizer", "scheduler", "executor", "kv_offload", "detokenizer", "nats-server"}
    assert up.run("logs", "--fleet", "other").stderr.startswith("error (setup): no fleet of this name runs")


def test_top_is_the_same_table_again(up: Up) -> None:
    done = up.run("top", "--count", "2", "--interval", "0.6")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        re.findall(r"^(fleet default) .*: no problems$", done.stdout, re.MULTILINE) == ["fleet default"] * 2
    )
    assert len(re.findall(r"^scheduler\.\w+ +ready ", done.stdout, re.MULTILINE)) == 2


def test_doctor_is_content(up: Up) -> None:
    done = up.run("doctor")
    assert f"nats-server at {up.nats_url}, messages up to 8 MB" in done.stdout


@pytest.fixture
def chat(up: Up) -> Iterator[Terminal]:
    """An interactive chat."""
    terminal = Terminal(up.env, "chat", "--max-tokens", "4000")
    yield terminal
    terminal.close()


def test_a_conversation_with_a_stopped_answer(up: Up, chat: Terminal) -> None:
    chat.read_until("> ")
    chat.type("tell me everything\n")
    chat.read_until(r"everything\r\n[^\r\n]+ ")
    chat.type("\x03")
    chat.read_until(r"\[stopped\]\r\n> ")
    assert_idle(up)
    chat.type("unsent\x03")
    chat.read_until(r"/bye ends\]\r\n> ")
    chat.type("/set max_tokens 3\n")
    chat.read_until(r"max_tokens 3\r\n> ")
    chat.type("\x1b[A")  # up: the line before
    chat.read_until("/set max_tokens 3")
    chat.type("\n")
    chat.read_until(r"max_tokens 3\r\n> ")
    chat.type("\x04")
    assert chat.process.wait(30) == 0


def test_a_conversation_from_a_pipe_is_plain_text(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    lines = f"/system Be short\n/set max_tokens 4\nHi\n/nope\n\nAnd then?\n/save {file}\n/bye\nno more\n"
    done = up.run("chat", "--seed", "3", stdin=lines)
    assert (done.returncode, done.stderr) == (0, "")
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", *["user", "assistant"] * 2]
    first, second = (message["content"] for message in saved["messages"] if message["role"] == "assistant")
    assert done.stdout == (
        "system: Be short\nseed 3, max_tokens 4\n"
        f"{first}\nerror (invalid request): there is no command /nope: /help lists them\n{second}\n"
        f"5 messages in {file}\n"
    )
    assert up.run("request", "-f", str(file)).returncode == 0
    again = up.run("chat", stdin=f"/load {file}\n/reset\nHi\n").stdout
    assert again == f"5 messages from {file}\n[a new conversation]\n{first}\n"


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_top_on_a_terminal_ends_with_a_key_and_gives_the_screen_back(up: Up, key: str) -> None:
    terminal = Terminal(up.env, "top", "--interval", "0.6")
    try:
        terminal.read_until(r"\x1b\[\?1049h")  # the second screen
        for _ in range(2):
            terminal.read_until(r"(?s:every 0\.6 s.*?fleet default .*?: no problems)")
            terminal.read_until(r"detokenizer\.\w+  ready ")
        terminal.type(key)
        terminal.read_until(r"\x1b\[\?1049l")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
