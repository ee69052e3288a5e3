"""`headrace model sleep|wake`: each scheduler of the model is asked, and its executors are shown."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.actor_fleet import Fleet, watched_fleet

from services.launcher.cli import main
from services.launcher.commands import model
from services.launcher.commands.policy import ask
from services.scheduler.actor import SchedulerActor
from services.scheduler.state.state import Limits
from shared.nats import subjects


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with watched_fleet() as made:
        yield made


async def test_a_scheduler_answers_with_the_states(fleet: Fleet) -> None:
    await fleet.started(SchedulerActor(Limits(), "m"), "s1")
    assert await ask(fleet.outside, subjects.sleep("s1"), "sleep") == {"executors": {}}
    assert await ask(fleet.outside, subjects.sleep("gone"), "sleep") == {}
    assert await model._ask_hosts(fleet.outside, "m", "load") == []


@pytest.mark.parametrize("action", ["load", "unload", "sleep", "wake"])
def test_the_command_line(
    action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[object, ...]] = []

    async def record(target: object, fleet: str, what: str, model: str) -> int:
        seen.append((fleet, what, model))
        return 1

    monkeypatch.setattr(model, "sleep" if action in ("sleep", "wake") else "load", record)
    arguments = ["model", action, "big", "--fleet", "f", "--nats-url", "nats://127.0.0.1:1"]
    assert main(arguments) == 1
    assert seen == [("f", action, "big")]
