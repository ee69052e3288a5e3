"""SmolLM2-135M in f32 through all five services: the reference ids of transformers, whatever the
window, the chunk budget and the company. Ids are read off the wire, not guessed from text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pipeline import Connect, Pipeline
from token_tap import Tap

from shared.memory_bus import MemoryBroker
from shared.nats_bus import NatsBus

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
MODEL = "smollm2-135m-instruct"


async def start(connect: Connect, fleet: str, **settings: Any) -> tuple[Pipeline, Tap]:
    pipeline = await Pipeline.start(connect, fleet, backend="torch", dtype="f32", **settings)
    tap = Tap()
    await (await connect()).subscribe(f"hr.{fleet}.detokenizer.*.in.*", tap.take)
    return pipeline, tap


async def greedy(pipeline: Pipeline, case: dict[str, Any], request: str) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": case["prompt"]}],
        "temperature": 0,
        "max_tokens": 64,
        "request_id": request,
    }
    await pipeline.client.complete(body)


async def assert_reference(pipeline: Pipeline, tap: Tap, round_name: str, together: bool) -> None:
    requests = [f"{round_name}-{i}" for i in range(len(CASES))]
    work = [greedy(pipeline, case, request) for case, request in zip(CASES, requests, strict=True)]
    if together:
        await asyncio.gather(*work)
    else:
        for one in work:
            await one
    for case, request in zip(CASES, requests, strict=True):
        assert tap.ids[request, 0] == case["output_ids"], case["prompt"]


@pytest.mark.parametrize(("window", "step_tokens"), [(1, 512), (2, 16), (4, 512)])
async def test_greedy_ids_equal_the_reference(window: int, step_tokens: int) -> None:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    pipeline, tap = await start(connect, "real", window=window, step_tokens=step_tokens)
    await assert_reference(pipeline, tap, "together", together=True)
    await assert_reference(pipeline, tap, "again", together=True)
    await pipeline.assert_idle()
    await pipeline.stop()


@pytest.fixture
async def over_nats(nats_server: Any, fleet: str) -> AsyncIterator[tuple[Pipeline, Tap]]:
    buses = []

    async def connect() -> NatsBus:
        buses.append(await NatsBus.connect(nats_server.url, timeout_s=5))
        return buses[-1]

    pipeline, tap = await start(connect, fleet)
    yield pipeline, tap
    await pipeline.stop()
    for bus in buses:
        await bus.drain()


async def test_over_nats_alone_and_together_twice(over_nats: tuple[Pipeline, Tap]) -> None:
    pipeline, tap = over_nats
    await assert_reference(pipeline, tap, "alone", together=False)
    await assert_reference(pipeline, tap, "together", together=True)
    await assert_reference(pipeline, tap, "alone-again", together=False)
    await pipeline.assert_idle()


async def test_seeded_sampling_does_not_depend_on_its_company(over_nats: tuple[Pipeline, Tap]) -> None:
    pipeline, tap = over_nats

    def body(request: str, seed: int) -> dict[str, Any]:
        question = [{"role": "user", "content": "Tell me about rivers."}]
        sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": seed, "max_tokens": 24}
        return {"model": MODEL, "messages": question, "request_id": request, **sampling}

    await pipeline.client.complete(body("alone", 11))
    bodies = [body(f"crowd-{i}", 100 + i) for i in range(15)]
    bodies.insert(9, body("in-a-crowd", 11))
    await asyncio.gather(*(pipeline.client.complete(b) for b in bodies))
    assert tap.ids["in-a-crowd", 0] == tap.ids["alone", 0]
    assert len({tuple(ids) for ids in tap.ids.values()}) == 16
