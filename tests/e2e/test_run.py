"""`headrace run`: a fleet in the background that starts with the first prompt and ends when it is idle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.running_up import BY_DEFAULT_DURABLE, HEADRACE, Terminal, ignoring, wait_until_gone

MODEL = "smollm2-135m-instruct"


class Shell:
    """A user's environment, in which no fleet runs at first."""

    def __init__(self, home: Path) -> None:
        bare = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        self.env = {
            **bare, **BY_DEFAULT_DURABLE,
            "XDG_RUNTIME_DIR": str(home), "XDG_STATE_HOME": str(home), "TMPDIR": str(home),
            "HEADRACE_BACKEND": "sim", "HEADRACE_KEEP_ALIVE_S": "300",
        }  # fmt: skip
        self.home, self.pids = home, list[int]()

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*HEADRACE, *args], env=self.env | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, preexec_fn=ignoring(),
        )  # fmt: skip

    def run(self, *args: str, stdin: str = "", **env: str) -> tuple[int, str, str]:
        process = self.start(*args, **env)
        out, err = process.communicate(stdin, timeout=60)
        self.pids += [pid for pid, command in self.processes().items() if "--until-idle" in command]
        return process.returncode, out, err

    @property
    def fleet(self) -> int | None:
        """The process id in the note of the fleet."""
        note = self.home / "headrace" / "default.json"
        return int(json.loads(note.read_text())["pid"]) if note.exists() else None

    def processes(self) -> dict[int, str]:
        """The command lines of all processes of this environment."""
        mark, found = f"XDG_RUNTIME_DIR={self.home}\0".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text()
            except OSError:
                continue
        return found

    def pids_of(self, kind: str) -> list[int]:
        """The processes of the services of that kind."""
        return [pid for pid, line in self.processes().items() if f"serve\0{kind}\0" in line]

    def left(self) -> list[str]:
        """These, and what is in the folder for temporary files."""
        return [*self.processes().values(), *(path.name for path in self.home.glob("headrace-*"))]


def stopped(shell: Shell) -> None:
    """The fleet ends; where that takes a while, lines show for how long."""
    status, printed, waits = shell.run("stop")
    assert (status, printed) == (0, f"fleet default has ended, it served {MODEL}\n")
    assert all(line.startswith("fleet default drains: ") for line in waits.splitlines())


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    if shell.fleet is not None:
        shell.run("stop")
    wait_until_gone(shell.pids)
    assert shell.left() == []


def test_the_fleet_of_the_first_prompt_answers_the_next_ones(shell: Shell) -> None:
    code, text, errors = shell.run("run", MODEL, "Hi", "you", "--max-tokens", "5", "--seed", "7")
    assert (code, errors) == (0, "")
    assert text.strip()
    first = shell.fleet
    again = shell.run("run", MODEL, "--max-tokens", "5", "--seed", "7", stdin="Hi you\n")
    assert again == (0, text, "")
    assert shell.run("chat", "-q", "Hi you", "--max-tokens", "5", "--seed", "7") == (0, text, "")
    following = shell.start("logs", "tokenizer", "-f")
    assert following.stdout is not None
    assert following.stdout.readline()
    other = shell.run("run", "elsewhere/other", "Hi")
    assert other[:2] == (1, "")
    assert other[2].startswith(f"error (setup): fleet default serves {MODEL}, not elsewhere/other: end it")
    assert shell.fleet == first
    stopped(shell)
    assert shell.fleet is None
    assert (following.wait(60), following.communicate()[1]) == (0, "")
    assert shell.run("stop")[2].startswith("error (setup): no fleet default runs here")


def test_two_prompts_at_once_start_one_fleet(shell: Shell) -> None:
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(shell.run, "run", MODEL, "Hi", "--max-tokens", "3") for _ in range(3)]
        assert {run.result()[0] for run in runs} == {0}
    assert len(set(shell.pids)) == 1


def test_an_idle_fleet_ends_and_the_next_prompt_starts_another(shell: Shell) -> None:
    assert shell.run("run", MODEL, "Hi", "--max-tokens", "3", HEADRACE_KEEP_ALIVE_S="1")[0] == 0
    wait_until_gone(shell.pids)
    assert shell.left() == []
    assert shell.run("run", MODEL, "Hi", "--max-tokens", "3")[0] == 0
    assert len(set(shell.pids)) == 2


def test_failed_start_prints_the_reason_and_leaves_nothing(shell: Shell) -> None:
    code, text, errors = shell.run("run", MODEL, "Hi", HEADRACE_LOGITS_PROCESSORS="x=nowhere:Nothing")
    assert (code, text) == (1, "")
    assert "No module named 'nowhere'" in errors
    assert errors.splitlines()[-1].startswith("error (setup): the fleet did not start: ")
    assert shell.left() == []
    code, _, errors = shell.run("run", "no-model")
    assert code == 1
    assert errors.startswith("error (setup): 'no-model' is neither a known model")


def start_without_end(shell: Shell, *args: str) -> subprocess.Popen[str]:
    """A command that starts a fleet, which is not ready before a signal, however busy this machine is."""
    process = shell.start(*args, HEADRACE_DEVICE="cpu", HEADRACE_DRAIN_TIMEOUT_S="1")
    assert process.stdin is not None
    process.stdin.close()
    while not (executors := shell.pids_of("executor")):
        assert process.poll() is None
    for pid in executors:
        os.kill(pid, signal.SIGSTOP)
    return process


def test_a_start_that_is_interrupted_leaves_nothing(shell: Shell) -> None:
    process = start_without_end(shell, "run", MODEL, "Hi")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.wait(60) == 130, process.stderr.read()
    assert shell.left() == []


def test_a_fleet_that_starts_is_stopped(shell: Shell) -> None:
    process = start_without_end(shell, "up", "--http", "off")
    stopped(shell)
    assert process.wait(60) == 0
    assert shell.left() == []
    assert list((shell.home / "headrace").glob("default.*")) == []


def test_a_chat_keeps_its_fleet(shell: Shell) -> None:
    shell.env["HEADRACE_KEEP_ALIVE_S"] = "1"  # from the end of the chat on
    chat = Terminal(shell.env, "run", MODEL, "--max-tokens", "3")
    try:
        chat.read_until("> $")
        assert shell.fleet is not None
        shell.pids.append(shell.fleet)
        chat.type("Hi\n")
        chat.read_until("> $")
        chat.type("\x04")
        assert chat.process.wait(30) == 0
        wait_until_gone(shell.pids)
    finally:
        chat.close()
