"""Services are asked for their status, metrics and heartbeats while they start, too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.actor_fleet import INTERVAL_US
from support.memory_bus import MemoryBroker, MemoryBus
from support.text_models import served
from support.virtual_loop import FakeClock

from services.detokenizer.actor import DetokenizerActor
from services.keeper.actor import KeeperActor
from services.tokenizer.actor import TokenizerActor
from shared.actor.runtime import Actor, Runtime
from shared.nats import subjects


class SlowBus(MemoryBus):
    """Each call takes some turns of the loop, as calls of a server may."""

    async def subscribe(self, *given: Any, **named: Any) -> Any:
        await asyncio.sleep(0.001)
        return await super().subscribe(*given, **named)

    async def another(self, *given: Any) -> MemoryBus:
        await asyncio.sleep(0.001)
        return await super().another(*given)


def an_actor(kind: str, folder: Path) -> Actor:
    if kind == "keeper":
        return KeeperActor()
    model = served(folder)
    return TokenizerActor(model) if kind == "tokenizer" else DetokenizerActor(model.vocabulary, "m", 1 << 23)


@pytest.mark.parametrize("kind", ["tokenizer", "detokenizer", "keeper"])
async def test_each_question_during_the_start_is_answered(kind: str, tmp_path: Path) -> None:
    broker, faults = MemoryBroker(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    runtime = Runtime(an_actor(kind, tmp_path), SlowBus(broker), "f", "a", "host", FakeClock(), INTERVAL_US)
    outside, answers = broker.connect(), list[str]()
    await outside.subscribe("answers.*", lambda answer: answers.append(answer.subject))
    start = asyncio.create_task(runtime.start())
    while not start.done():
        outside.publish(subjects.STATUS, b"", reply="answers.status")
        outside.publish(subjects.metrics("f"), b"", reply="answers.metrics")
        outside.publish(subjects.heartbeat_request("f"), b"")
        await asyncio.sleep(0.0005)
    await start
    await broker.settle()
    await runtime.finish(0.05)
    assert not faults
    assert {*answers} == {"answers.status", "answers.metrics"}
