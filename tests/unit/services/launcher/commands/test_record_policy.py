"""`headrace policy set`: each scheduler gets it by its name, and answers with the old and the new."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from support.actor_fleet import Fleet, watched_fleet

from loadtest.simulator.replay.rerun import rerun_file
from services.launcher.cli import main
from services.launcher.commands import record as command
from services.launcher.commands.record import set_policy
from services.launcher.commands.status import Facts
from services.launcher.console import silence
from services.launcher.session import Target
from services.scheduler.actor import SchedulerActor
from services.scheduler.reports import event_log
from services.scheduler.state import policies
from services.scheduler.state.requests import PolicySet
from services.scheduler.state.state import Limits
from shared.errors import Unavailable

FACTS = [{"id": "s1", "model": "m"}, {"id": "s2", "model": "m"}]
DEFAULT = str(policies.Policy())


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with watched_fleet() as made:
        yield made


async def test_policy_change_reaches_all_schedulers(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    actors = [SchedulerActor(Limits(), "m", str(tmp_path / "events.log")), SchedulerActor(Limits(), "m")]
    for actor, facts in zip(actors, FACTS, strict=True):
        await fleet.started(actor, facts["id"])
    assert await set_policy(fleet.outside, FACTS, "order=fcfs, routing=room") == 0
    after = str(policies.parse("order=fcfs,routing=room"))
    lines = [f"  before {DEFAULT}", f"  after  {after}"]
    out = ["scheduler s1, model m:", *lines, "scheduler s2, model m:", *lines]
    assert capsys.readouterr().out.splitlines() == out
    assert [actor.status()["policy"] for actor in actors] == [after, after]
    assert await set_policy(fleet.outside, FACTS, DEFAULT) == 0
    assert [actor.status()["policy"] for actor in actors] == [DEFAULT, DEFAULT]
    await actors[0].stop()
    with (tmp_path / "events.log").open("rb") as log:
        events = [r.event for r in event_log.read(log) if isinstance(r, event_log.LoggedEvent)]
    assert [event for event in events if isinstance(event, PolicySet)] == [
        PolicySet(after),
        PolicySet(DEFAULT),
    ]
    assert rerun_file(tmp_path / "events.log").difference is None


async def test_wrong_policy_name_changes_nothing_and_is_an_error_with_the_reason(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    actor = SchedulerActor(Limits(), "m")
    await fleet.started(actor, "s1")
    assert await set_policy(fleet.outside, FACTS[:1], "order=lifo") == 1
    assert await set_policy(fleet.outside, FACTS[:1], "tier=os:system") == 1
    assert await set_policy(fleet.outside, FACTS[:1], "\udcff\n=") == 1
    out = capsys.readouterr().out
    assert "scheduler s1, model m: unchanged: setting policy: order='lifo' is none of vtc, fcfs" in out
    assert "tier=os:system: a function of your own is loaded at the start only" in out
    assert actor.status()["policy"] == DEFAULT


async def test_a_scheduler_that_is_gone_is_named(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    await fleet.started(SchedulerActor(Limits(), "m"), "s1")
    assert await set_policy(fleet.outside, FACTS, "order=fcfs") == 1
    assert "scheduler s2, model m: no answer" in capsys.readouterr().out


async def test_fleet_without_such_a_scheduler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def services(target: Target, fleet: str) -> list[Facts]:
        return [{"kind": "executor", "model": "x"}, {"kind": "scheduler", "id": "s1", "model": "m"}]

    monkeypatch.setattr(command.session, "services_of", services)
    assert await command.policy(Target("", "m"), "f", None, "m") == 0
    with Path("/dev/full").open("w", buffering=1) as full, redirect_stdout(full):
        with pytest.raises(OSError, match="No space left"):
            await command.policy(Target("", "m"), "f", None, "m")
        silence(full)
    with pytest.raises(Unavailable, match="no scheduler of x answers"):
        await command.policy(Target("", "m"), "f", "order=fcfs", "x")


def test_command_takes_these_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "set"]) == 1
    assert "headrace policy set kind=name,..." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["policy", "get"])
