"""The operator's commands for policies, against a fleet that serves over a real nats-server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.pipeline.five_actors import Connect, Pipeline

from loadtest.simulator.command import shadow
from services.launcher.commands.record import follow, policy
from services.launcher.nats_server import NatsServer
from services.launcher.session import Target
from services.scheduler.state import policies

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "seed": 1}
MODEL, REQUESTS = "smollm2-135m-instruct", 12
CHANGE, NAME = "order=fcfs,batching=prefill_first", "scheduler scheduler-1, model smollm2-135m-instruct"


async def answers(pipeline: Pipeline) -> set[str]:
    asked = (pipeline.client.complete({**BODY, "model": MODEL}, timeout_s=60) for _ in range(REQUESTS))
    return {str(answer["choices"][0]["text"]) for answer in await asyncio.gather(*asked)}


@pytest.mark.parametrize("connect", ["nats"], indirect=True)
async def test_a_policy_changes_under_load_beside_a_shadow(
    connect: Connect, fleet: str, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = await Pipeline.start(connect, fleet, event_log="nats")
    target, lines, seen = Target(nats_server.url, MODEL), shadow(CHANGE), asyncio.Event()
    loop = asyncio.get_running_loop()

    def report(log: bytes) -> list[str]:
        made = lines(log)
        if made[0].startswith("simulation of"):
            loop.call_soon_threadsafe(seen.set)
        return made

    right = await answers(pipeline)
    assert len(right) == 1
    following = asyncio.create_task(follow(await connect(), "scheduler-1", 0.2, report))
    asked = asyncio.create_task(answers(pipeline))
    await pipeline.until(lambda: pipeline.status("scheduler")["running"] > 0)
    capsys.readouterr()
    assert await policy(target, fleet, CHANGE, MODEL) == 0
    before, after = policies.Policy(), policies.parse(CHANGE)
    assert f"{NAME}:\n  before {before}\n  after  {after}\n" in capsys.readouterr().out
    assert await asked == right
    await asyncio.wait_for(seen.wait(), 60)
    assert await policy(target, fleet, None, "") == 0
    assert f"{NAME}: {after}" in capsys.readouterr().out
    following.cancel()
    await following
    assert "simulated, other policy" in capsys.readouterr().out
    await pipeline.assert_idle()
    await pipeline.stop()
