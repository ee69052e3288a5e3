"""Which processes hang and which do not: processes that sleep, work, are stopped; and the check of a
container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from services.launcher import heartbeats
from services.launcher.heartbeats import (
    HeartbeatFile,
    HeartbeatNote,
    SilenceTimers,
    Watch,
    health,
    read,
    ticks_of,
)
from shared.errors import SetupError, Unavailable

SLEEPS = "import signal; print('up', flush=True); signal.pause()"
WORKS = "print('up', flush=True)\nwhile 1: pass"
BY_A_CHILD = (
    "import subprocess, sys, signal; child = subprocess.Popen([sys.executable, '-S', '-c', 'while 1: pass']);"
    "print('up', flush=True); signal.pause()"
)


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, once it has printed that it is up."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def stopped(pid: int) -> int:
    """Stop a process; once that shows, its ticks."""
    os.kill(pid, signal.SIGSTOP)
    while heartbeats._threads(pid)[0].strip("T"):
        time.sleep(0.01)
    ticks = ticks_of(pid)
    assert ticks is not None
    return ticks


def note_of(
    process: subprocess.Popen[str], path: Path, state: str = "ready", age_s: float = 60.0
) -> HeartbeatNote:
    """As if this process had noted its last beat so long ago."""
    born, _ = heartbeats._age_and_ticks(f"/proc/{process.pid}/stat")
    note = HeartbeatNote(process.pid, born, state, 1.0, round(time.monotonic() - age_s, 3))
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(" ".join(map(str, note)))
    return note


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_heartbeat_is_read_as_it_was_noted(tmp_path: Path) -> None:
    path = str(tmp_path / "a.beat")
    assert read(path) is None
    file = HeartbeatFile(path, 0.5)
    first = read(path)
    assert first is not None
    assert (first.pid, first.state, first.interval_s, first.is_late) == (os.getpid(), "starting", 0.5, False)
    file.note("ready", "executor.e", 5)
    second = read(path)
    assert second is not None
    assert (second.state, second.born, second.at_s >= first.at_s) == ("ready", first.born, True)
    assert (second.source, second.epoch) == ("executor.e", 5)
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_sleeping_process_uses_no_ticks_and_a_working_one_is_busy() -> None:
    with running(SLEEPS) as asleep:
        until(lambda: ticks_of(asleep.pid) is not None)
        assert len({ticks_of(asleep.pid) for _ in range(20)}) == 1
    with running(WORKS) as works:
        assert {ticks_of(works.pid) for _ in range(20)} == {None}  # it runs, or waits for a CPU
    with running(BY_A_CHILD) as compiles:
        assert {ticks_of(compiles.pid) for _ in range(20)} == {None}
        assert stopped(compiles.pid) == stopped(compiles.pid), (
            "children may wait in a loop for the stopped process"
        )
    assert ticks_of(compiles.pid) is None


def test_silence_is_the_time_without_a_sign() -> None:
    silences = SilenceTimers()
    signs = [(0, "a"), (4, "a"), (8, "a"), (9, None), (10, "a"), (14, "a"), (15, "b"), (19, "b")]
    assert [silences.seconds("x", sign, at) for at, sign in signs] == [0, 4, 8, 0, 0, 4, 0, 4]
    assert silences.seconds("y", "b", 19) == 0
    assert silences.seconds("x", "b", 19 + heartbeats.PARDON_S + 1) == 0, "the watch was stopped itself"


@pytest.mark.parametrize(
    ("state", "interval_s", "hangs_after_s"),
    [("ready", 1.0, 15.0), ("cut_off", 1.0, 15.0), ("starting", 1.0, 120.0), ("ready", 20.0, 60.0)],
)
def test_loading_or_rarely_beating_service_gets_longer(
    state: str, interval_s: float, hangs_after_s: float
) -> None:
    assert HeartbeatNote(1, 1, state, interval_s, 0.0).hangs_after_s == hangs_after_s


def test_watch_finds_services_that_neither_beat_nor_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, ticks = [1000.0], {1: 5, 2: 5}
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: now_s[0])
    watch = Watch(str(tmp_path), ticks_of=ticks.get)
    found: dict[str, list[float]] = {"hangs": [], "works": [], "beats": [], "loads": []}
    for name in ("hangs", "works"):
        Path(watch.path(name)).write_text(f"{1 if name == 'hangs' else 2} 7 ready 1 1000.0 executor.e 5")
    for second in range(40):
        now_s[0] = 1000.0 + second
        ticks[2] += second % 9 == 0
        Path(watch.path("beats")).write_text(f"1 7 ready 1 {now_s[0]} executor.e 5")
        for name, pid in (("hangs", 1), ("works", 2), ("beats", 1), ("loads", 1)):
            found[name].append(watch.silent_s(name, pid))
    assert [any(silent) for silent in found.values()] == [True, False, False, False]
    first = next(i for i, silent in enumerate(found["hangs"]) if silent)
    assert first == heartbeats.LATE_HEARTBEATS + heartbeats.LATE_S + 1 + heartbeats.HANGS_S
    for _ in range(140):
        now_s[0] += 1
        found["loads"].append(watch.silent_s("loads", 1))  # it has noted no beat at all
    assert any(found["loads"])


@pytest.mark.parametrize(
    ("noted", "pid", "unannounced"),
    [
        ("1 7 ready 1 1000.0 executor.e 5", 1, True),
        ("1 7 cut_off 1 1000.0 executor.e 5", 1, True),
        ("1 7 draining 1 1000.0 executor.e 5", 1, True),
        ("1 7 starting 1 1000.0 - 0", 1, False),
        ("1 7 stopped 1 1000.0 executor.e 5", 1, False),
        ("1 7 failed 1 1000.0 executor.e 5", 1, False),
        ("1 7 ready 1 1000.0 executor.e 5", 2, False),
    ],
)
def test_watch_finds_ended_processes_without_a_goodbye(
    tmp_path: Path, noted: str, pid: int, unannounced: bool
) -> None:
    watch = Watch(str(tmp_path))
    Path(watch.path("executor")).write_text(noted)
    note = watch.unannounced("executor", pid)
    assert (note is not None) == unannounced
    assert note is None or (note.source, note.epoch) == ("executor.e", 5)


# ---- the check of a container -------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return Path(heartbeats.runtime_path("tokenizer"))


def test_health_check_fails_when_no_service_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="no tokenizer runs here: set XDG_RUNTIME_DIR"):
        health("tokenizer")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(SetupError, match="no tokenizer runs here: set XDG_RUNTIME_DIR"):
        health("tokenizer")


def test_only_ready_is_healthy(path: Path) -> None:
    path.parent.mkdir()
    file = HeartbeatFile(str(path), 1.0)
    for state, why in (
        ("starting", "is starting"),
        ("draining", "is draining"),
        ("cut_off", "receives nothing from the nats-server"),
    ):
        file.note(state)
        with pytest.raises(Unavailable, match=f"the tokenizer here {why}"):
            health("tokenizer")
    file.note("ready")
    health("tokenizer")


def test_second_miss_kills_a_service_that_did_nothing_between(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "HANGS_S", 1.0)  # and so is the silence of a second beat
    with running(SLEEPS) as service:
        note_of(service, path)
        stopped(service.pid)
        with pytest.raises(Unavailable, match=r"has sent no heartbeat for 60 s$"):
            health("tokenizer")
        assert service.poll() is None
        missed = Path(f"{path}.missed")
        sign, since = missed.read_text().rsplit(" ", 1)
        with pytest.raises(Unavailable, match=r"has sent no heartbeat for 60 s$"):
            health("tokenizer")
        assert service.poll() is None, "too soon after the first"
        missed.write_text(f"{sign} {float(since) - 15}")
        with pytest.raises(Unavailable, match="and used no CPU: killed"):
            health("tokenizer")
        assert service.wait(30) == -signal.SIGKILL


def test_service_that_works_or_beats_between_is_not_killed(path: Path) -> None:
    with running(WORKS) as service:
        note_of(service, path)
        for _ in range(3):
            with pytest.raises(Unavailable, match="has sent no heartbeat"):
                health("tokenizer")
            missed = Path(f"{path}.missed")
            sign, since = missed.read_text().rsplit(" ", 1)
            missed.write_text(f"{sign} {float(since) - 60}")
        assert service.poll() is None
        note_of(service, path, age_s=0.0)
        health("tokenizer")
        assert not missed.exists()


def test_a_pid_that_is_anothers_by_now_is_let_be(path: Path) -> None:
    with running(SLEEPS) as other:
        note = note_of(other, path)
        stopped(other.pid)
        path.write_text(" ".join(map(str, note._replace(born=note.born - 1))))
        for _ in range(2):
            with pytest.raises(Unavailable, match="its process has ended"):
                health("tokenizer")
        assert other.poll() is None


def test_a_check_imports_next_to_nothing(tmp_path: Path) -> None:
    """It runs every few seconds in each container."""
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom services.launcher.cli import main\n"
        "main(['health', 'tokenizer'])\nprint(*{'asyncio', 'argparse', 'inspect', 'ssl', 'json'} &"
        " (set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys\nsys.path[:0] = {sys.path!r}\n{code}"],
        env={"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "\n"
    assert "no tokenizer runs here" in done.stderr
