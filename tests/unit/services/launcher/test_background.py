"""When a fleet in the background ends: not while it is used, and not before its time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support import virtual_loop
from support.memory_bus import MemoryBroker

from services.launcher import background, session
from services.launcher.background import fleet_of, retire, until_idle
from services.launcher.session import RunState, path_for
from shared import codec
from shared.codec import Envelope
from shared.config import Loaded, load
from shared.errors import SetupError
from shared.messages import Heartbeat
from shared.nats import subjects

NOTE = RunState(pid=os.getpid(), fleet="default", nats_url="nats://h:1", monitoring_url="", models=["m"])


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return load()


def never() -> None:
    raise AssertionError("nothing is to be started")


def test_a_fleet_does_not_retire_while_it_is_used(loaded: Loaded) -> None:
    path = path_for(loaded.settings)
    NOTE.write(path)
    with fleet_of(loaded, never, print) as one, fleet_of(loaded, never, print) as other:
        assert one == other == NOTE
        assert not retire(path)
        assert session.read(path) == NOTE
    assert retire(path)
    assert not path.exists()
    assert retire(path)  # without a note no command finds this fleet


def test_the_note_of_another_fleet_is_left_alone(loaded: Loaded) -> None:
    path = path_for(loaded.settings)
    NOTE.write(path)
    path.write_text(path.read_text().replace(str(os.getpid()), str(os.getppid())))
    assert retire(path)
    assert path.exists()


def test_a_fleet_that_retires_is_not_found(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of its note and the lock the fleet removes it; then a new one is started."""
    path, started = path_for(loaded.settings), []
    NOTE.write(path)
    flock = background.fcntl.flock

    def retires_first(lock: int, operation: int) -> None:
        path.unlink(missing_ok=True)
        monkeypatch.undo()
        flock(lock, operation)

    monkeypatch.setattr(background.fcntl, "flock", retires_first)
    with pytest.raises(SetupError, match="stop here"), fleet_of(loaded, lambda: fail(started), print):
        pass
    assert started == ["prepared"]


def test_stop_ends_every_fleet_of_its_name(loaded: Loaded) -> None:
    path, notes = path_for(loaded.settings), []
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    for child, fleet in zip(children, ("default", "default", "default-2"), strict=True):
        notes.append(replace(NOTE, pid=child.pid, fleet=fleet, ready=child is children[1]))
        notes[-1].write(path.with_name(f"{fleet}.{child.pid}.up"))
    assert sorted(note.pid for note in background.stop(path, print)) == sorted(note.pid for note in notes[:2])
    assert [child.wait() for child in children[:2]] == [-signal.SIGTERM] * 2
    assert children[2].poll() is None
    children[2].kill()
    children[2].wait()
    with pytest.raises(SetupError, match="no fleet default runs here"):
        background.stop(path, print)


def test_stop_prints_what_it_waits_for(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "NOTICE_S", 0.01)
    path, lines = path_for(loaded.settings), list[str]()
    child = subprocess.Popen(
        ["sleep", "600"], preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    )
    replace(NOTE, pid=child.pid).write(path.with_name(f"default.{child.pid}.up"))

    def report(text: str) -> None:
        lines.append(text)
        if len(lines) == 3:
            child.kill()

    (note,) = background.stop(path, report)
    assert (note.pid, child.wait()) == (child.pid, -signal.SIGKILL)
    assert (
        lines[:3]
        == ["fleet default drains: requests that run have the time of drain_timeout_s; 0 s so far"] * 3
    )


def fail(started: list[str]) -> None:
    started.append("prepared")
    raise SetupError("stop here")


def test_background_fleet_ends_a_time_after_the_last_request_if_permitted() -> None:
    async def live() -> list[float]:
        broker, loop, asked = MemoryBroker(), asyncio.get_running_loop(), list[float]()

        def may_end() -> bool:
            asked.append(loop.time())
            return len(asked) == 2

        fleet = broker.connect()
        ending = asyncio.ensure_future(until_idle(broker.connect(), "f", 10, may_end))

        def beat(kind: str, **load: int) -> None:
            message = Heartbeat(kind=kind, actor="a", host_id="h", state="ready", load=tuple(load.items()))
            fleet.publish(
                subjects.heartbeat("f", kind, "a"), codec.encode(Envelope(f"{kind}.a", 1, 0, message))
            )

        for second in range(12):  # at 1 ... 12 s
            await asyncio.sleep(1)
            beat("scheduler", requests=int(second < 5))  # a long request, until 5 s
            beat("detokenizer", frames=7 if second > 7 else 3)  # a short one before 9 s
            beat("gateway", active=second)  # its health checks are no requests
        fleet.publish(subjects.heartbeat("f", "scheduler", "a"), b"of another version")
        await ending
        return asked

    assert virtual_loop.run(live()) == [19, 29]
