"""A model sleeps and wakes in a fleet that serves: the operator asks over the bus, requests wake it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline.five_actors import Connect, Pipeline
from support.pipeline.tiered import Tiered
from support.small_llama import write_small_llama

from services.executor.cpu.engine import TorchBackend
from shared.nats import subjects

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True, "seed": 1}
MODEL = "smollm2-135m-instruct"
PROMPT = [*range(20, 60)]


async def ask(pipeline: Pipeline, text: str) -> dict[str, Any]:
    return await request(pipeline, subjects.sleep("scheduler-1"), text)


async def request(pipeline: Pipeline, subject: str, text: str = "") -> dict[str, Any]:
    reply = await pipeline.client.bus.request(subject, text.encode(), timeout_us=10_000_000)
    answer: dict[str, Any] = json.loads(reply.data)
    return answer


async def until_state(pipeline: Pipeline, wanted: str) -> None:
    """Until the scheduler and the list of models show it."""
    await pipeline.until(lambda: pipeline.status("scheduler")["states"] == {"executor-1": wanted})
    async with asyncio.timeout(60):
        while True:
            (entry,) = (await request(pipeline, subjects.MODELS))["data"]
            if entry["state"] == wanted:
                return
            await asyncio.sleep(0.01)


async def text_of(pipeline: Pipeline) -> str:
    answer = await pipeline.client.complete({**BODY, "model": MODEL}, timeout_s=60)
    return str(answer["choices"][0]["text"])


async def test_an_operator_puts_it_to_sleep_and_a_request_wakes_it(connect: Connect, fleet: str) -> None:
    pipeline = await Pipeline.start(connect, fleet)
    right = await text_of(pipeline)
    await until_state(pipeline, "loaded")
    assert "neither" in (await ask(pipeline, "nap"))["error"]["message"]
    assert (await ask(pipeline, "sleep"))["executors"] == {"executor-1": "falling asleep"}
    await until_state(pipeline, "asleep")
    assert await asyncio.gather(*(text_of(pipeline) for _ in range(4))) == [right] * 4
    await until_state(pipeline, "loaded")
    runs = asyncio.create_task(text_of(pipeline))
    await pipeline.until(lambda: pipeline.status("scheduler")["running"] > 0)
    await ask(pipeline, "sleep executor-1")
    assert await runs == right
    await until_state(pipeline, "asleep")
    await ask(pipeline, "wake")
    await until_state(pipeline, "loaded")
    assert await text_of(pipeline) == right
    await pipeline.assert_idle()
    await pipeline.stop()


async def test_a_scheduler_that_starts_again_finds_the_sleeper(connect: Connect, fleet: str) -> None:
    pipeline = await Pipeline.start(connect, fleet)
    right = await text_of(pipeline)
    await ask(pipeline, "sleep")
    await until_state(pipeline, "asleep")
    await pipeline.runtimes.pop("scheduler-1").finish(5)
    await pipeline.add("scheduler", "scheduler-1")
    await until_state(pipeline, "asleep")
    assert await text_of(pipeline) == right
    await pipeline.stop()


@pytest.mark.parametrize("kv", ["f32", "f32/fp8"])
async def test_weights_and_blocks_of_a_real_model_are_dropped_and_come_back(kv: str, tmp_path: Path) -> None:
    """The same ids and, bit for bit, the same logits: read again, computed again."""
    folder = write_small_llama(tmp_path / "m", hidden=64, layers=2)
    async with Tiered.up(folder, l1="off", dtype=kv) as pipeline:
        engine = pipeline.engine._engine
        assert isinstance(engine, TorchBackend)
        before = await pipeline.ask(PROMPT, 12)
        kept = engine._cache
        assert kept.tensor.view(torch.uint8).count_nonzero() > 0
        await ask(pipeline, "sleep")
        await until_state(pipeline, "asleep")
        assert not hasattr(engine, "_model")
        assert kept.tensor.view(torch.uint8).count_nonzero() == 0
        after = await pipeline.ask(PROMPT, 12)
        assert after.ids == before.ids
        assert after.cached_tokens == 0
        assert before.logits.keys() == after.logits.keys()
        for position, logits in before.logits.items():
            assert logits[0].equal(after.logits[position][0])
