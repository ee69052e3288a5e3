"""`headrace model sleep|wake`: each scheduler of the model is asked, and its executors are shown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import nullcontext
from functools import partial
from unittest.mock import AsyncMock

import pytest
from support.actor_fleet import Fleet, watched_fleet

from services.launcher.cli import main
from services.launcher.commands import model
from services.launcher.session import Target, ask_scheduler
from services.scheduler.actor import SchedulerActor
from services.scheduler.state.state import Limits
from shared import bodies
from shared.nats import subjects


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with watched_fleet() as made:
        yield made


async def test_a_scheduler_answers_with_the_states(fleet: Fleet) -> None:
    await fleet.started(SchedulerActor(Limits(), "m"), "s1")
    ask = partial(ask_scheduler, fleet.outside, bodies.SleepStates)
    assert await ask(subjects.sleep("s1"), "sleep") == {"executors": {}}
    assert await ask(subjects.sleep("gone"), "sleep") is None
    assert await model._ask_hosts(fleet.outside, "m", "load") == []


async def test_action_of_each_host_is_printed_with_the_model_and_the_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [{"host": "vm", "state": state} for state in ("loaded", "changing", "unloaded")]
    monkeypatch.setattr(model, "connected", lambda url: nullcontext())
    monkeypatch.setattr(model, "_ask_hosts", AsyncMock(return_value=answers))
    for what in ("load", "unload"):
        assert await model.load(Target("nats://h:1", "m"), "f", what, "big") == 0
    assert capsys.readouterr().out.splitlines() == [
        "big on host vm: loaded",
        "big on host vm: is being loaded, `headrace model list` shows when it is",
        "big on host vm: is loaded with the first request for it, since others use its memory now",
        "big on host vm: requests that run end, then it is unloaded",
        "big on host vm: is being unloaded",
        "big on host vm: unloaded",
    ]


@pytest.mark.parametrize("action", ["load", "unload", "sleep", "wake"])
def test_command_line_names_the_model(
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
