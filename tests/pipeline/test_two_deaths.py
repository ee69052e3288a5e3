"""A scheduler and a detokenizer that die or hang together cost no request where another of each is there."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import virtual_loop
from support.executor import paged_engine
from support.memory_bus import MemoryBus
from support.pipeline.bad_network import Hang
from support.pipeline.virtual_fleet import VirtualFleet
from support.text_models import served

from shared.client.client import Client
from shared.nats import subjects
from shared.nats.interface import Delivery

KINDS = ("kv_offload", "scheduler", "detokenizer", "detokenizer", "executor", "tokenizer")
REQUESTS = 16


async def ask(client: Client, number: int) -> str:
    """A plain request or a stream."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": f"Hello {number}",
        "max_tokens": 40,
        "ignore_eos": True,
    }
    body |= {"seed": number, "timeout_s": 60, "n": 1 + number % 3 // 2}
    if number % 2:
        return str([c["text"] for c in (await client.complete(body))["choices"]])
    texts, attempt = [""] * body["n"], 0
    async for frame in client.stream(body):
        if frame["attempt"] != attempt:
            texts, attempt = [""] * body["n"], frame["attempt"]
        for choice in frame.get("choices", ()) if frame["type"] == "delta" else ():
            texts[choice["index"]] += choice["text"]
    return str(texts)


async def answers(client: Client) -> list[str]:
    return await asyncio.gather(*(ask(client, number) for number in range(REQUESTS)))


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("fault", ["die", "hang"])
@pytest.mark.parametrize("order", [("detokenizer", "scheduler"), ("scheduler", "detokenizer"), ()])
def test_two_deaths_at_once_cost_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...], fault: str, second: bool
) -> None:
    """One a second before the other, or both at once; another scheduler is there, or comes later."""
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)

    async def live() -> None:
        fleet = VirtualFleet(model, 1)
        names = [await fleet.add(kind) for kind in KINDS]
        client = await Client.open(fleet.broker.connect())
        await asyncio.sleep(3)
        expected = await answers(client)
        await asyncio.sleep(1)
        copies = [fleet.runtimes[name].actor.status()["backups"] for name in names[2:4]]
        assert copies == [0, 0], "what is answered is kept by no tokenizer"
        if second:
            await fleet.add("scheduler")
            await asyncio.sleep(2)
        asking = asyncio.create_task(answers(client))
        await asyncio.sleep(0.02)
        detokenizers = {name: fleet.runtimes[name].actor.status() for name in names[2:4]}
        victim = max(detokenizers, key=lambda name: int(str(detokenizers[name]["requests"])))
        victims = {"scheduler": names[1], "detokenizer": victim}
        assert detokenizers[victim]["requests"] > 2
        hangs = []
        for kind in order or ("scheduler", "detokenizer"):
            if fault == "die":
                await fleet.kill(victims[kind])
            else:
                bus = fleet.runtimes[victims[kind]].bus
                assert isinstance(bus, MemoryBus)
                hangs.append(Hang(bus))
                hangs[-1].hang()
            if order:
                await asyncio.sleep(1)
        await asyncio.sleep(1)
        if not second and fault == "die":
            await fleet.add("scheduler")
        if fault == "hang":
            await asyncio.sleep(10)
            for hang in hangs:
                hang.wake()
        assert await asking == expected
        if second and fault == "hang":
            return  # a scheduler that comes back beside another one still believes that it has an executor
        await asyncio.sleep(8)
        (left,) = {n for n in names[2:4] if n in fleet.runtimes and n != victim}
        status = fleet.runtimes[left].actor.status()
        assert (status["requests"], status["backups"], status["failover"]) == (0, 0, 0)
        await fleet.stop()

    virtual_loop.run(live())


async def leave(fleet: VirtualFleet, name: str) -> None:
    """SIGTERM; the process ends, so that its timers do not run any more."""
    runtime = fleet.runtimes.pop(name)
    await runtime.finish(30)
    runtime.bus.publish = lambda *args, **more: None  # type: ignore[method-assign]  # as in VirtualFleet.kill


@pytest.mark.parametrize("fault", ["drain", "die", "hang"])
def test_answered_request_is_not_answered_again_when_both_have_gone_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A detokenizer leaves or dies with what it has not sent yet, or the one that keeps the copies hangs and
    does not receive it. Later the idle scheduler leaves, and in the end both have."""
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)

    async def live() -> None:
        fleet, ends = VirtualFleet(model, 1), Counter[str]()
        names = [await fleet.add(kind) for kind in KINDS]
        scheduler, keeper, other = names[1:4]
        bus = fleet.broker.connect()

        def count(delivery: Delivery) -> None:
            if "Headrace-End" in delivery.headers:
                ends[delivery.subject] += 1

        await bus.subscribe("_INBOX.reader.*", count)
        await asyncio.sleep(3)
        for number in range(2 * REQUESTS):
            body = {
                "prompt": "Hello",
                "max_tokens": 100,
                "ignore_eos": True,
                "seed": number,
                "timeout_s": 600,
            }
            data = json.dumps({**body, "request_id": f"r{number}", "stream": bool(number % 2)}).encode()
            bus.publish(subjects.generate("public", "tiny"), data, reply=f"_INBOX.reader.{number}")
        await asyncio.sleep(0.25)
        shard: Any = fleet.runtimes[other].actor
        while not (fault == "hang" or shard._core.backups.has_unsent):
            await asyncio.sleep(0.01)
        if fault == "drain":
            await leave(fleet, other)
        elif fault == "die":
            await fleet.kill(other)
        else:
            held = fleet.runtimes[keeper].bus
            assert isinstance(held, MemoryBus)
            hang = Hang(held)
            hang.hang()
            await asyncio.sleep(12)
            hang.wake()
        await asyncio.sleep(45 if fault == "die" else 10)
        answered = Counter(ends)  # the service that hung repeats what was sent meanwhile
        assert len(answered) == 2 * REQUESTS
        assert fleet.runtimes[keeper].actor.status()["backups"] == 0
        if fault == "hang":
            await leave(fleet, other)
        await fleet.add("scheduler")
        await leave(fleet, scheduler)
        await asyncio.sleep(8)
        assert ends == answered
        await fleet.stop()

    virtual_loop.run(live())
