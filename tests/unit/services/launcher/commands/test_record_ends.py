"""The event log at its ends: a scheduler that has stopped, a folder for a file, a recording of nothing."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from support.actor_fleet import watched_fleet
from support.memory_bus import MemoryBroker
from support.scheduler.world import World

from loadtest.simulator.replay.rerun import rerun_file
from services.launcher.commands import record as recording
from services.launcher.session import Target
from services.scheduler.actor import SchedulerActor
from services.scheduler.reports import event_log
from services.scheduler.reports.event_log import FileSink, Recorder
from services.scheduler.state.state import Limits
from shared.errors import SetupError, Unavailable
from shared.nats.interface import Bus


async def test_message_of_a_neighbour_after_the_end_is_no_fault(tmp_path: Path) -> None:
    """Services stop together: a scheduler that has closed its log still receives the others' drain."""
    async with watched_fleet() as fleet:
        actor = SchedulerActor(Limits(), "m", str(tmp_path / "events.log"))
        await fleet.started(actor, "s")
        actor.on_restart("executor.e")
        await actor.stop()
        written = (tmp_path / "events.log").read_bytes()
        actor.on_restart("executor.e")
        actor.upkeep()
        assert (tmp_path / "events.log").read_bytes() == written


def test_a_log_goes_on_in_the_next_file_and_the_oldest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each can be replayed alone; one of another run, and its number, stay untouched."""
    for name, value in (("STRETCH_BYTES", 5_000), ("FILE_BYTES", 20_000), ("KEPT_FILES", 3)):
        monkeypatch.setattr(event_log, name, value)
    (tmp_path / "e-3.log").write_bytes(b"of another run")
    sink = FileSink(tmp_path / "e.log")
    world = World()
    recorder = Recorder(world.scheduler, sink, {"scheduler": "s"})
    world.scheduler = recorder  # type: ignore[assignment]  # it stands in the place of the core
    world.add_engine()
    for i in range(200):
        world.ask(f"r{i}", [5, 6, 7], 5)
        world.run()
    sink.close()
    files = sorted(tmp_path.glob("e*.log"), key=lambda path: path.stat().st_mtime_ns)
    assert (tmp_path / "e-3.log").read_bytes() == b"of another run"
    logs = [path for path in files if path.name != "e-3.log"]
    assert len(logs) == 3
    assert sink.path in logs
    assert tmp_path / "e.log" not in logs
    assert {stat.S_IMODE(path.stat().st_mode) for path in logs} == {0o600}
    most = 20_000 + 2 * 5_000 + len(event_log.snapshot(world.scheduler.state)) * 1.1
    for path in logs:
        assert path.stat().st_size < most
        report = rerun_file(path)
        assert report.events > 10
        assert report.difference is None


def test_a_full_disk_ends_a_log_and_not_its_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log, "STRETCH_BYTES", 20_000)
    sink, world, numbers = FileSink(tmp_path / "e.log"), World(), count()
    recorder = Recorder(world.scheduler, sink, {"scheduler": "s"})
    world.scheduler = recorder  # type: ignore[assignment]  # it stands in the place of the core
    world.add_engine()

    def run() -> None:
        world.ask(f"r{next(numbers)}", [5, 6, 7], 5)
        world.run()

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))  # of a file; writing more is an OSError
    try:
        while not sink._lost:
            run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.text.count("e.log lacks its end: [Errno 27]") == 1
    while sink._lost:
        run()
    for _ in range(5):
        run()
    sink.close()
    assert sink.path == tmp_path / "e-2.log"
    for path in (tmp_path / "e.log", sink.path):
        report = rerun_file(path)
        assert report.events > 10
        assert report.difference is None


def test_record_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    """It holds every prompt."""
    before = os.umask(0)
    try:
        with recording._create(tmp_path / "r.log") as file:
            file.write(b"x")
        FileSink(tmp_path / "e.log").close()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_folder_is_no_event_log(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="is a folder: name a file"):
        FileSink(tmp_path)


async def test_a_recording_that_never_began_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def connected(nats_url: str) -> AsyncIterator[Bus]:
        yield MemoryBroker().connect()

    monkeypatch.setattr(recording.session, "connected", connected)
    out = tmp_path / "events.log"
    with pytest.raises(Unavailable, match="--event-log nats"):
        await recording.record(Target("nats://none", "m"), out, "absent", 0)
    assert not out.exists()
