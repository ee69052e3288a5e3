"""A KV cache that holds a part of the context: a request without a length is served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline

from services.launcher.up import Readiness
from shared.client.client import probe
from shared.errors import BadRequest, SetupError
from shared.nats import subjects

MODEL = "smollm2-135m-instruct"
CACHE = 20 * 16  # tokens
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "What is NATS?"}]}


@pytest.fixture
async def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def pipeline(broker: MemoryBroker) -> AsyncIterator[Pipeline]:
    async def connect() -> Any:
        return broker.connect()

    running = await Pipeline.start(connect, "small", kv_blocks=20, block_tokens=16)
    yield running
    await running.stop()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_chat_that_names_no_length_gets_what_fits(pipeline: Pipeline, n: int) -> None:
    answer = await pipeline.client.complete({**CHAT, "n": n, "ignore_eos": True})
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * n
    usage = answer["usage"]
    each = usage["prompt_tokens"] + usage["completion_tokens"] // n
    assert each == CACHE if n == 1 else CACHE // 2 < each < CACHE
    await pipeline.assert_idle()


async def test_a_completion_that_names_no_length_gets_what_fits(pipeline: Pipeline) -> None:
    asked = {"model": MODEL, "prompt": [5] * (CACHE - 3), "ignore_eos": True}
    answer = await pipeline.client.complete(asked)
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("more", "param"), [({"max_tokens": 400}, "max_tokens"), ({"prompt": [5] * CACHE}, "prompt")]
)
async def test_request_that_does_not_fit_is_refused_by_its_field(
    pipeline: Pipeline, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest, match="the KV cache holds 320") as refused:
        await pipeline.client.complete({"model": MODEL, "prompt": "Hello", **more})
    assert refused.value.param == param


async def test_the_context_that_there_is_shows_everywhere(pipeline: Pipeline, broker: MemoryBroker) -> None:
    await pipeline.until(lambda: pipeline.status("tokenizer")["context"] == CACHE)
    listed = await pipeline.client.request(subjects.models("public"))
    assert [(entry["id"], entry["max_model_len"]) for entry in listed["data"]] == [(MODEL, CACHE)]
    assert pipeline.status("executor")["context"] == CACHE
    assert pipeline.status("scheduler")["executors"]["executor-1"]["context"] == CACHE
    readiness = Readiness(broker.connect(), "small")
    await readiness.wait([MODEL], print)
    why = "the KV cache holds no more of the model's 8,192, see kv_blocks"
    assert readiness.context(MODEL) == f"320 tokens: {why}"


@pytest.mark.parametrize(
    ("sizes", "context", "cure"),
    [({"max_context": 30}, 30, "max_context"), ({"kv_blocks": 1}, 16, "kv_blocks times block_tokens")],
)
async def test_a_context_without_room_for_a_chat_of_one_word_ends_the_start(
    sizes: dict[str, int], context: int, cure: str, broker: MemoryBroker
) -> None:
    async def connect() -> Any:
        return broker.connect()

    pipeline = await Pipeline.start(connect, "small", **{"kv_blocks": 20, "block_tokens": 16, **sizes})
    try:
        with pytest.raises(SetupError) as short:
            await Readiness(broker.connect(), "small").wait([MODEL], print)
    finally:
        await pipeline.stop()
    assert short.value.message == (
        f"a chat of one word and its answer take 32 tokens, and the context of {MODEL} is {context}: raise "
        f"{cure} to 32 or more"
    )


async def test_readiness_check_sends_a_users_request_and_leaves_nothing(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    written = type(pipeline.client)._written

    def seen(self: Any, model: str, body: dict[str, Any]) -> tuple[str, bytes]:
        asked.append(body)
        return written(self, model, body)

    monkeypatch.setattr(type(pipeline.client), "_written", seen)
    await probe(pipeline.client, MODEL)
    assert [body["messages"] for body in asked] == [[{"role": "user", "content": "Hello"}]]
    assert "max_tokens" not in asked[0]
    assert pipeline.client.waiting == 0
    await pipeline.assert_idle()


async def test_readiness_check_sends_a_completion_to_a_model_without_a_template(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.runtimes["tokenizer-1"].actor._model.template, "_template", None)  # type: ignore[attr-defined]
    with pytest.raises(BadRequest, match="no chat template"):
        await pipeline.client.complete(CHAT)
    await probe(pipeline.client, MODEL)
    await pipeline.assert_idle()
