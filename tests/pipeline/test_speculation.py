"""Answers with and without drafts are the same, with anything else that a request or a fleet asks for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline

from shared.errors import BadRequest

CHAT: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 40,
    "ignore_eos": True,
    "seed": 7,
}
WAIT = "wait=services.executor.sampling.logits_processors:Wait"
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 3},
    "stream": {"stream": True},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "end tokens": {"ignore_eos": False, "stop_token_ids": list(range(0, 48_000, 750)), "max_tokens": 200},
    "stop strings": {"stop": ["e", "the"], "max_tokens": 200},
    "least length": {"ignore_eos": False, "min_tokens": 20, "stop_token_ids": list(range(300, 48_300, 750))},
    "host-fed": {"logits_processors": ["wait"]},
}
FLEETS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "deep window": {"overlap": "run_ahead", "window": 4},
    "one step": {"overlap": "single"},
    "two batches": {"overlap": "two_batch"},
    "stages": {"sim": "step=300,stages=2,accept=70"},
    "few blocks": {"kv_blocks": 20, "slots": 8, "step_tokens": 32},
}


async def start(**settings: Any) -> Pipeline:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    usual = {"sim": "step=200,accept=70", "speculate": "5", "logits_processors": WAIT}
    return await Pipeline.start(connect, "drafts", **{**usual, **settings})


async def answer(pipeline: Pipeline, body: dict[str, Any]) -> list[tuple[str, str]]:
    """The text and the reason of each choice."""
    if not body.get("stream"):
        choices = (await pipeline.client.complete(body))["choices"]
        return [(choice["message"]["content"], choice["finish_reason"]) for choice in choices]
    text, reason = "", ""
    async for frame in pipeline.client.stream(body):
        for choice in frame.get("choices", ()):
            text += choice.get("delta", {}).get("content", "")
            reason = choice["finish_reason"] or reason
    return [(text, reason)]


def drafts_of(pipeline: Pipeline) -> dict[str, float]:
    drafts: dict[str, float] = pipeline.status("scheduler")["measured"]["drafts"]
    return drafts


@pytest.mark.parametrize("fleet", FLEETS)
async def test_drafts_change_no_answer(fleet: str) -> None:
    pipeline = await start(**FLEETS[fleet])
    bodies = [{**CHAT, **more} for more in REQUESTS.values()]
    without = await asyncio.gather(*(answer(pipeline, {**body, "speculate": False}) for body in bodies))
    assert drafts_of(pipeline)["rows"] == 0
    for _ in range(2):  # the second time from the prefix cache
        assert await asyncio.gather(*(answer(pipeline, body) for body in bodies)) == without
    drafts = drafts_of(pipeline)
    assert drafts["tokens_a_row"] > 1.5
    assert drafts["tokens"] > drafts["accepted"] > 100
    few = fleet == "few blocks"
    assert (pipeline.status("scheduler")["measured"]["tokens"]["preemptions"] > 0) == few
    await pipeline.assert_idle()
    await pipeline.stop()


async def test_speculate_off_gives_no_drafts() -> None:
    pipeline = await start(speculate="off")
    await answer(pipeline, CHAT)
    assert drafts_of(pipeline)["rows"] == 0
    await pipeline.stop()


async def test_usage_counts_the_drafts_of_a_request_with_a_prediction() -> None:
    pipeline = await start()
    plain = (await pipeline.client.complete(CHAT))["usage"]
    assert "completion_tokens_details" not in plain
    before = drafts_of(pipeline)["accepted"]
    predicted = {**CHAT, "prediction": {"type": "content", "content": "The capital of France is Paris."}}
    found = (await pipeline.client.complete(predicted))["usage"]["completion_tokens_details"]
    assert found["accepted_prediction_tokens"] == drafts_of(pipeline)["accepted"] - before > 0
    assert found["rejected_prediction_tokens"] > 0
    await pipeline.stop()


WRONG = ("Paris", {"type": "content"}, {"type": "text", "content": "x"}, {"type": "content", "content": 3})


@pytest.mark.parametrize("wrong", WRONG)
async def test_prediction_of_another_shape_is_the_clients_error(wrong: object) -> None:
    pipeline = await start()
    with pytest.raises(BadRequest) as caught:
        await pipeline.client.complete({**CHAT, "prediction": wrong})
    assert str(caught.value.param).startswith("prediction")
    await pipeline.stop()
