"""Adapters under loss: the executor dies, or everything does, and the answers of an adapter go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.executor.peft_folders import write_adapter
from support.pipeline.five_actors import Connect, Pipeline
from support.pipeline.kept import Kept, ended, jetstream
from support.small_llama import write_small_llama

from services.detokenizer.durable import savepoints
from services.keeper import queues
from shared import bodies
from shared.nats import subjects
from shared.nats.interface import Delivery

LOST_S = 60
ASKED: dict[str, Any] = {
    "prompt": "The quick brown fox", "max_tokens": 900, "ignore_eos": True, "temperature": 0.9, "seed": 3,
}  # fmt: skip


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with jetstream() as opened:
        yield opened


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(queues._CONFIG, "ack_wait", 1_000_000_000)
    monkeypatch.setattr(savepoints, "GROWN", 16)
    model = write_small_llama(tmp_path / "tiny", hidden=64, layers=2)
    write_adapter(model, tmp_path / "adapter", rank=4)
    return {
        "backend": "torch", "dtype": "f32", "model": str(model), "model_name": "tiny", "kv_blocks": 300,
        "slots": 16, "max_context": 1_024, "lora_places": 2,
    }  # fmt: skip


async def add(fleet: Pipeline, path: Path) -> None:
    body = bodies.encode({"path": str(path)})
    reply = await fleet.client.bus.request(subjects.adapter("tiny:a"), body, timeout_us=60_000_000)
    assert bodies.decode(bodies.Change, reply.data).get("stored"), reply.data


async def test_answers_of_an_adapter_go_on_after_the_loss_of_everything(
    connect: Connect, fleet: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    first = await Kept.start(connect, fleet, **settings)
    assert isinstance(first, Kept)
    await add(first, tmp_path / "adapter")
    alone = await first.client.complete({**ASKED, "model": "tiny:a"})
    base = await first.client.complete({**ASKED, "model": "tiny"})
    assert alone["choices"] != base["choices"]
    stored = asyncio.Event()
    bus = await connect()

    def on_state(_: Delivery) -> None:
        stored.set()

    await bus.subscribe(subjects.STATE_ALL, on_state)
    await bus.flush()
    submitted = {**ASKED, "request_id": "long", "durable": "tokens"}
    await first.client.request(subjects.submit("public", "tiny:a"), submitted)
    await asyncio.wait_for(stored.wait(), LOST_S)
    await first.die()

    second = await Kept.start(connect, fleet, **settings)
    record = await ended(second.client, "long", LOST_S)
    assert record["status"] == "completed", record
    assert record["answer"]["choices"] == alone["choices"]
    assert (await second.client.complete({**ASKED, "model": "tiny:a"}))["choices"] == alone["choices"]
    await second.assert_idle()
    await second.stop()


async def test_tokens_stay_when_the_executor_of_an_adapter_dies(
    connect: Connect, fleet: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    running = await Kept.start(connect, fleet, **settings, speculate="3")
    assert isinstance(running, Kept)
    await add(running, tmp_path / "adapter")
    asked = [{**ASKED, "model": model, "seed": seed} for seed, model in enumerate(["tiny", "tiny:a"] * 3)]
    alone = [await running.client.complete(body) for body in asked]
    together = [asyncio.ensure_future(running.client.complete(body)) for body in asked]
    await running.until(lambda: running.status("executor")["open_slots"] == len(asked))
    await running.die("executor-1")
    await running.add("executor", "executor-2")
    found = await asyncio.wait_for(asyncio.gather(*together), LOST_S)
    assert [each["choices"] for each in found] == [each["choices"] for each in alone]
    running.runtimes["executor-1"] = running.runtimes.pop("executor-2")
    await running.assert_idle()
    await running.stop()
