"""SmolLM2-135M in f32 through all five services: the reference ids of transformers, at any
window, the chunk budget and the company. Ids are read off the wire, not guessed from text. One step at a
time: test_kv_real_model.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Connect, Pipeline
from support.token_tap import Tap

from shared.nats.bus import NatsBus

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
MODEL = "smollm2-135m-instruct"


async def start(connect: Connect, fleet: str, **settings: Any) -> tuple[Pipeline, Tap]:
    few = {"kv_blocks": 200, **settings}  # enough: the usual GiB of each test would fill a small machine
    pipeline = await Pipeline.start(connect, fleet, backend="torch", dtype="f32", **few)
    tap = Tap()
    await (await connect()).subscribe(f"hr.{fleet}.detokenizer.*.in.*", tap.take)
    return pipeline, tap


async def greedy(pipeline: Pipeline, case: dict[str, Any], request: str, tokens: int) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": case["prompt"]}],
        "temperature": 0,
        "max_tokens": tokens,
        "request_id": request,
    }
    await pipeline.client.complete(body)


async def assert_reference(
    pipeline: Pipeline, tap: Tap, round_name: str, together: bool, tokens: int = 12
) -> None:
    requests = [f"{round_name}-{i}" for i in range(len(CASES))]
    work = [greedy(pipeline, case, name, tokens) for case, name in zip(CASES, requests, strict=True)]
    if together:
        await asyncio.gather(*work)
    else:
        for one in work:
            await one
    for case, request in zip(CASES, requests, strict=True):
        assert tap.ids[request, 0] == case["output_ids"][:tokens], case["prompt"]


MODES: dict[str, dict[str, Any]] = {
    "run ahead, small chunks": {"overlap": "run_ahead", "window": 4, "step_tokens": 16},
    "two batches, prompts first": {
        "overlap": "two_batch", "policy": "batching=prefill_first,reservation=reserve"
    },
    "too few blocks": {"kv_blocks": 8, "slots": 8},
    "drafts": {"speculate": "8"},
}  # fmt: skip


async def in_memory(**settings: Any) -> tuple[Pipeline, Tap]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    return await start(connect, "real", **settings)


@pytest.mark.parametrize("mode", MODES)
async def test_greedy_ids_equal_the_reference(mode: str) -> None:
    """The second round finds its prompts in the prefix cache; too few blocks make sequences pause."""
    pipeline, tap = await in_memory(**MODES[mode])
    few = mode == "too few blocks"
    await assert_reference(pipeline, tap, "together", together=True, tokens=24 if few else 12)
    await assert_reference(pipeline, tap, "again", together=True, tokens=4)
    meter = pipeline.runtimes["scheduler-1"].actor._core.state.counters  # type: ignore[attr-defined]  # white box
    assert meter.prefix_hit_tokens > 0
    assert (meter.preemptions > 0) == few
    await pipeline.assert_idle()
    await pipeline.stop()


async def test_a_second_turn_computes_only_what_is_new() -> None:
    pipeline, _ = await in_memory()
    messages = [{"role": "user", "content": CASES[0]["prompt"]}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 40}
    first = await pipeline.client.complete(body)
    answer = first["choices"][0]["message"]
    more = [*messages, answer, {"role": "user", "content": "And what else?"}]
    second = await pipeline.client.complete({**body, "messages": more})
    usage = first["usage"]
    known = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # the last token's KV was never needed
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    await pipeline.stop()


@pytest.fixture
async def over_nats(nats_server: Any, fleet: str) -> AsyncIterator[tuple[Pipeline, Tap]]:
    buses = []

    async def connect() -> NatsBus:
        buses.append(await NatsBus.connect(nats_server.url, timeout_s=30))
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
    await assert_reference(pipeline, tap, "alone-again", together=False, tokens=4)
    await pipeline.assert_idle()


async def test_seeded_sampling_does_not_depend_on_its_company(over_nats: tuple[Pipeline, Tap]) -> None:
    pipeline, tap = over_nats

    def body(request: str, seed: int) -> dict[str, Any]:
        question = [{"role": "user", "content": "Describe some rivers."}]
        sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": seed, "max_tokens": 24}
        return {"model": MODEL, "messages": question, "request_id": request, **sampling}

    await pipeline.client.complete(body("alone", 11))
    bodies = [body(f"crowd-{i}", 100 + i) for i in range(15)]
    bodies.insert(9, body("in-a-crowd", 11))
    await asyncio.gather(*(pipeline.client.complete(b) for b in bodies))
    assert tap.ids["in-a-crowd", 0] == tap.ids["alone", 0]
    assert len({tuple(ids) for ids in tap.ids.values()}) == 16
