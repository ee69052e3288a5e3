"""The event log at its ends: a scheduler that has stopped, a folder for a file, a recording of nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.actor_fleet import watched_fleet

from services.launcher.commands import record as recording
from services.launcher.session import Target
from services.scheduler.actor import SchedulerActor
from services.scheduler.reports.event_log import FileSink
from services.scheduler.state.state import Limits
from shared.errors import SetupError, Unavailable
from shared.nats.interface import Bus
from shared.nats.memory import MemoryBroker


async def test_a_neighbour_that_speaks_after_the_end_is_no_fault(tmp_path: Path) -> None:
    """Services stop together: a scheduler that has closed its log still hears the others drain."""
    async with watched_fleet() as fleet:
        actor = SchedulerActor(Limits(), "m", str(tmp_path / "events.log"))
        await fleet.started(actor, "s")
        actor.on_restart("executor.e")
        await actor.stop()
        written = (tmp_path / "events.log").read_bytes()
        actor.on_restart("executor.e")
        actor.upkeep()
        assert (tmp_path / "events.log").read_bytes() == written


def test_a_folder_is_no_event_log(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="is a folder: name a file"):
        FileSink(tmp_path)


async def test_a_recording_that_never_began_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def connected(nats_url: str) -> AsyncIterator[Bus]:
        yield MemoryBroker().connect()

    monkeypatch.setattr(recording, "connected", connected)
    out = tmp_path / "events.log"
    with pytest.raises(Unavailable, match="--event-log nats"):
        await recording.record(Target("nats://none", "m"), out, "nobody", 0)
    assert not out.exists()
